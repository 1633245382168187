# mypy: disable-error-code="no-untyped-def,no-untyped-call,override"
"""Adapters with strict signatures, and a language that needs no weights.

The next token is a hash of the whole context, which the model reads back through its page table from the
cache that earlier calls filled. So a wrong row, block, position or stale input changes the tokens. Calls are
recorded.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

VOCAB = 61


def next_token(context: Sequence[int], delta: int = 0) -> int:
    state = 1 + delta
    for token in context:
        state = (state * 31 + token + 7) % 1_000_003
    return state % VOCAB


def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Note the arguments that were really passed, before the strict signature is tried."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((method.__name__, args, kwargs))
        return method(self, *args, **kwargs)

    return call


@attrs.define
class Event:
    happened: bool = False

    def synchronize(self) -> None:
        self.happened = True


@attrs.frozen
class Handles:
    """What stays on the device until it is read."""

    value: Any
    event: Event = attrs.field(factory=Event)


class Language:
    """What all adapters here share: loading, the cache, and reading contexts from it."""

    loaded_with: tuple[Any, ...]
    allocated: tuple[Any, ...]
    deltas: Sequence[int] = ()
    """What a step adds to the hash, row by row; nothing where it is empty."""

    def __init__(self, vllm_config: Any = None, prefix: str = "") -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def embed_input_ids(self, input_ids: Any) -> Any: ...

    def forward(self, input_ids: Any, positions: Any) -> Any: ...

    def compute_logits(self, hidden_states: Any) -> Any: ...

    @classmethod
    def initialize_vllm_model(
        cls, hf_config, mesh_device, max_batch_size, max_seq_len, tt_data_parallel, optimizations
    ):
        model = cls()
        model.loaded_with = (
            hf_config, mesh_device, max_batch_size, max_seq_len, tt_data_parallel, optimizations
        )  # fmt: skip
        return model

    def allocate_kv_cache(self, kv_cache_shape, dtype, num_layers):
        self.allocated = (kv_cache_shape, dtype, num_layers)
        blocks, _, block_size, _ = kv_cache_shape
        return torch.full((blocks, block_size), -1, dtype=torch.int64)

    @recorded
    def warmup_model_prefill(self, *, kv_cache, enable_trace, can_sample_on_device): ...

    @recorded
    def warmup_model_decode(
        self, *, kv_cache, max_batch_size, num_blocks, can_sample_on_device, enable_trace
    ): ...

    def _write(self, cache, pages, position, token):
        block = pages[position // cache.shape[1]]
        cache[block, position % cache.shape[1]] = token

    def _read(self, cache, pages, end):
        positions = torch.arange(end)
        return cache[pages[positions // cache.shape[1]].long(), positions % cache.shape[1]].tolist()

    def _prefilled(self, tokens, page_table, cache, prompt_lens, start_pos):
        found = []
        for row, (start, end) in enumerate(zip(start_pos.tolist(), prompt_lens.tolist(), strict=True)):
            for position in range(start, end):
                self._write(cache, page_table[row], position, int(tokens[row, position]))
            found.append(self._said(self._read(cache, page_table[row], end), row))
        return torch.tensor(found)

    def _said(self, context, row):
        return next_token(context, self.deltas[row] if self.deltas else 0)

    def _decoded(self, tokens, page_table, cache, start_pos):
        found = []
        for row, position in enumerate(start_pos.tolist()):
            if position < 0:
                found.append(-1)
                continue
            self._write(cache, page_table[row], position, int(tokens[row, 0]))
            found.append(self._said(self._read(cache, page_table[row], position + 1), row))
        return torch.tensor(found)


def logits(tokens: torch.Tensor) -> torch.Tensor:
    """`[B, 1, V]` float32 with the token's place highest; NaN where there is no token."""
    values = torch.zeros(len(tokens), 1, VOCAB)
    for row, token in enumerate(tokens.tolist()):
        values[row, 0, token if token >= 0 else slice(None)] = 9.0 if token >= 0 else float("nan")
    return values


class HostSampled(Language):
    """Version 0, logits on the host at once."""

    model_capabilities = {"supports_chunked_prefill": True, "unknown_key": 1}  # noqa: RUF012 (a fact of adapters)

    @recorded
    def prefill_forward(
        self, *, tokens, page_table, kv_cache, enable_trace, prompt_lens, start_pos, empty_slots
    ):
        return logits(self._prefilled(tokens, page_table, kv_cache, prompt_lens, start_pos))

    @recorded
    def decode_forward(self, *, tokens, page_table, kv_cache, start_pos, enable_trace, read_from_device):
        return logits(self._decoded(tokens, page_table, kv_cache, start_pos))


class DeviceSampled(Language):
    """Samples on the device on request, keeps its inputs there, and gives handles that must be waited for."""

    model_capabilities = {  # noqa: RUF012
        "supports_chunked_prefill": True,
        "supports_sample_on_device": True,
        "supports_async_decode": True,
    }
    kept_tokens: torch.Tensor
    kept_positions: torch.Tensor
    kept_pages: torch.Tensor

    @recorded
    def prefill_forward(
        self, *, tokens, page_table, kv_cache, enable_trace, prompt_lens, start_pos, empty_slots,
        sampling_params=None,
    ):  # fmt: skip
        sampled = self._prefilled(tokens, page_table, kv_cache, prompt_lens, start_pos)
        return logits(sampled) if sampling_params is None else sampled

    @recorded
    def read_decode_output(self, out, *, async_read):
        assert async_read is True
        return out, [out.event]

    @recorded
    def process_decode_output_host(self, handles, *, is_tokens):
        assert handles.event.happened, "read before its event was waited for"
        return handles.value if is_tokens else logits(handles.value)

    def _continue(self, kv_cache, sampled_on_device):
        sampled = self._decoded(self.kept_tokens, self.kept_pages, kv_cache, self.kept_positions)
        if sampled_on_device:
            live = self.kept_positions >= 0
            self.kept_tokens = torch.where(live, sampled, 0)[:, None]
            self.kept_positions = torch.where(live, self.kept_positions + 1, -1)
        return Handles(sampled)


class Version0(DeviceSampled):
    """Keeps tokens and positions while `reset_batch` is false; page tables are fresh in every call."""

    @recorded
    def decode_forward(
        self, *, tokens, page_table, kv_cache, start_pos, enable_trace, read_from_device,
        sampling_params=None, prompt_tokens=None, output_tokens=None, reset_batch=None,
    ):  # fmt: skip
        assert (reset_batch is None) == (sampling_params is None)
        if reset_batch is not False:
            self.kept_tokens, self.kept_positions = tokens.clone(), start_pos.clone()
        self.kept_pages = page_table.clone()
        return self._continue(kv_cache, sampling_params is not None)


class Version1(DeviceSampled):
    """Does what the four commands say, and nothing else."""

    decode_input_update_contract = 1

    @recorded
    def decode_forward(
        self, *, tokens, page_table, kv_cache, start_pos, enable_trace, read_from_device,
        reload_inputs, reload_page_table, reload_sampling_params, reset_sampling_state,
        sampling_params=None, prompt_tokens=None, output_tokens=None,
    ):  # fmt: skip
        assert not (reload_inputs and reload_page_table)
        if reload_inputs:
            self.kept_tokens, self.kept_positions = tokens.clone(), start_pos.clone()
        if reload_inputs or reload_page_table:
            self.kept_pages = page_table.clone()
        return self._continue(kv_cache, sampling_params is not None)


class Grouped(Version1):
    """Layers of several KV cache groups. Each writes tokens in its own way, and all must read the same."""

    _HYBRID_KV_CACHE_GROUPS_ENABLED = True
    kept_tables: list[torch.Tensor]
    layer = 0

    def allocate_kv_cache_per_layer(self, per_layer_specs):
        self.allocated = tuple(per_layer_specs)
        buffers = {
            index: torch.full((shape[0], shape[2]), -1, dtype=torch.int64)
            for shape, _, index in per_layer_specs
        }
        return [buffers[index] for _, _, index in per_layer_specs]

    @recorded
    def prefill_forward(
        self, *, tokens, page_table, kv_cache, enable_trace, prompt_lens, start_pos, empty_slots,
        page_tables_per_layer, sampling_params=None,
    ):  # fmt: skip
        self._check(page_tables_per_layer, page_table, kv_cache)
        found = []
        for layer, (table, cache) in enumerate(zip(page_tables_per_layer, kv_cache, strict=True)):
            self.layer = layer
            found.append(self._prefilled(tokens, table, cache, prompt_lens, start_pos))
        return self._agreed(found) if sampling_params is not None else logits(self._agreed(found))

    @recorded
    def decode_forward(
        self, *, tokens, page_table, kv_cache, start_pos, enable_trace, read_from_device,
        reload_inputs, reload_page_table, reload_sampling_params, reset_sampling_state,
        page_tables_per_layer, sampling_params=None,
    ):  # fmt: skip
        self._check(page_tables_per_layer, page_table, kv_cache)
        if reload_inputs:
            self.kept_tokens, self.kept_positions = tokens.clone(), start_pos.clone()
        if reload_inputs or reload_page_table:
            self.kept_tables = [table.clone() for table in page_tables_per_layer]
        return self._continue(kv_cache, sampling_params is not None)

    def _decoded(self, tokens, page_table, cache, start_pos):
        found = []
        for layer, (table, of_layer) in enumerate(zip(self.kept_tables, cache, strict=True)):
            self.layer = layer
            found.append(super()._decoded(tokens, table, of_layer, start_pos))
        return self._agreed(found)

    def _write(self, cache, pages, position, token):
        super()._write(cache, pages, position, token + VOCAB * self.layer)

    def _read(self, cache, pages, end):
        return [token - VOCAB * self.layer for token in super()._read(cache, pages, end)]

    def _continue(self, kv_cache, sampled_on_device):
        self.kept_pages = self.kept_tables[0]
        return super()._continue(kv_cache, sampled_on_device)

    def _check(self, tables, page_table, kv_cache):
        assert len(tables) == len(kv_cache)
        assert {table.dtype for table in tables} == {torch.int32}
        assert len({tuple(table.shape) for table in tables}) == 1
        assert torch.equal(tables[0][: len(page_table)], page_table)
        assert not tables[0][len(page_table) :].any(), "padded with 0"

    def _agreed(self, found):
        assert all(torch.equal(found[0], other) for other in found), "layers found different contexts"
        return found[0]


class Seeing(Version1):
    """Images change what follows: by what a prefill says of them, and decodes are told."""

    kept_deltas: Sequence[int] = ()

    @recorded
    def prefill_forward(
        self, *, tokens, page_table, kv_cache, enable_trace, prompt_lens, start_pos, empty_slots,
        pixel_values, image_grid_thw, sampling_params=None,
    ):  # fmt: skip
        assert [None if p is None else len(p) for p in pixel_values] == [
            None if g is None else len(g) for g in image_grid_thw
        ]
        self.deltas = [sum(int(pixels) for pixels in images or ()) for images in pixel_values]
        sampled = self._prefilled(tokens, page_table, kv_cache, prompt_lens, start_pos)
        out = logits(sampled) if sampling_params is None else sampled
        return out, torch.tensor(self.deltas)[:, None]

    @recorded
    def decode_forward(
        self, *, tokens, page_table, kv_cache, start_pos, enable_trace, read_from_device,
        reload_inputs, reload_page_table, reload_sampling_params, reset_sampling_state,
        rope_deltas_all_users, sampling_params=None,
    ):  # fmt: skip
        if rope_deltas_all_users is not None:
            assert len(rope_deltas_all_users) <= len(tokens)
            self.kept_deltas = rope_deltas_all_users
        if reload_inputs:
            self.kept_tokens, self.kept_positions = tokens.clone(), start_pos.clone()
        if reload_inputs or reload_page_table:
            self.kept_pages = page_table.clone()
        self.deltas = self.kept_deltas
        return self._continue(kv_cache, sampling_params is not None)


class KeywordOnly(HostSampled):
    """Takes even the leading arguments of loading and allocation by keyword only."""

    @classmethod
    def initialize_vllm_model(
        cls, *, hf_config, mesh_device, max_batch_size, max_seq_len, tt_data_parallel, optimizations
    ):
        return super().initialize_vllm_model(
            hf_config, mesh_device, max_batch_size, max_seq_len, tt_data_parallel, optimizations
        )

    def allocate_kv_cache(self, *, shape, dtype, num_layers):
        return super().allocate_kv_cache(shape, dtype, num_layers)
