"""What is really passed to adapters, compared with the contract argument by argument."""

from typing import Any

import attrs
import numpy as np
import pytest
import torch
from tt_registry import Capabilities
from tt_sampling import ReloadCommands, TTSamplingParams
from vllm_tt_plugin.adapter import Adapter
from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.errors import StepError
from vllm_tt_plugin.images import Inputs, PrefillImages
from vllm_tt_plugin.kv_cache import LayerCache, PageTables
from vllm_tt_plugin.mesh import HostMesh
from vllm_tt_plugin.step_data import DecodeInputs, DeviceSampling, PrefillInputs, StepResult
from vllm_tt_plugin.warmup import warm_up

from .conftest import MakeConfig, with_lanes
from .strict_adapters import (
    VOCAB,
    Grouped,
    HostSampled,
    KeywordOnly,
    Language,
    Seeing,
    Version0,
    Version1,
    logits,
)

LAYERS = [LayerCache((10, 2, 4, 8), torch.bfloat16, tensor_index=index) for index in range(3)]
CLASSES: list[type[Language]] = [HostSampled, Version0, Version1]

PREFILL = {"tokens", "page_table", "kv_cache", "enable_trace", "prompt_lens", "start_pos", "empty_slots"}
DECODE = {"tokens", "page_table", "kv_cache", "start_pos", "enable_trace", "read_from_device"}
COMMANDS = {"reload_inputs", "reload_page_table", "reload_sampling_params", "reset_sampling_state"}
FIRST = ReloadCommands(reload_inputs=True, reload_sampling_params=True, reset_sampling_state=True)


def adapter(cls: type[Language], lanes: int = 1, **settings: Any) -> Adapter:
    model = cls()
    capabilities = Capabilities.from_class(cls)
    mesh = HostMesh.open((1, 1))
    made = Adapter(model, capabilities, mesh, TTConfig.parse(settings), max_rows=4, lanes=lanes)
    made.allocate(LAYERS, page_table_width=5)
    return made


def prefill_inputs() -> PrefillInputs:
    return PrefillInputs(
        tokens=torch.tensor([[1, 2, 3], [4, 5, 0]], dtype=torch.int32),
        page_table=torch.tensor([[1, 0, 0, 0, 0], [2, 0, 0, 0, 0]], dtype=torch.int32),
        prompt_lens=np.array([3, 2]),
        start_pos=np.array([0, 0], np.int32),
        empty_slots=[0, 2],
    )


def decode_inputs() -> DecodeInputs:
    return DecodeInputs(
        tokens=torch.tensor([[9], [0], [8], [0]], dtype=torch.int32),
        start_pos=torch.tensor([3, -1, 2, -1], dtype=torch.int32),
        page_table=torch.tensor([[1, 0, 0, 0, 0], [0] * 5, [2, 0, 0, 0, 0], [0] * 5], dtype=torch.int32),
    )


def run_decode(made: Adapter, *arguments: Any) -> StepResult:
    return made.read_decode(made.submit_decode(*arguments))


def sampling(penalties: bool) -> DeviceSampling:
    histories = (torch.full((4, 1), -1), torch.full((4, 2), -1)) if penalties else ()
    return DeviceSampling(TTSamplingParams.neutral(4), *histories)


def passed(made: Adapter, method: str) -> list[dict[str, Any]]:
    """The keyword arguments of each call of `method`; there may be no others."""
    calls = [(args, kwargs) for name, args, kwargs in made.model.calls if name == method]
    assert all(args == () for args, _ in calls)
    return [kwargs for _, kwargs in calls]


@pytest.mark.parametrize("cls", CLASSES)
def test_a_prefill_that_the_host_samples(cls: type[Language]) -> None:
    made = adapter(cls)
    result = made.prefill(prefill_inputs(), None)
    (arguments,) = passed(made, "prefill_forward")
    assert set(arguments) == PREFILL
    assert arguments["kv_cache"] is made.kv_cache
    assert (arguments["enable_trace"], arguments["empty_slots"]) == (True, [0, 2])
    assert result.tokens is None
    assert result.logits is not None
    assert result.logits.shape == (2, VOCAB)


@pytest.mark.parametrize(("lanes", "kind"), [(1, np.ndarray), (2, torch.Tensor)])
def test_the_start_of_chunks_is_a_tensor_in_lanes(lanes: int, kind: type[Any]) -> None:
    made = adapter(HostSampled, lanes)
    made.prefill(prefill_inputs(), None)
    (arguments,) = passed(made, "prefill_forward")
    assert isinstance(arguments["start_pos"], kind)
    assert arguments["start_pos"].tolist() == [0, 0]
    assert isinstance(arguments["prompt_lens"], np.ndarray)


@pytest.mark.parametrize("cls", [Version0, Version1])
def test_a_prefill_that_the_device_samples(cls: type[Language]) -> None:
    made = adapter(cls)
    wanted = sampling(penalties=False)
    result = made.prefill(prefill_inputs(), wanted)
    (arguments,) = passed(made, "prefill_forward")
    assert set(arguments) == PREFILL | {"sampling_params"}
    assert arguments["sampling_params"] is wanted.params
    assert result.logits is None
    assert result.tokens is not None
    assert result.tokens.shape == (2,)


@pytest.mark.parametrize(
    ("cls", "wanted", "extra"),
    [
        (HostSampled, None, set()),
        (Version0, None, set()),
        (Version0, sampling(False), {"sampling_params", "reset_batch"}),
        (Version0, sampling(True), {"sampling_params", "reset_batch", "prompt_tokens", "output_tokens"}),
        (Version1, None, COMMANDS),
        (Version1, sampling(False), COMMANDS | {"sampling_params"}),
        (Version1, sampling(True), COMMANDS | {"sampling_params", "prompt_tokens", "output_tokens"}),
    ],
    ids=["no device sampling", "v0 host", "v0", "v0 penalties", "v1 host", "v1", "v1 penalties"],
)
def test_a_decode_gets_exactly_the_contracts_arguments(
    cls: type[Language], wanted: DeviceSampling | None, extra: set[str]
) -> None:
    made = adapter(cls)
    inputs = decode_inputs()
    run_decode(made, inputs, wanted, FIRST)
    (arguments,) = passed(made, "decode_forward")
    assert set(arguments) == DECODE | extra
    assert (arguments["tokens"], arguments["start_pos"]) == (inputs.tokens, inputs.start_pos)
    assert (arguments["enable_trace"], arguments["read_from_device"]) == (True, False)
    given = {name: arguments[name] for name in COMMANDS & set(arguments)}
    assert given == (attrs.asdict(FIRST) if cls is Version1 else {})
    if wanted is not None and wanted.prompt_tokens is not None:
        assert arguments["prompt_tokens"] is wanted.prompt_tokens
        assert arguments["output_tokens"] is wanted.output_tokens


def test_layers_that_differ_are_allocated_one_by_one() -> None:
    made = adapter(Grouped)
    layers = [
        attrs.evolve(layer, group=min(index, 1), tensor_index=index // 2)
        for index, layer in enumerate(LAYERS)
    ]
    made.allocate(layers, page_table_width=5)
    assert made.model.allocated == tuple(
        (layer.shape, layer.dtype, index) for layer, index in zip(layers, (0, 0, 1), strict=True)
    )
    assert made.page_tables == PageTables(5, (0, 1, 1))
    made.allocate([attrs.evolve(LAYERS[0], shape=(9, 1, 4, 8)), *LAYERS[1:]], page_table_width=5)
    assert made.page_tables == PageTables(5), "one group, of layers with other heads"
    assert made.model.allocated[0][0] == (9, 1, 4, 8)


def test_page_tables_by_layer_are_passed_where_there_are_several_groups() -> None:
    made = adapter(Grouped)
    made.kv_cache = [made.kv_cache, made.kv_cache.clone()]
    tables = [torch.tensor([[group + 1, 0, 0, 0, 0], *3 * [5 * [0]]], dtype=torch.int32) for group in (0, 1)]
    inputs = attrs.evolve(prefill_inputs(), page_tables_per_layer=tables)
    inputs.page_table[1] = 0
    made.prefill(inputs, None)
    assert set(passed(made, "prefill_forward")[0]) == PREFILL | {"page_tables_per_layer"}
    decode = attrs.evolve(decode_inputs(), page_tables_per_layer=tables)
    decode.page_table[2] = 0
    run_decode(made, decode, None, FIRST)
    (arguments,) = passed(made, "decode_forward")
    assert set(arguments) == DECODE | COMMANDS | {"page_tables_per_layer"}
    assert arguments["page_tables_per_layer"] is tables


@pytest.mark.parametrize("wanted", [None, sampling(False)], ids=["host", "device"])
def test_images_and_rope_deltas(wanted: DeviceSampling | None) -> None:
    made = adapter(Seeing)
    made.inputs = Inputs(images=True, rope_deltas=True)
    pixels, grid = torch.tensor([7]), torch.tensor([1, 2, 2])
    images = PrefillImages([[pixels], None], [[grid], None])
    result = made.prefill(attrs.evolve(prefill_inputs(), images=images), wanted)
    (arguments,) = passed(made, "prefill_forward")
    assert set(arguments) - {"sampling_params"} == PREFILL | {"pixel_values", "image_grid_thw"}
    assert (arguments["pixel_values"], arguments["image_grid_thw"]) == ([[pixels], None], [[grid], None])
    assert result.rope_deltas == [7, 0]
    assert (result.tokens is None) == (wanted is None)
    for deltas in ([7, 0, 5], None):
        run_decode(made, attrs.evolve(decode_inputs(), rope_deltas=deltas), wanted, FIRST)
    assert [call["rope_deltas_all_users"] for call in passed(made, "decode_forward")] == [[7, 0, 5], None]


@pytest.mark.parametrize(
    ("commands", "reset"),
    [
        (ReloadCommands(), False),
        (ReloadCommands(reload_page_table=True), False),
        (ReloadCommands(reload_inputs=True, reload_sampling_params=True), True),
        (FIRST, True),
    ],
)
def test_the_commands_in_both_versions(commands: ReloadCommands, reset: bool) -> None:
    made = {cls: adapter(cls) for cls in (Version0, Version1)}
    for one in made.values():
        run_decode(one, decode_inputs(), sampling(False), FIRST)
        run_decode(one, decode_inputs(), sampling(False), commands)
    assert passed(made[Version0], "decode_forward")[1]["reset_batch"] is reset
    arguments = passed(made[Version1], "decode_forward")[1]
    assert {name: arguments[name] for name in COMMANDS} == attrs.asdict(commands)


def test_logits_that_the_adapter_gives_on_the_host_are_not_read_again() -> None:
    made = adapter(HostSampled)
    result = run_decode(made, decode_inputs(), None, FIRST)
    assert [name for name, _, _ in made.model.calls] == ["decode_forward"]
    assert result.logits is not None
    assert result.logits.shape == (4, VOCAB)


@attrs.define
class CountingMesh:
    waited: list[Any] = attrs.field(factory=list)

    def wait_for(self, event: Any) -> None:
        self.waited.append(event)
        event.synchronize()


@pytest.mark.parametrize(("wanted", "is_tokens"), [(None, False), (sampling(False), True)])
def test_handles_are_read_once_their_events_happened(wanted: DeviceSampling | None, is_tokens: bool) -> None:
    made = adapter(Version1)
    mesh = CountingMesh()
    made.mesh = mesh  # type: ignore[assignment]
    result = run_decode(made, decode_inputs(), wanted, FIRST)
    (handles,), read = next(
        (args, kwargs) for name, args, kwargs in made.model.calls if name == "read_decode_output"
    )
    assert read == {"async_read": True}
    assert mesh.waited == [handles.event]
    processed = [
        (args, kwargs) for name, args, kwargs in made.model.calls if name == "process_decode_output_host"
    ]
    assert processed == [((handles,), {"is_tokens": is_tokens})]
    assert (result.tokens is not None) == is_tokens


class Odd(HostSampled):
    """Gives what it is told to."""

    gives: Any

    def decode_forward(self, **_: Any) -> Any:
        return self.gives


@pytest.mark.parametrize(
    ("gives", "wanted", "token", "logprobs"),
    [
        ((logits(torch.tensor([3])), "rope deltas"), None, None, None),
        (torch.tensor([[3]]), sampling(False), 3, None),
        ((torch.tensor([3]), "logprobs"), sampling(False), 3, "logprobs"),
    ],
)
def test_forms_of_results(
    gives: Any, wanted: DeviceSampling | None, token: int | None, logprobs: Any
) -> None:
    made = adapter(Odd)
    made.model.gives = gives
    result = run_decode(made, decode_inputs(), wanted, FIRST)
    if token is None:
        assert result.logits is not None
        assert result.logits.argmax(-1).tolist() == [3]
    else:
        assert result.tokens is not None
        assert (result.tokens.tolist(), result.logprobs) == ([token], logprobs)


def test_logits_of_another_shape_are_refused() -> None:
    made = adapter(Odd)
    made.model.gives = torch.zeros(4, VOCAB)
    with pytest.raises(StepError, match=r"\(4, 61\); expected \[rows, S, V\]"):
        run_decode(made, decode_inputs(), None, FIRST)


@pytest.mark.parametrize(
    ("sizes", "heights", "rows"),
    [
        (None, [1, 3, 4], [4, 4, 4]),
        ([], [1, 4], [4, 4]),
        ([2, 1], [1, 2, 3, 4], [1, 2, 4, 4]),
        ((4, 2), [0, 1, 2, 3], [2, 2, 2, 4]),
    ],
)
def test_the_smallest_listed_decode_that_holds_all_rows(
    sizes: Any, heights: list[int], rows: list[int]
) -> None:
    made = adapter(HostSampled)
    made.model.tt_supported_decode_batch_sizes = sizes
    made.note_decode_sizes()
    assert [made.decode_rows(height) for height in heights] == rows


@pytest.mark.parametrize(
    ("mode", "passes"),
    [
        (None, [(False, False), (True, True)]),
        ("all", [(False, False), (True, True)]),
        ("decode_only", [(False, False), (False, True)]),
        ("none", [(False, False)]),
    ],
)
@pytest.mark.parametrize("on_device", [False, True])
def test_everything_is_compiled_before_anything_is_traced(
    mode: str | None, passes: list[tuple[bool, bool]], on_device: bool
) -> None:
    made = adapter(HostSampled, trace_mode=mode)
    warm_up(made, can_sample_on_device=on_device)
    order = [(name, kwargs["enable_trace"]) for name, _, kwargs in made.model.calls]
    assert order == [
        call
        for prefill, decode in passes
        for call in (("warmup_model_prefill", prefill), ("warmup_model_decode", decode))
    ]
    for arguments in passed(made, "warmup_model_prefill"):
        assert set(arguments) == {"kv_cache", "enable_trace", "can_sample_on_device"}
        assert arguments["can_sample_on_device"] is on_device
    for arguments in passed(made, "warmup_model_decode"):
        assert arguments.keys() - {"kv_cache", "enable_trace"} == {
            "max_batch_size", "num_blocks", "can_sample_on_device",
        }  # fmt: skip
        assert (arguments["max_batch_size"], arguments["num_blocks"]) == (4, 5)


class WarmsUpOnce(HostSampled):
    """As TT-Metal's generators do: a second prefill warm-up is skipped unless the flag is cleared."""

    already_warmed_up_prefill = False

    def warmup_model_prefill(self, **arguments: Any) -> None:
        assert not self.already_warmed_up_prefill
        self.already_warmed_up_prefill = True


def test_the_second_warm_up_is_not_skipped() -> None:
    made = adapter(WarmsUpOnce)
    warm_up(made, can_sample_on_device=False)
    assert made.model.already_warmed_up_prefill


@pytest.mark.parametrize("cls", [HostSampled, KeywordOnly])
def test_loading_and_allocation(make_config: MakeConfig, cls: type[Language]) -> None:
    config, mesh = with_lanes(make_config(max_num_seqs=4), 2), HostMesh.open((2, 4))
    settings = TTConfig(optimizations="accuracy")
    made = Adapter.load(cls, Capabilities.from_class(cls), mesh, settings, config)
    hf_config = config.model_config.hf_config
    assert made.model.loaded_with == (hf_config, mesh.device, 8, 128, 2, "accuracy")
    assert (made.max_rows, made.lanes) == (8, 2)
    made.allocate(LAYERS, page_table_width=5)
    assert made.model.allocated == ((10, 2, 4, 8), torch.bfloat16, 3)


@pytest.mark.parametrize(
    ("mode", "prefill", "decode"), [("all", True, True), ("decode_only", False, True), ("none", False, False)]
)
def test_steps_are_traced_as_warmed_up(mode: str, prefill: bool, decode: bool) -> None:
    made = adapter(HostSampled, trace_mode=mode)
    made.prefill(prefill_inputs(), None)
    run_decode(made, decode_inputs(), None, FIRST)
    assert passed(made, "prefill_forward")[0]["enable_trace"] is prefill
    assert passed(made, "decode_forward")[0]["enable_trace"] is decode
