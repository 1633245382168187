"""The platform hooks and the checks behind them, on configurations that vLLM itself made."""

import copy
import importlib
import os
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from tt_registry import Capabilities
from vllm.config import KVTransferConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensInput
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm_tt_plugin import entrypoints, mesh_ttnn
from vllm_tt_plugin.checks import problems_of, switch_off_undeclared
from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.errors import ConfigurationError
from vllm_tt_plugin.mesh_ttnn import Probe
from vllm_tt_plugin.platform import SCHEDULER_CLASS, WORKER_CLASS, TTPlatform
from vllm_tt_plugin.served_model import ServedModel

from .conftest import ARCHITECTURE, MakeConfig

PROMPT = TokensInput(type="token", prompt_token_ids=[1, 2])
EVERYTHING = Capabilities(
    supports_prefix_caching=True,
    supports_chunked_prefill=True,
    supports_async_decode=True,
    supports_sample_on_device=True,
)


def able(capabilities: Capabilities = EVERYTHING) -> ServedModel:
    """The served model, as if its class declared these."""
    return attrs.evolve(ServedModel.find([ARCHITECTURE], os.environ), capabilities=capabilities)


def settings(config: Any) -> dict[str, Any]:
    """All that the hooks may write."""
    return {
        "worker": config.parallel_config.worker_cls,
        "scheduler": config.scheduler_config.scheduler_cls,
        "prefix": config.cache_config.enable_prefix_caching,
        "block": config.cache_config.block_size,
        "chunks": config.scheduler_config.enable_chunked_prefill,
        "async": config.scheduler_config.async_scheduling,
        "budget": config.scheduler_config.max_num_batched_tokens,
        "longest": config.model_config.max_model_len,
    }


@pytest.mark.parametrize("path", [WORKER_CLASS, SCHEDULER_CLASS, entrypoints.TT_PLATFORM])
def test_paths_that_vllm_imports(path: str) -> None:
    module, name = path.rsplit(".", 1)
    assert isinstance(getattr(importlib.import_module(module), name), type)


def test_the_platform_is_ours_where_a_host_mesh_is_asked_for() -> None:
    assert isinstance(current_platform, TTPlatform)


@pytest.mark.parametrize(
    ("mesh", "installed", "active"),
    [
        ("host", False, True),
        ("host:8x4", False, True),
        ("", True, True),
        ("", False, False),
        ("T3K", False, False),
    ],
)
def test_when_the_plugin_steps_in(
    monkeypatch: pytest.MonkeyPatch, mesh: str, installed: bool, active: bool
) -> None:
    monkeypatch.setenv("MESH_DEVICE", mesh)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    assert entrypoints.platform_plugin() == (entrypoints.TT_PLATFORM if active else None)


def test_a_configuration_that_can_be_served(make_config: MakeConfig) -> None:
    config = make_config(max_num_batched_tokens=64, max_num_seqs=4)
    assert settings(config) == {
        "worker": WORKER_CLASS,
        "scheduler": SCHEDULER_CLASS,
        "prefix": False,  # the adapter does not declare it
        "block": 4,
        "chunks": True,
        "async": False,
        "budget": 64,
        "longest": 128,
    }


@pytest.mark.parametrize("given", [0, 7])
def test_front_ends_wait_for_the_engine(make_config: MakeConfig, given: int) -> None:
    config = make_config(shutdown_timeout=given)
    assert config.shutdown_timeout == given or given == 0
    assert config.shutdown_timeout > 0
    before = config.shutdown_timeout
    TTPlatform.check_and_update_config(config)
    assert config.shutdown_timeout == before


def test_the_hooks_change_nothing_the_second_time(
    make_config: MakeConfig, plugin_log: pytest.LogCaptureFixture
) -> None:
    config = make_config()
    before = copy.deepcopy(settings(config))
    plugin_log.clear()
    TTPlatform.apply_config_platform_defaults(config)
    TTPlatform.check_and_update_config(config)
    assert settings(config) == before
    assert plugin_log.messages == []


def test_every_switch_off_says_why(make_config: MakeConfig, plugin_log: pytest.LogCaptureFixture) -> None:
    config = make_config()
    config.cache_config.enable_prefix_caching = True
    config.scheduler_config.async_scheduling = True
    config.scheduler_config.enable_chunked_prefill = True
    config.scheduler_config.max_num_batched_tokens = 16
    plugin_log.clear()
    switch_off_undeclared(config, TTConfig(), Capabilities())
    assert settings(config) | {"prefix": False, "async": False, "chunks": False, "budget": 128} == settings(
        config
    )
    said = "\n".join(plugin_log.messages)
    for words in (
        "supports_prefix_caching",
        "Async scheduling",
        "supports_chunked_prefill",
        "from 16 to 128",
    ):
        assert words in said
    plugin_log.clear()
    switch_off_undeclared(config, TTConfig(), Capabilities())
    assert plugin_log.messages == []


@pytest.mark.parametrize("declared", [False, True])
def test_kv_cache_groups_are_for_models_that_take_them(make_config: MakeConfig, declared: bool) -> None:
    scheduler = (config := make_config()).scheduler_config
    scheduler.disable_hybrid_kv_cache_manager = False
    switch_off_undeclared(config, TTConfig(), Capabilities(hybrid_kv_cache_groups=declared))
    assert scheduler.disable_hybrid_kv_cache_manager is not declared


def test_embeddings_of_images_are_refused(make_config: MakeConfig) -> None:
    config = make_config()
    for asked in (False, True):
        config.model_config.multimodal_config = MultiModalConfig(enable_mm_embeds=asked)
        found = [problem.found for problem in problems_of(config, None, (1, 1))]
        assert found == ["embeddings of images are asked for"][: int(asked)]


ON_DEVICE = TTConfig(sample_on_device_mode="decode_only")


@pytest.mark.parametrize(
    ("tt", "declared", "reason"),
    [
        (ON_DEVICE, EVERYTHING, None),
        (TTConfig(), EVERYTHING, "sampled on the host"),
        (attrs.evolve(ON_DEVICE, always_compat_sampling=True), EVERYTHING, "sampled on the host"),
        (attrs.evolve(ON_DEVICE, trace_mode="none"), EVERYTHING, "trace_mode"),
        (ON_DEVICE, attrs.evolve(EVERYTHING, supports_async_decode=False), "supports_async_decode"),
        (ON_DEVICE, attrs.evolve(EVERYTHING, supports_sample_on_device=False), "supports_sample_on_device"),
    ],
)
def test_decodes_overlap_where_the_device_can_go_on_alone(
    make_config: MakeConfig,
    plugin_log: pytest.LogCaptureFixture,
    tt: TTConfig,
    declared: Capabilities,
    reason: str | None,
) -> None:
    config = make_config()
    config.scheduler_config.async_scheduling = True
    plugin_log.clear()
    switch_off_undeclared(config, tt, declared)
    assert config.scheduler_config.async_scheduling is (reason is None)
    assert (reason is None) == (plugin_log.messages == [])
    assert all(reason in message for message in plugin_log.messages if reason)


def test_decodes_do_not_overlap_with_a_worker_in_another_process(make_config: MakeConfig) -> None:
    config = make_config()
    config.scheduler_config.async_scheduling = True
    config.parallel_config.distributed_executor_backend = "mp"
    switch_off_undeclared(config, ON_DEVICE, EVERYTHING)
    assert config.scheduler_config.async_scheduling is False


def test_no_async_scheduling_is_obeyed(make_config: MakeConfig, plugin_log: pytest.LogCaptureFixture) -> None:
    config = make_config()
    config.scheduler_config.async_scheduling = False
    plugin_log.clear()
    switch_off_undeclared(config, ON_DEVICE, EVERYTHING)
    assert config.scheduler_config.async_scheduling is False
    assert plugin_log.messages == []


def test_what_is_declared_stays_on(make_config: MakeConfig) -> None:
    config = make_config(max_num_batched_tokens=32)
    config.cache_config.enable_prefix_caching = True
    switch_off_undeclared(config, TTConfig(), EVERYTHING)
    assert settings(config) | {"prefix": True, "chunks": True, "budget": 32} == settings(config)


def test_a_decode_of_all_sequences_fits_the_budget(make_config: MakeConfig) -> None:
    config = make_config(max_num_batched_tokens=64, max_num_seqs=4)
    config.scheduler_config.max_num_seqs = 100
    switch_off_undeclared(config, TTConfig(), EVERYTHING)
    assert config.scheduler_config.max_num_batched_tokens == 100


def test_one_message_lists_everything(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_DEVICE", "N151")
    monkeypatch.setenv("TT_VLLM_BUILTIN_MODELS", "0")
    monkeypatch.delenv("EXTRA_MODELS_DIR")
    with pytest.raises(ValueError, match="cannot serve this configuration") as caught:
        make_config(
            additional_config={"tt": {"trace_mod": "all", "optimizations": "speed"}},
            kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
            speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
        )
    message = str(caught.value)
    for words in (
        "trace_mode",
        "'speed'",
        "MESH_DEVICE is 'N151'",
        "HashForCausalLM",
        "connector",
        "speculative",
    ):
        assert words in message
    assert "\n  6. " in message


PARALLEL = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
    "nnodes",
)


@pytest.mark.parametrize("size", PARALLEL)
def test_parallel_sizes_are_refused(make_config: MakeConfig, size: str) -> None:
    config = make_config()
    setattr(config.parallel_config, size, 2)
    (problem,) = problems_of(config, able(), (1, 1))
    assert " 2" in problem.found
    assert problem.fix


def test_unservable_features_are_refused_together(make_config: MakeConfig) -> None:
    config = make_config()
    config.parallel_config.distributed_executor_backend = "ray"
    config.parallel_config.data_parallel_backend = "ray"
    config.kv_transfer_config = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    config.model_config.enable_prompt_embeds = True
    config.model_config.runner_type = "pooling"
    blocks = attrs.evolve(EVERYTHING, output_tokens_per_step=4)
    found = "\n".join(problem.found for problem in problems_of(config, able(blocks), (1, 1)))
    for words in (
        "executor-backend is 'ray'",
        "backend ray",
        "connector",
        "prompt embeddings",
        "pooling",
        "=4",
    ):
        assert words in found
    assert len(found.splitlines()) == 6


def test_an_encoder_decoder_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match="is an encoder-decoder model"):
        make_config(hf_overrides={"is_encoder_decoder": True})


@pytest.mark.parametrize(
    ("mesh", "probe", "says"),
    [
        ("T3K", Probe(failure="libtt_metal.so: cannot open"), "libtt_metal.so: cannot open"),
        ("T3K", Probe(chips=0), "no Tenstorrent chip was found"),
        ("T3K", Probe(chips=4), "1x8 chips and 4 are visible"),
        ("T3K", Probe(chips=8), None),
        ("", Probe(chips=1), None),
        (
            "",
            Probe(chips=1, fabric_names=("FABRIC_1D", "FABRIC_2D")),
            "'RING'. Expected one of FABRIC_1D, FABRIC_2D",
        ),
        ("", Probe(chips=1, fabric_names=("RING",)), None),
    ],
)
def test_what_is_seen_of_the_chips(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, mesh: str, probe: Probe, says: str | None
) -> None:
    config = make_config(additional_config={"tt": {"fabric_config": "RING"}})
    monkeypatch.setenv("MESH_DEVICE", mesh)
    monkeypatch.setattr(mesh_ttnn, "probe", lambda: probe)
    if says is None:
        TTPlatform.check_and_update_config(config)
    else:
        with pytest.raises(ConfigurationError, match=says):
            TTPlatform.check_and_update_config(config)


@pytest.mark.parametrize(
    ("parameter", "value"), [("prompt_logprobs", 0), ("prompt_logprobs", 3), ("thinking_token_budget", 10)]
)
def test_requests_that_no_step_can_compute(parameter: str, value: int) -> None:
    options: dict[str, Any] = {parameter: value}
    with pytest.raises(VLLMValidationError, match=parameter):
        TTPlatform.validate_request(PROMPT, SamplingParams(**options))


def test_other_requests_pass() -> None:
    TTPlatform.validate_request(PROMPT, SamplingParams(logprobs=5, seed=-1, min_p=0.1, n=3))


def test_a_bundle_that_does_not_import_is_refused(
    make_config: MakeConfig, serve_bundle: Callable[[str], None]
) -> None:
    config = make_config()
    serve_bundle("NoSuchClass")
    with pytest.raises(ConfigurationError, match="NoSuchClass"):
        TTPlatform.check_and_update_config(config)
