"""A model whose next token says what it found: a probe for wrong blocks, rows, positions and reloads.

The cache keeps, for each place, the token and the position written there. The logits of a step are a function
of all places that its page table leads to, and a place that holds another position, or a row that holds
another request, raises at once. Nothing is learned and nothing is slow, so the tokens of any schedule can be
compared with `continuation`, which knows no cache at all.

Shapes: N rows of a prefill, B rows of a decode, S longest end, W blocks a row, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tt_sampling import TTSamplingParams
from tt_sampling.reference import sample

PRIME = 2**31 - 1
BASE = 48_271
LONGEST = 4_096
SPREAD = 8.0  # of the logits: wide enough that a draw is no coin toss, narrow enough that it is a draw

Ints = npt.NDArray[np.int64]
_POWERS: Ints = np.array([pow(BASE, position, PRIME) for position in range(LONGEST)])


class ProbeError(AssertionError):
    """What the plugin handed over contradicts what it handed over before, or the contract."""


def context_hash(tokens: Sequence[int] | Ints) -> int:
    """A number that changes with any token and its place."""
    values: Ints = (np.asarray(tokens) + 1) * _POWERS[: len(tokens)] % PRIME
    return int(values.sum() % PRIME)


def logits_of(value: int, vocab: int) -> Tensor:
    """float32 `[V]` for a context hash."""
    ids = np.arange(1, vocab + 1)
    noise = (value + ids * 7_919) % PRIME * (ids * ids + BASE) % PRIME
    return torch.from_numpy((noise / PRIME * SPREAD).astype(np.float32))


def continuation(prompt: Sequence[int], count: int, vocab: int) -> list[int]:
    """The greedy tokens that follow `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(context_hash(tokens), vocab).argmax()))
    return tokens[len(prompt) :]


class PagedProbe(torch.nn.Module):
    """Declares everything, takes version 1 of the reload commands, and returns host tensors at once."""

    model_capabilities: ClassVar[dict[str, Any]] = {
        "supports_prefix_caching": True,
        "supports_chunked_prefill": True,
        "supports_async_decode": True,
        "supports_sample_on_device": True,
        "folds_dp_into_lanes": True,
    }
    decode_input_update_contract: ClassVar[int] = 1

    def __init__(self, *, rows: int, vocab: int, lanes: int = 1, vllm_config: object = None) -> None:
        # vllm_config is never given: vLLM's inspection of the class looks for a parameter of that name.
        super().__init__()
        self._vocab = vocab
        self._lanes = lanes
        self._rows_per_lane = rows // lanes
        self._row_hash: list[int | None] = [None] * rows
        self._tokens = np.zeros(rows, np.int64)
        self._positions = np.full(rows, -1, np.int64)
        self._page_table = np.zeros((rows, 0), np.int64)
        self._params: TTSamplingParams | None = None
        self._width: int | None = None

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: Any,
        mesh_device: object,
        max_batch_size: int,
        max_seq_len: int = LONGEST,
        tt_data_parallel: int = 1,
        optimizations: str | None = None,
    ) -> "PagedProbe":
        return cls(rows=max_batch_size, vocab=hf_config.vocab_size, lanes=tt_data_parallel)

    def allocate_kv_cache(self, shape: Sequence[int], dtype: torch.dtype, num_layers: int) -> Ints:
        """`[lanes, blocks, block size, 2]`: token and position of each place, -1 where none was written."""
        return np.full((self._lanes, shape[0], shape[2], 2), -1, np.int64)

    def warmup_model_prefill(self, *, kv_cache: Ints, enable_trace: bool, can_sample_on_device: bool) -> None:
        """Nothing to compile."""

    def warmup_model_decode(
        self,
        *,
        kv_cache: Ints,
        max_batch_size: int,
        num_blocks: int,
        can_sample_on_device: bool,
        enable_trace: bool,
    ) -> None:
        self._width = num_blocks

    def prefill_forward(
        self,
        *,
        tokens: Tensor,
        page_table: Tensor,
        kv_cache: Ints,
        enable_trace: bool,
        prompt_lens: npt.NDArray[np.int64],
        start_pos: npt.NDArray[np.int32] | Tensor,
        empty_slots: list[int],
        sampling_params: TTSamplingParams | None = None,
    ) -> Tensor:
        """Logits `[N, 1, V]`, or ids `[N]`."""
        count = len(empty_slots)
        _require(
            isinstance(start_pos, Tensor) == (self._lanes > 1),
            "positions are a tensor in lanes alone",
        )
        start_pos = np.asarray(start_pos)
        self._expect(tokens, torch.int32, (count, int(prompt_lens.max())))
        self._expect(page_table, torch.int32, (count, self._width))
        _require(prompt_lens.dtype == np.int64 and start_pos.dtype == np.int32, "wrong types of positions")
        _require(len(set(empty_slots)) == count, f"a row twice in {empty_slots}")
        logits = []
        for index, row in enumerate(empty_slots):
            start, end = int(start_pos[index]), int(prompt_lens[index])
            _require(
                start == 0 or self.may_start_late(), f"row {row} starts at {start}, and nothing allows it to"
            )
            blocks, chunk = page_table[index].numpy(), tokens[index, :end].numpy()
            cache = kv_cache[row // self._rows_per_lane]
            self._write(cache, blocks, start, chunk[start:])
            seen = self._read(cache, blocks, end, row)
            _require((seen == chunk).all(), f"row {row}: tokens 0..{end} are not those in its cache")
            self._row_hash[row] = context_hash(seen)
            logits.append(logits_of(context_hash(seen), self._vocab))
        stacked = torch.stack(logits)
        if sampling_params is None:
            return stacked[:, None]
        return sample(stacked, sampling_params, prompt_lens.tolist()).ids

    def may_start_late(self) -> bool:
        """Whether a prefill may find its first tokens in the cache."""
        declared = self.model_capabilities
        return bool(declared.get("supports_prefix_caching") or declared.get("supports_chunked_prefill"))

    def decode_forward(
        self,
        *,
        tokens: Tensor,
        page_table: Tensor,
        kv_cache: Ints,
        start_pos: Tensor,
        enable_trace: bool,
        read_from_device: bool,
        sampling_params: TTSamplingParams | None = None,
        prompt_tokens: Tensor | None = None,
        output_tokens: Tensor | None = None,
        reload_inputs: bool,
        reload_page_table: bool,
        reload_sampling_params: bool,
        reset_sampling_state: bool,
    ) -> Tensor:
        """Logits `[B, 1, V]` with NaN in empty rows, or ids `[B]`."""
        _require(not (reload_inputs and reload_page_table), "both reload commands at once")
        _require(sampling_params is not None or reload_inputs, "a host-sampled decode without reload_inputs")
        if reload_sampling_params:
            self._params = sampling_params
        return self._decode(
            kv_cache,
            (tokens, start_pos, page_table),
            reload_inputs or reset_sampling_state,
            reload_inputs or reset_sampling_state or reload_page_table,
            self._params if sampling_params is not None else None,
            (prompt_tokens, output_tokens),
        )

    def _decode(
        self,
        kv_cache: Ints,
        inputs: tuple[Tensor, Tensor, Tensor],
        reload_inputs: bool,
        reload_page_table: bool,
        params: TTSamplingParams | None,
        histories: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        tokens, positions, page_table = inputs
        size = self.size_of(len(positions))
        self._expect(tokens, torch.int32, (size, 1))
        self._expect(positions, torch.int32, (size,))
        self._expect(page_table, torch.int32, (size, self._width))
        if reload_inputs:
            self._tokens, self._positions = tokens[:, 0].numpy().copy(), positions.numpy().copy()
        if reload_page_table:
            self._page_table = page_table.numpy().copy()
        logits = torch.full((size, self._vocab), float("nan"))
        live = (self._positions >= 0).nonzero()[0].tolist()
        for row in live:
            logits[row] = logits_of(self._advance(kv_cache, row), self._vocab)
        if params is None:
            return logits[:, None]
        drawn = sample(logits.nan_to_num(), params, (self._positions + 1).tolist(), *histories).ids
        ids = torch.where(torch.from_numpy(self._positions) >= 0, drawn, -1)
        self._tokens = ids.numpy().copy()
        self._positions = self._positions + (self._positions >= 0)
        return ids

    def size_of(self, rows: int) -> int:
        """The rows that a decode must have, given those that it has."""
        return len(self._row_hash)

    def _advance(self, kv_cache: Ints, row: int) -> int:
        position, blocks = int(self._positions[row]), self._page_table[row]
        kv_cache = kv_cache[row // self._rows_per_lane]
        before = context_hash(self._read(kv_cache, blocks, position, row))
        _require(
            before == self._row_hash[row], f"row {row} was left to another request, or went on without it"
        )
        self._write(kv_cache, blocks, position, self._tokens[row : row + 1])
        after = context_hash(self._read(kv_cache, blocks, position + 1, row))
        self._row_hash[row] = after
        return after

    def _write(self, kv_cache: Ints, blocks: Any, start: int, tokens: Any) -> None:
        positions = np.arange(start, start + len(tokens))
        size = kv_cache.shape[1]
        kv_cache[blocks[positions // size], positions % size] = np.stack((tokens, positions), axis=1)

    def _read(self, kv_cache: Ints, blocks: Any, end: int, row: int) -> Ints:
        positions = np.arange(end)
        size = kv_cache.shape[1]
        places = kv_cache[blocks[positions // size], positions % size]
        _require(
            (places[:, 1] == positions).all(),
            f"row {row} finds {places[:, 1].tolist()} at positions 0..{end}",
        )
        return np.ascontiguousarray(places[:, 0])

    def _expect(self, tensor: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
        _require(
            tensor.dtype == dtype and tuple(tensor.shape) == shape,
            f"{tensor.dtype} {tuple(tensor.shape)}, not {shape}",
        )

    # vLLM inspects these where it does not know an architecture by itself. The plugin calls none of them.

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError


class UndeclaredProbe(PagedProbe):
    """Declares nothing: whole prompts, no shared prefixes, sampling on the host. Lists its decode sizes."""

    model_capabilities: ClassVar[dict[str, Any]] = {}
    tt_supported_decode_batch_sizes = (4, 2, 1)

    def size_of(self, rows: int) -> int:
        _require(rows in self.tt_supported_decode_batch_sizes, f"a decode of {rows} rows")
        return rows


class ResetBatchProbe(PagedProbe):
    """Version 0 of the decode call: `reset_batch`, and only where the device samples."""

    decode_input_update_contract: ClassVar[int] = 0

    def decode_forward(  # type: ignore[override]
        self,
        *,
        tokens: Tensor,
        page_table: Tensor,
        kv_cache: Ints,
        start_pos: Tensor,
        enable_trace: bool,
        read_from_device: bool,
        sampling_params: TTSamplingParams | None = None,
        prompt_tokens: Tensor | None = None,
        output_tokens: Tensor | None = None,
        reset_batch: bool = True,
    ) -> Tensor:
        inputs = (tokens, start_pos, page_table)
        return self._decode(
            kv_cache, inputs, reset_batch, True, sampling_params, (prompt_tokens, output_tokens)
        )


def _require(holds: Any, what: str) -> None:
    if not holds:
        raise ProbeError(what)
