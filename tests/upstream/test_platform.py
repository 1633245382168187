"""What the platform, the worker and the entry points lean on in vLLM. Each test says what breaks with it."""

import ast
import inspect
import logging
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.plugins
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform, resolve_current_platform_cls_qualname
from vllm.platforms.interface import Platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.executor import abstract, uniproc_executor
from vllm.v1.worker.worker_base import WorkerBase
from vllm_tt_plugin.platform import TTPlatform
from vllm_tt_plugin.worker import TTWorker

from .conftest import MakeConfig

CALLED_ON_EVERY_WORKER = {
    *(
        "determine_available_memory",
        "get_kv_cache_spec",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
    ),
    *("initialize_from_config", "compile_or_warm_up_model", "shutdown"),
}
CALLED_WITH_FEATURES_THAT_ARE_NOT_OFFERED = {
    *("add_lora", "remove_lora", "pin_lora", "list_loras", "take_draft_token_ids"),
    *("get_kv_connector_handshake_metadata", "execute_dummy_batch", "sleep", "wake_up", "discard"),
    *("reset_mm_cache", "reset_encoder_cache", "get_simple_cpu_offload_num_cpu_blocks"),
    *("save_sharded_state", "profile"),
}


def test_the_groups_of_entry_points_are_those_that_vllm_reads() -> None:
    """If not: vLLM never finds the plugin, and another platform serves in its place."""
    assert vllm.plugins.PLATFORM_PLUGINS_GROUP == "vllm.platform_plugins"
    assert vllm.plugins.DEFAULT_PLUGINS_GROUP == "vllm.general_plugins"
    assert "tt" in entry_points(group=vllm.plugins.PLATFORM_PLUGINS_GROUP).names
    assert "tt_model_registry" in entry_points(group=vllm.plugins.DEFAULT_PLUGINS_GROUP).names


def test_a_platform_that_raises_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why `platform_plugin` raises nothing and a broken ttnn is refused later. If not: it may raise."""

    def broken() -> str:
        raise RuntimeError("broken")

    monkeypatch.setattr("vllm.platforms.load_plugins_by_group", lambda _: {"broken": broken})
    assert "broken" not in resolve_current_platform_cls_qualname()


def test_a_general_plugin_that_raises_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """If not: another version of vLLM is met in silence."""

    def broken() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    monkeypatch.setattr(vllm.plugins, "load_plugins_by_group", lambda group: {"broken": broken})
    with pytest.raises(RuntimeError, match="broken"):
        vllm.plugins.load_general_plugins()


def test_the_defaults_of_a_platform_that_are_overridden_are_still_there_and_still_wrong_for_us() -> None:
    """If a hook is gone or renamed, ours is dead: vLLM would pin memory, compile, or look for its kernels."""
    platform = Platform()
    assert platform.simple_compile_backend == "inductor"
    assert "vllm._C" in inspect.getsource(Platform.import_kernels)
    assert "vllm.kernels" in inspect.getsource(Platform.import_ir_kernels)
    for name in vars(TTPlatform):
        if not name.startswith("__") and name != "_abc_impl":
            assert hasattr(Platform, name) or name in Platform.__annotations__, name
    with pytest.raises(NotImplementedError):
        Platform.set_device(torch.device("cpu"))


def test_vllm_asks_the_platform_whether_memory_can_be_pinned() -> None:
    """If not: tensors of the sampler are pinned, which fails without a GPU driver."""
    from vllm.utils.torch_utils import PIN_MEMORY

    assert isinstance(current_platform, TTPlatform)
    assert PIN_MEMORY is False


def test_defaults_are_asked_for_before_the_check(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If not: what is switched off in the first hook comes after vLLM branched on it."""
    called: list[str] = []
    for hook in ("apply_config_platform_defaults", "check_and_update_config"):
        original = getattr(TTPlatform, hook)

        def recorded(config: VllmConfig, name: str = hook, run: Any = original) -> None:
            called.append(name)
            run(config)

        monkeypatch.setattr(TTPlatform, hook, staticmethod(recorded))
    make_config()
    assert called == ["apply_config_platform_defaults", "check_and_update_config"]


def test_a_scheduler_class_is_taken_with_a_warning_only(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """If not: vLLM refuses TTScheduler, or runs its own."""
    config = make_config().scheduler_config
    chosen = config.get_scheduler_cls()
    assert chosen.__module__ + "." + chosen.__name__ == "vllm_tt_plugin.scheduler.TTScheduler"
    assert issubclass(chosen, Scheduler)
    assert all(record.levelno <= logging.WARNING for record in caplog.records)


def test_validate_request_is_asked_and_its_own_error_becomes_a_400(make_config: MakeConfig) -> None:
    """If not: prompt logprobs are served as nothing, or refused as our own failure."""
    renderer: Any = SimpleNamespace(tokenizer=None, _executor=None)
    processor = InputProcessor(make_config(), renderer=renderer)
    prompt: Any = {"type": "token", "prompt_token_ids": [1, 2, 3]}
    with pytest.raises(VLLMValidationError) as caught:
        processor.process_inputs("a", prompt, SamplingParams(prompt_logprobs=1, max_tokens=1), ("generate",))
    refused = create_error_response(caught.value).error
    assert (refused.code, refused.param) == (400, "prompt_logprobs")
    assert create_error_response(RuntimeError("any other")).error.code == 500


def called_by(module: Any) -> set[str]:
    """The names of the worker's methods that a module of executors calls by name."""
    calls = (node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call))
    return {
        str(call.args[0].value)
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "collective_rpc"
        and call.args
        and isinstance(call.args[0], ast.Constant)
    }


def test_the_methods_that_executors_call_on_a_worker_are_known() -> None:
    """If there is another one: decide whether TTWorker needs it."""
    called = called_by(abstract) | called_by(uniproc_executor)
    assert called >= CALLED_ON_EVERY_WORKER
    unknown = called - CALLED_ON_EVERY_WORKER - CALLED_WITH_FEATURES_THAT_ARE_NOT_OFFERED
    done_by_the_base = {"check_health", "set_kv_cache_layout", "supports_draft_weight_updates"}
    assert unknown <= done_by_the_base | {"execute_model", "sample_tokens"}
    for name in called - CALLED_WITH_FEATURES_THAT_ARE_NOT_OFFERED:
        assert callable(getattr(TTWorker, name)), name


def test_a_worker_overrides_what_the_base_does_not_do() -> None:
    """If vLLM adds an abstract method, it raises NotImplementedError in the middle of a start."""
    left_out = {"get_cache_block_size_bytes", "add_lora", "remove_lora", "pin_lora", "list_loras"}
    abstract_ones = {
        name
        for name, member in vars(WorkerBase).items()
        if inspect.isfunction(member) and "raise NotImplementedError" in inspect.getsource(member)
    }
    assert {name for name in abstract_ones - left_out if name not in vars(TTWorker)} == set()


def test_a_layout_by_name_is_what_vllm_asks_the_worker_for() -> None:
    """If not: start-up looks for an attention backend and fails."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    names = TTWorker.get_supported_kv_cache_layouts(TTWorker.__new__(TTWorker))
    assert {KVCacheLayout[name] for name in names} == set(KVCacheLayout)


def test_the_installed_vllm_is_the_one_that_is_supported() -> None:
    """If not: every other test here speaks of another vLLM."""
    from importlib.metadata import version

    from vllm_tt_plugin.entrypoints import SUPPORTED_VLLM

    assert version("vllm").startswith(SUPPORTED_VLLM + ".")
