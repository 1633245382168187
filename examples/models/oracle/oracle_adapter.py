"""A model that knows what it should have been given: its text is right only if everything else is.

The next token is a function of all tokens that a row finds in its cache through its page table. It follows
reload commands to the letter and derives nothing from host tensors without one. Where what it is given cannot
be right, it raises `OracleError` and says why; where it is wrong all the same, the text differs from
`oracle_text.continuation`, which knows no cache at all.

Shapes: N rows of a prefill, B rows of a decode, S longest end, W blocks a row, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from oracle_device import Handle, Resident, Timeline, histories
from oracle_memory import OracleError, PagedMemory, require
from oracle_text import LONGEST, context_hash, continuation, logits_of
from torch import Tensor
from tt_sampling import TTSamplingParams
from tt_sampling.reference import sample

__all__ = ["Oracle", "OracleError", "OracleVersion0", "UndeclaredOracle", "continuation"]

Cache = list[PagedMemory]


class Oracle(torch.nn.Module):
    """Declares everything, and takes version 1 of the reload commands."""

    model_capabilities: ClassVar[dict[str, Any]] = {
        "supports_prefix_caching": True,
        "supports_chunked_prefill": True,
        "supports_async_decode": True,
        "supports_sample_on_device": True,
        "supports_device_seeds": True,
        "folds_dp_into_lanes": True,
    }
    decode_input_update_contract: ClassVar[int] = 1

    def __init__(
        self, *, rows: int, vocab: int, lanes: int, timeline: Timeline, vllm_config: object = None
    ) -> None:
        # vllm_config is never given: vLLM's inspection of the class looks for a parameter of that name.
        super().__init__()
        self._vocab = vocab
        self._lanes = lanes
        self._rows_per_lane = rows // lanes
        self._timeline = timeline
        self._resident = Resident.empty(rows)
        # State by row that must follow the request: who holds it, and a hash of what that one knows.
        self._holders = [0] * rows
        self._hashes: list[int | None] = [None] * rows
        self._width: int | None = None
        self._captured: set[int] = set()

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: Any,
        mesh_device: object,
        max_batch_size: int,
        max_seq_len: int = LONGEST,
        tt_data_parallel: int = 1,
        optimizations: str | None = None,
    ) -> "Oracle":
        """`oracle_prefill_ms` and `oracle_decode_ms` in the configuration say how long the device takes."""
        prefill, decode = (getattr(hf_config, f"oracle_{phase}_ms", 0.0) for phase in ("prefill", "decode"))
        timeline = Timeline(prefill / 1e3, decode / 1e3)
        return cls(rows=max_batch_size, vocab=hf_config.vocab_size, lanes=tt_data_parallel, timeline=timeline)

    def allocate_kv_cache(self, shape: Sequence[int], dtype: torch.dtype, num_layers: int) -> Cache:
        """A memory for each lane."""
        return [PagedMemory(shape[0], shape[2]) for _ in range(self._lanes)]

    def warmup_model_prefill(
        self, *, kv_cache: Cache, enable_trace: bool, can_sample_on_device: bool
    ) -> None:
        """Nothing to compile."""

    def warmup_model_decode(
        self,
        *,
        kv_cache: Cache,
        max_batch_size: int,
        num_blocks: int,
        can_sample_on_device: bool,
        enable_trace: bool,
    ) -> None:
        self._width = num_blocks
        if enable_trace:
            self._captured = set(self.decode_sizes())

    def decode_sizes(self) -> Sequence[int]:
        """The numbers of rows that a decode may have."""
        return (len(self._hashes),)

    def prefill_forward(
        self,
        *,
        tokens: Tensor,
        page_table: Tensor,
        kv_cache: Cache,
        enable_trace: bool,
        prompt_lens: npt.NDArray[np.int64],
        start_pos: npt.NDArray[np.int32] | Tensor,
        empty_slots: list[int],
        sampling_params: TTSamplingParams | None = None,
    ) -> Tensor:
        """Logits `[N, 1, V]`, or ids `[N]`."""
        count = len(empty_slots)
        require(isinstance(start_pos, Tensor) == (self._lanes > 1), "positions are a tensor in lanes alone")
        require(len(set(empty_slots)) == count, f"a row twice in {empty_slots}")
        starts = np.asarray(start_pos)
        require(prompt_lens.dtype == np.int64 and starts.dtype == np.int32, "wrong types of positions")
        _expect(tokens, torch.int32, (count, int(prompt_lens.max())))
        _expect(page_table, torch.int32, (count, self._width))
        ends = prompt_lens.tolist()
        places = zip(empty_slots, starts.tolist(), ends, strict=True)
        chunks = zip(places, tokens.numpy(), page_table.numpy(), strict=True)
        logits = torch.stack([self._prefill_row(kv_cache, *place, *given) for place, *given in chunks])
        self._timeline.prefill()
        if sampling_params is None:
            return logits[:, None]
        return sample(logits, sampling_params, ends).ids

    def _prefill_row(
        self, kv_cache: Cache, row: int, start: int, end: int, tokens: Any, blocks: Any
    ) -> Tensor:
        memory = kv_cache[row // self._rows_per_lane]
        require(start < end, f"row {row} is to compute positions {start} to {end}")
        require(not start or self._may_start_late(), f"row {row} starts at {start}, and nothing allows it to")
        require(not tokens[end:].any(), f"row {row} is not padded with 0 after its {end} tokens")
        require(not blocks[memory.used(end) :].any(), f"row {row} has blocks beyond its {end} tokens")
        chunk = tokens[:end]
        if not start or self._hashes[row] != context_hash(chunk[:start]):
            self._holders[row] += 1
        memory.write((row, self._holders[row]), blocks, start, chunk[start:])
        seen = memory.read(blocks, end, row)
        require((seen == chunk).all(), f"row {row}: tokens 0 to {end} are not those in its cache")
        self._hashes[row] = context_hash(seen)
        return logits_of(context_hash(seen), self._vocab)

    def _may_start_late(self) -> bool:
        """Whether a prefill may find its first tokens in the cache."""
        declared = self.model_capabilities
        return bool(declared.get("supports_prefix_caching") or declared.get("supports_chunked_prefill"))

    def decode_forward(
        self,
        *,
        tokens: Tensor,
        page_table: Tensor,
        kv_cache: Cache,
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
    ) -> Handle:
        """A handle of logits `[B, 1, V]` with NaN in empty rows, or of ids `[B]`."""
        require(not (reload_inputs and reload_page_table), "both reload commands at once")
        require(sampling_params is not None or reload_inputs, "a host-sampled decode without reload_inputs")
        inputs = reload_inputs or reset_sampling_state
        self._load(tokens, start_pos, page_table, inputs, inputs or reload_page_table, enable_trace)
        if reload_sampling_params:
            self._resident.params = sampling_params
        if reset_sampling_state:
            self._load_histories(prompt_tokens, output_tokens)
        return self._timeline.decode(self._decode(kv_cache, sampling_params is not None))

    def _load(
        self, tokens: Tensor, positions: Tensor, page_table: Tensor, inputs: bool, pages: bool, traced: bool
    ) -> None:
        """Take over what is commanded, and nothing else."""
        size, held = len(tokens), self._resident
        require(size in self.decode_sizes(), f"a decode of {size} rows, not of {self.decode_sizes()}")
        require(not traced or size in self._captured, f"a trace of {size} rows is replayed, not captured")
        _expect(tokens, torch.int32, (size, 1))
        _expect(positions, torch.int32, (size,))
        _expect(page_table, torch.int32, (size, self._width))
        if inputs:
            require(not self._timeline.unread, "inputs are loaded while a decode before them is unread")
            require(not tokens[positions < 0].any(), "an empty row has a token")
            held.tokens, held.positions = tokens[:, 0].numpy().astype(int), positions.numpy().astype(int)
        require(size == len(held.positions), f"{size} rows go on where there were {len(held.positions)}")
        if not pages:
            return
        fresh = page_table.numpy().astype(int)
        if not inputs:
            for row in held.live:
                # The position itself may need a block that is new.
                before = held.page_table[row][held.page_table[row] != 0]
                require(
                    (fresh[row][: len(before)] == before).all(),
                    f"the page table of row {row} shrank or moved: {before} became {fresh[row]}",
                )
        held.page_table = fresh

    def _load_histories(self, prompts: Tensor | None, outputs: Tensor | None) -> None:
        held = self._resident
        held.prompts, held.outputs = histories(prompts), histories(outputs)
        if held.prompts is None or held.outputs is None:
            return
        for row in held.live:
            known = len(held.prompts[row]) + len(held.outputs[row])
            require(
                known == held.positions[row] + 1,
                f"row {row} stands at {held.positions[row]} and has a history of {known} tokens",
            )

    def _decode(self, kv_cache: Cache, on_device: bool) -> Tensor:
        held = self._resident
        self._check_blocks(kv_cache)
        logits = torch.full((len(held.positions), self._vocab), float("nan"))
        for row in held.live:
            logits[row] = logits_of(self._advance_row(kv_cache, row), self._vocab)
        if not on_device:
            return logits[:, None]
        require(held.params is not None, "a decode is sampled on the device, and never had parameters")
        assert held.params is not None
        places = (held.positions + 1).tolist()
        drawn = sample(logits.nan_to_num(), held.params, places, _padded(held.prompts), _padded(held.outputs))
        ids = torch.where(torch.from_numpy(held.positions) >= 0, drawn.ids, -1)
        held.advance(ids.numpy())
        return ids

    def _check_blocks(self, kv_cache: Cache) -> None:
        """No two rows may write to one block."""
        written: dict[tuple[int, int], int] = {}
        for row in self._resident.live:
            lane = row // self._rows_per_lane
            index = kv_cache[lane].used(int(self._resident.positions[row]) + 1) - 1
            place = lane, int(self._resident.page_table[row][index])
            require(place not in written, f"rows {written.get(place)} and {row} both write block {place[1]}")
            written[place] = row

    def _advance_row(self, kv_cache: Cache, row: int) -> int:
        held = self._resident
        position, blocks = int(held.positions[row]), held.page_table[row]
        memory = kv_cache[row // self._rows_per_lane]
        before = context_hash(memory.read(blocks, position, row))
        require(before == self._hashes[row], f"row {row} was left to another, or went on without its request")
        memory.write((row, self._holders[row]), blocks, position, held.tokens[row : row + 1])
        after = context_hash(memory.read(blocks, position + 1, row))
        self._hashes[row] = after
        return after

    def read_decode_output(self, out: Handle, async_read: bool) -> tuple[Handle, list[Handle]]:
        require(async_read, "a read that waits")
        return out, [out]

    def process_decode_output_host(self, out: Handle, is_tokens: bool) -> Tensor:
        value = self._timeline.finish(out)
        require(is_tokens == (value.dim() == 1), "tokens are taken for logits, or the other way round")
        return value

    # vLLM inspects these where it does not know an architecture by itself. The plugin calls none of them.

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError


class UndeclaredOracle(Oracle):
    """Declares nothing: whole prompts, no shared prefixes, sampling on the host. Lists its decode sizes."""

    model_capabilities: ClassVar[dict[str, Any]] = {}
    tt_supported_decode_batch_sizes = (4, 2, 1)

    def decode_sizes(self) -> Sequence[int]:
        return self.tt_supported_decode_batch_sizes


class OracleVersion0(Oracle):
    """Version 0 of the decode call: `reset_batch`, and only where the device samples."""

    decode_input_update_contract: ClassVar[int] = 0

    def decode_forward(  # type: ignore[override]
        self,
        *,
        tokens: Tensor,
        page_table: Tensor,
        kv_cache: Cache,
        start_pos: Tensor,
        enable_trace: bool,
        read_from_device: bool,
        sampling_params: TTSamplingParams | None = None,
        prompt_tokens: Tensor | None = None,
        output_tokens: Tensor | None = None,
        reset_batch: bool | None = None,
    ) -> Handle:
        """As above. Without `reset_batch` everything but the page table may be out of date."""
        on_device = sampling_params is not None
        require(on_device == (reset_batch is not None), "reset_batch comes with device sampling alone")
        reset = reset_batch is not False
        self._load(tokens, start_pos, page_table, reset, True, enable_trace)
        if on_device and reset:
            self._resident.params = sampling_params
            self._load_histories(prompt_tokens, output_tokens)
        return self._timeline.decode(self._decode(kv_cache, on_device))


def _expect(tensor: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    require(
        tensor.dtype == dtype and tuple(tensor.shape) == shape,
        f"{tensor.dtype} {tuple(tensor.shape)}, not {shape}",
    )


def _padded(rows: list[list[int]] | None) -> Tensor | None:
    if rows is None:
        return None
    longest = max(map(len, rows), default=0)
    return torch.tensor([row + [-1] * (longest - len(row)) for row in rows], dtype=torch.long)
