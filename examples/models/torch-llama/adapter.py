"""A Llama adapter in plain torch: what the plugin asks of a model, and a template for a new one.

Its "device" is the CPU behind a queue (one thread) that runs what it is given in order, as a device does.
Shapes: N rows of a prefill, B rows of a decode (the rows of all lanes), W blocks a row, V vocabulary.
"""

import copy
import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch
from model import LayerCache, PagedLlama
from resident import Event, Output, Resident
from torch import Tensor
from tt_sampling import TTSamplingParams, sample

TYPES = {None: torch.float32, "accuracy": torch.float32, "performance": torch.bfloat16}
POOL_TOKENS = 32_768
WARMUP_TOKENS = 16

OnHost = Tensor | tuple[Tensor, tuple[Tensor, Tensor]]


class LlamaForCausalLM:
    """One model on one mesh; the plugin makes it with `initialize_vllm_model`."""

    model_capabilities: ClassVar[dict[str, Any]] = {
        "supports_prefix_caching": True,
        "supports_chunked_prefill": True,
        "supports_async_decode": True,
        "supports_sample_on_device": True,
        "supports_device_penalties": True,
        "supports_device_seeds": True,
        "max_device_top_k": None,
        "device_logprobs": "top32",
        "folds_dp_into_lanes": True,
    }
    decode_input_update_contract = 1

    def __init__(self, *, network: PagedLlama, rows: int, lanes: int, vllm_config: object = None) -> None:
        # vllm_config is never given: vLLM's inspection of the class looks for a parameter of that name.
        self.already_warmed_up_prefill = False
        self._network = network
        self._lanes = lanes
        self._rows_per_lane = rows // lanes
        self._resident = Resident.empty(rows)
        self._queue = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch-llama")

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: Any,
        mesh_device: object,
        max_batch_size: int,
        max_seq_len: int = 4096,
        tt_data_parallel: int = 1,
        optimizations: str | None = None,
    ) -> "LlamaForCausalLM":
        """Load the model directory that `hf_config` came from; `max_batch_size` counts the rows of all lanes.

        Weights, cache and arithmetic are float32, whatever type the checkpoint has, so that greedy tokens
        are those of any other float32 implementation; `optimizations="performance"` makes all three bfloat16.
        Raises ValueError for another word there, and `model.CheckpointError` for a checkpoint that this
        network cannot serve.
        """
        if optimizations not in TYPES:
            raise ValueError(f"optimizations is {optimizations!r}; use 'performance', 'accuracy' or None")
        network = PagedLlama.load(hf_config, Path(hf_config._name_or_path), max_seq_len, TYPES[optimizations])
        return cls(network=network, rows=max_batch_size, lanes=tt_data_parallel)

    @classmethod
    def get_max_tokens_all_users(cls, *, max_model_len: int, max_num_seqs: int, **_: object) -> int:
        """Tokens in the cache of a lane: all its rows at full length, or less to spare the host's memory."""
        return max(max_model_len, min(max_model_len * max_num_seqs, POOL_TOKENS))

    def allocate_kv_cache(
        self, shape: Sequence[int], dtype: torch.dtype, num_layers: int
    ) -> list[LayerCache]:
        """Zeroed keys and values of each layer: [lanes * blocks, key/value heads, block size, head size].

        `shape` says [blocks of a lane, heads of one device, block size, head size]. One process holds here
        what the devices of all lanes would hold, so all heads of the model are in it, and the lanes lie one
        after another. `dtype` is what vLLM reckons memory with; the network's own type is used.
        """
        blocks, _, block_size, head_size = shape
        whole = (self._lanes * blocks, self._network.key_value_heads, block_size, head_size)
        kind = self._network.dtype
        with torch.inference_mode(False):  # else only threads in that mode could write to it: ours is not
            return [
                (torch.zeros(whole, dtype=kind), torch.zeros(whole, dtype=kind)) for _ in range(num_layers)
            ]

    def prefill_forward(
        self,
        *,
        tokens: Tensor,
        page_table: Tensor,
        kv_cache: list[LayerCache],
        enable_trace: bool,
        prompt_lens: Sequence[int],
        start_pos: Sequence[int],
        empty_slots: Sequence[int],
        sampling_params: TTSamplingParams | None = None,
    ) -> OnHost:
        """Compute `tokens[row, start_pos[row]:prompt_lens[row]]` of each row; what is before is in the cache.

        Returns logits [N, 1, V] of each row's last token, or with `sampling_params` ids [N], or where a row
        asked for logprobs (ids, (values [N, 32], their ids [N, 32])), highest first.
        """
        ends = [int(end) for end in prompt_lens]

        def run() -> Output:
            blocks = self._blocks(page_table.long(), torch.tensor(empty_slots), kv_cache)
            last = []
            for row, end in enumerate(ends):
                start = int(start_pos[row])
                chunk = tokens[row, None, start:end].long()
                last.append(self._network(chunk, torch.arange(start, end)[None], blocks[row, None], kv_cache))
            logits = torch.cat(last)
            if sampling_params is None:
                return logits[:, None], None
            # Rows with penalties are sampled on the host: a prefill does not say where a prompt ends and the
            # output of a resumed request begins.
            drawn = sample(logits, sampling_params, ends)
            return drawn.ids, drawn.top

        return _on_host(self._queue.submit(run))

    def decode_forward(
        self,
        *,
        tokens: Tensor,
        page_table: Tensor,
        kv_cache: list[LayerCache],
        start_pos: Tensor,
        enable_trace: bool,
        read_from_device: bool,
        sampling_params: TTSamplingParams | None = None,
        prompt_tokens: Tensor | None = None,
        output_tokens: Tensor | None = None,
        slot_remap: Tensor | None = None,
        reload_inputs: bool,
        reload_page_table: bool,
        reload_sampling_params: bool,
        reset_sampling_state: bool,
    ) -> Future[Output] | OnHost:
        """Compute one token of each live row, from what the device holds after the reload commands.

        Returns logits [B, 1, V] (NaN in empty rows), or with `sampling_params` ids [B] (-1 in empty rows),
        or (ids, (values [B, 32], their ids [B, 32])). With `read_from_device=False` it returns at once, with
        a handle that `read_decode_output` takes.
        """
        # Nothing that is not commanded may be used: in a steady decode the host's tokens and positions are
        # old. The rest is copied now: the host may write to its tensors when this call is over.
        commanded: dict[str, Any] = {}
        if reload_inputs or reset_sampling_state:
            commanded |= {"tokens": _copy(tokens[:, 0]), "positions": _copy(start_pos)}
        if reload_inputs or reset_sampling_state or reload_page_table:
            commanded |= {"page_table": _copy(page_table)}
        if reload_sampling_params:
            commanded |= {"params": copy.deepcopy(sampling_params)}
        if reset_sampling_state:
            commanded |= {"prompt_tokens": _copy(prompt_tokens), "output_tokens": _copy(output_tokens)}
        remap = _copy(slot_remap)
        on_device = sampling_params is not None

        def run() -> Output:
            held = self._resident if remap is None else self._resident.at(remap)
            self._resident = dataclasses.replace(held, **commanded)
            return self._decode(kv_cache, on_device)

        handle = self._queue.submit(run)
        return _on_host(handle) if read_from_device else handle

    def _decode(self, kv_cache: list[LayerCache], on_device: bool) -> Output:
        held = self._resident
        rows = (held.positions >= 0).nonzero()[:, 0]
        live = held.at(rows)
        blocks = self._blocks(live.page_table, rows, kv_cache)
        logits = self._network(live.tokens[:, None], live.positions[:, None], blocks, kv_cache)
        size = len(held.positions)
        if not on_device:
            return _spread(logits, rows, size, float("nan"))[:, None], None
        drawn_at = (live.positions + 1).tolist()
        drawn = sample(logits, live.params, drawn_at, live.prompt_tokens, live.output_tokens)
        ids = _spread(drawn.ids, rows, size, -1)
        self._resident = held.advanced(ids)
        if drawn.top is None:
            return ids, None
        values, of = drawn.top
        return ids, (_spread(values, rows, size, float("nan")), _spread(of, rows, size, -1))

    def _blocks(self, page_table: Tensor, slots: Tensor, kv_cache: list[LayerCache]) -> Tensor:
        """Where each slot's blocks lie in the whole cache: every lane counts its own blocks from 0."""
        lanes = slots // self._rows_per_lane
        return page_table + lanes[:, None] * (len(kv_cache[0][0]) // self._lanes)

    def read_decode_output(self, out: Future[Output], async_read: bool = False) -> Any:
        """Start to copy an output to the host: (handle, events), or the handle once it is there."""
        if async_read:
            return out, [Event(out)]
        out.result()
        return out

    def process_decode_output_host(self, out: Future[Output], is_tokens: bool) -> OnHost:
        """The torch tensors of a decode that was read; a device that pads or shards needs `is_tokens`."""
        return _on_host(out)

    def warmup_model_prefill(
        self, *, kv_cache: list[LayerCache], enable_trace: bool, can_sample_on_device: bool
    ) -> None:
        """Run small prefills in block 0, which vLLM gives to no request; a device compiles its programs."""
        if self.already_warmed_up_prefill:
            return
        length = min(WARMUP_TOKENS, kv_cache[0][0].shape[2])
        for params in [None, TTSamplingParams.neutral(1)][: 1 + can_sample_on_device]:
            self.prefill_forward(
                tokens=torch.zeros(1, length, dtype=torch.int32),
                page_table=torch.zeros(1, 1, dtype=torch.int32),
                kv_cache=kv_cache,
                enable_trace=enable_trace,
                prompt_lens=[length],
                start_pos=[0],
                empty_slots=[0],
                sampling_params=params,
            )
        self.already_warmed_up_prefill = True

    def warmup_model_decode(
        self,
        *,
        kv_cache: list[LayerCache],
        max_batch_size: int,
        num_blocks: int,
        can_sample_on_device: bool,
        enable_trace: bool,
    ) -> None:
        """Run decodes in block 0, with all rows live; the device keeps nothing of them."""
        kept = self._resident
        for params in [None, TTSamplingParams.neutral(max_batch_size)][: 1 + can_sample_on_device]:
            self.decode_forward(
                tokens=torch.zeros(max_batch_size, 1, dtype=torch.int32),
                page_table=torch.zeros(max_batch_size, num_blocks, dtype=torch.int32),
                kv_cache=kv_cache,
                start_pos=torch.zeros(max_batch_size, dtype=torch.int32),
                enable_trace=enable_trace,
                read_from_device=True,
                sampling_params=params,
                reload_inputs=True,
                reload_page_table=False,
                reload_sampling_params=params is not None,
                reset_sampling_state=params is not None,
            )
        self._resident = kept

    # vLLM inspects these where it does not know an architecture by itself. The plugin calls none of them.

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError("the plugin calls prefill_forward and decode_forward")

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError("the plugin calls prefill_forward and decode_forward")

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError("the plugin calls prefill_forward and decode_forward")


def _on_host(out: Future[Output]) -> OnHost:
    values, logprobs = out.result()
    return values if logprobs is None else (values, logprobs)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.long, copy=True)


def _spread(values: Tensor, rows: Tensor, size: int, empty: float) -> Tensor:
    """[live rows, ...] -> [size, ...]: `values` at `rows`, `empty` elsewhere."""
    spread = values.new_full((size, *values.shape[1:]), empty)
    spread[rows] = values
    return spread
