"""Calls on an adapter, with exactly the arguments of the contract.

Adapters have strict signatures, so nothing else is passed, and what depends on a capability is passed only to
a class that declares it.

Shapes: N prefilled requests, S the longest end position, B rows of a decode, W blocks per request, V
vocabulary.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from tt_registry import Capabilities
from tt_sampling import ReloadCommands

from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.errors import StepError
from vllm_tt_plugin.images import Inputs
from vllm_tt_plugin.kv_cache import LayerCache, PageTables
from vllm_tt_plugin.lanes import lanes_of
from vllm_tt_plugin.mesh import Mesh
from vllm_tt_plugin.step_data import DecodeHandle, DecodeInputs, DeviceSampling, PrefillInputs, StepResult

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@attrs.define
class Adapter:
    """A loaded model, its cache and its mesh."""

    model: Any
    capabilities: Capabilities
    mesh: Mesh
    config: TTConfig
    max_rows: int
    lanes: int
    inputs: Inputs = attrs.field(factory=Inputs)
    kv_cache: Any = None
    page_tables: PageTables = attrs.field(factory=lambda: PageTables(0))
    decode_sizes: tuple[int, ...] = ()

    @classmethod
    def load(
        cls,
        adapter_class: type[Any],
        capabilities: Capabilities,
        mesh: Mesh,
        config: TTConfig,
        vllm_config: "VllmConfig",
    ) -> "Adapter":
        """Load the weights."""
        lanes, rows = lanes_of(vllm_config), vllm_config.scheduler_config.max_num_seqs
        model = _call(
            adapter_class.initialize_vllm_model,
            {
                "hf_config": vllm_config.model_config.hf_config,
                "mesh_device": mesh.device,
                "max_batch_size": rows,
            },
            max_seq_len=vllm_config.model_config.max_model_len,
            tt_data_parallel=lanes,
            optimizations=config.optimizations,
        )
        inputs = Inputs.of(adapter_class, vllm_config)
        return cls(model, capabilities, mesh, config, max_rows=rows, lanes=lanes, inputs=inputs)

    def allocate(self, layers: Sequence[LayerCache], page_table_width: int) -> None:
        """Allocate the KV cache: at once where all layers have the same, else layer by layer."""
        if len({(layer.shape, layer.dtype, layer.group) for layer in layers}) == 1:
            first = layers[0]
            leading = {"shape": first.shape, "dtype": first.dtype, "num_layers": len(layers)}
            self.kv_cache = _call(self.model.allocate_kv_cache, leading)
        else:
            specs = [(layer.shape, layer.dtype, layer.tensor_index) for layer in layers]
            self.kv_cache = _call(self.model.allocate_kv_cache_per_layer, {"per_layer_specs": specs})
        self.page_tables = PageTables.of(layers, page_table_width)

    def note_decode_sizes(self) -> None:
        """Read the decode sizes that the warmed-up model accepts."""
        sizes = getattr(self.model, "tt_supported_decode_batch_sizes", None)
        self.decode_sizes = tuple(sorted(sizes)) if sizes else ()

    def decode_rows(self, height: int) -> int:
        """How many rows a decode must have when the highest occupied row is ``height - 1``."""
        if not self.decode_sizes:
            return self.max_rows
        return next((size for size in self.decode_sizes if size >= height), self.max_rows)

    def prefill(self, inputs: PrefillInputs, sampling: DeviceSampling | None) -> StepResult:
        arguments = _per_layer(inputs)
        if self.inputs.images:
            assert inputs.images is not None, "the images of a prefill that can have some"
            arguments["pixel_values"] = inputs.images.pixel_values
            arguments["image_grid_thw"] = inputs.images.image_grid_thw
        if sampling is not None:
            arguments["sampling_params"] = sampling.params
        out = self.model.prefill_forward(
            tokens=inputs.tokens,
            page_table=inputs.page_table,
            kv_cache=self.kv_cache,
            enable_trace=self.config.traces_prefill,
            prompt_lens=inputs.prompt_lens,
            # The contract's one quirk: the same numbers, in lanes as a tensor.
            start_pos=inputs.start_pos if self.lanes == 1 else torch.from_numpy(inputs.start_pos),
            empty_slots=inputs.empty_slots,
            **arguments,
        )
        if not self.inputs.rope_deltas:
            return _result(out, sampling)
        out, deltas = out
        return attrs.evolve(_result(out, sampling), rope_deltas=[int(delta) for delta in deltas])

    def reads_inputs(self, commands: ReloadCommands) -> bool:
        """Whether a decode may use the host's tokens and positions. Under version 0 it may in every step."""
        return commands.reload_inputs or self.capabilities.decode_input_update_contract != 1

    def submit_decode(
        self, inputs: DecodeInputs, sampling: DeviceSampling | None, commands: ReloadCommands
    ) -> DecodeHandle:
        """Hand one decode to the device and start the copy of what it will give, without waiting for it."""
        out = self.model.decode_forward(
            tokens=inputs.tokens,
            page_table=inputs.page_table,
            kv_cache=self.kv_cache,
            start_pos=inputs.start_pos,
            enable_trace=self.config.traces_decode,
            read_from_device=False,
            **self._decode_arguments(inputs, sampling, commands),
        )
        if _on_host(out):
            return DecodeHandle(out, None, sampling)
        handles, events = self.model.read_decode_output(out, async_read=True)
        return DecodeHandle(handles, tuple(events), sampling)

    def read_decode(self, handle: DecodeHandle) -> StepResult:
        """Wait until the decode has ended, and read it. Call it once, in the order of submission."""
        if handle.events is None:
            return _result(handle.out, handle.sampling)
        for event in handle.events:
            self.mesh.wait_for(event)
        is_tokens = handle.sampling is not None
        out = self.model.process_decode_output_host(handle.out, is_tokens=is_tokens)
        return _result(out, handle.sampling)

    def _decode_arguments(
        self, inputs: DecodeInputs, sampling: DeviceSampling | None, commands: ReloadCommands
    ) -> dict[str, Any]:
        arguments = _per_layer(inputs)
        if self.inputs.rope_deltas:
            arguments["rope_deltas_all_users"] = inputs.rope_deltas
        if sampling is not None:
            arguments["sampling_params"] = sampling.params
            if sampling.prompt_tokens is not None:
                arguments["prompt_tokens"] = sampling.prompt_tokens
                arguments["output_tokens"] = sampling.output_tokens
        if self.capabilities.decode_input_update_contract == 1:
            arguments["reload_inputs"] = commands.reload_inputs
            arguments["reload_page_table"] = commands.reload_page_table
            arguments["reload_sampling_params"] = commands.reload_sampling_params
            arguments["reset_sampling_state"] = commands.reset_sampling_state
        elif sampling is not None:
            arguments["reset_batch"] = commands.reset_batch
        return arguments


def _call(method: Callable[..., Any], leading: Mapping[str, Any], **rest: Any) -> Any:
    """Call with ``leading`` by position, or by keyword where the method takes them only so.

    Adapters in use forward these to helpers under other names, so position is what they agree on.
    """
    parameters = inspect.signature(method).parameters
    keyword_only = {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    by_position = [value for name, value in leading.items() if name not in keyword_only]
    by_keyword = {name: value for name, value in leading.items() if name in keyword_only}
    return method(*by_position, **by_keyword, **rest)


def _per_layer(inputs: PrefillInputs | DecodeInputs) -> dict[str, Any]:
    tables = inputs.page_tables_per_layer
    return {} if tables is None else {"page_tables_per_layer": tables}


def _on_host(out: Any) -> bool:
    first = out[0] if isinstance(out, tuple) else out
    return isinstance(first, torch.Tensor)


def _result(out: Any, sampling: DeviceSampling | None) -> StepResult:
    if sampling is None:
        logits = out[0] if isinstance(out, tuple) else out
        if logits.dim() != 3:
            raise StepError(
                f"the adapter returned logits of shape {tuple(logits.shape)}; expected [rows, S, V]"
            )
        return StepResult(logits=logits[:, -1])
    tokens, logprobs = out if isinstance(out, tuple) else (out, None)
    return StepResult(tokens=tokens if tokens.dim() == 1 else tokens.reshape(-1), logprobs=logprobs)
