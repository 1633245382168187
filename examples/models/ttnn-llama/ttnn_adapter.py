"""A Llama adapter in ttnn: what the plugin asks of a model, on Tenstorrent devices.

Shapes: N rows of a prefill, B rows of a decode, W blocks a row, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import ttnn
from torch import Tensor
from tt_sampling import TTSamplingParams
from tt_sampling.ttnn_sampler import CANDIDATES, TtnnSampler
from ttnn_inputs import ROWS, Chunk, Resident, params_of, params_of_all
from ttnn_model import Cache, TtnnLlama

WEIGHT_TYPES = {None: ttnn.bfloat16, "accuracy": ttnn.bfloat16, "performance": ttnn.bfloat8_b}
CHUNKS = (128, 512, 2048)
"""Tokens that a prefill takes at once, padded: the smallest that will do, or several of the largest."""
POOL_TOKENS = 131_072

Handle = tuple[Any, int]  # what a decode gives, on the devices or copied to the host, and B


class LlamaForCausalLM:
    """One model on one row of devices; the plugin makes it with `initialize_vllm_model`."""

    model_capabilities: ClassVar[dict[str, Any]] = {
        "supports_prefix_caching": True,
        "supports_chunked_prefill": True,
        "supports_async_decode": True,
        "supports_sample_on_device": True,
        "supports_device_penalties": False,
        "max_device_top_k": CANDIDATES,
    }
    decode_input_update_contract = 1

    def __init__(
        self, *, network: TtnnLlama, mesh: Any, vocab: int, max_seq_len: int, vllm_config: object = None
    ) -> None:
        # vllm_config is never given: vLLM's inspection of the class looks for a parameter of that name.
        self.already_warmed_up_prefill = False
        self._network, self._mesh, self._max_seq_len = network, mesh, max_seq_len
        self._chunks = CHUNKS[: 1 + sum(size < max_seq_len for size in CHUNKS)]
        self._sampler = TtnnSampler(mesh, vocab)
        self._traces: dict[bool, tuple[Any, Any]] = {}  # by whether it samples: its id, and what it gives

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: Any,
        mesh_device: Any,
        max_batch_size: int,
        max_seq_len: int = 4096,
        tt_data_parallel: int = 1,
        optimizations: str | None = None,
    ) -> "LlamaForCausalLM":
        """Load the model directory that `hf_config` came from.

        Weights are bfloat16, with `optimizations="performance"` bfloat8_b; all else is bfloat16.
        Raises ValueError for what it cannot serve, and `ttnn_model.CheckpointError` for such a checkpoint.
        """
        if optimizations not in WEIGHT_TYPES:
            raise ValueError(f"optimizations is {optimizations!r}; use 'performance', 'accuracy' or None")
        if max_batch_size > ROWS or tt_data_parallel != 1:
            raise ValueError(
                f"{max_batch_size} rows in {tt_data_parallel} lanes; this model has {ROWS} in one lane:"
                " lower max_num_seqs, and leave data_parallel_size at 1"
            )
        directory = Path(hf_config._name_or_path)
        network = TtnnLlama(hf_config, directory, mesh_device, max_seq_len, WEIGHT_TYPES[optimizations])
        return cls(network=network, mesh=mesh_device, vocab=hf_config.vocab_size, max_seq_len=max_seq_len)

    @classmethod
    def get_max_tokens_all_users(cls, *, max_model_len: int, max_num_seqs: int, **_: object) -> int:
        """Tokens in the cache: all rows at full length, or less to spare the devices' memory."""
        return max(max_model_len, min(max_model_len * max_num_seqs, POOL_TOKENS))

    def allocate_kv_cache(self, shape: Sequence[int], dtype: torch.dtype, num_layers: int) -> list[Cache]:
        """Zeroed keys and values of each layer, of `shape` on each device; always bfloat16.

        Raises ValueError for blocks that are no whole tiles, or do not divide the chunks of a prefill.
        """
        self._block_size = shape[2]
        if self._block_size % 32 or CHUNKS[0] % self._block_size:
            raise ValueError(f"the block size is {self._block_size}; set it to 32, 64 or 128")
        # So wide that the padding of a chunk has blocks, too. The devices read tables in lines of 8.
        width = -(-self._max_seq_len // self._block_size) + self._chunks[-1] // self._block_size
        self._resident = Resident(self._mesh, width=-(-width // 8) * 8)
        zeros = {"dtype": ttnn.bfloat16, "layout": ttnn.TILE_LAYOUT, "device": self._mesh}
        return [(ttnn.zeros(shape, **zeros), ttnn.zeros(shape, **zeros)) for _ in range(num_layers)]

    def prefill_forward(
        self,
        *,
        tokens: Tensor,
        page_table: Tensor,
        kv_cache: list[Cache],
        enable_trace: bool,
        prompt_lens: Sequence[int],
        start_pos: Sequence[int],
        empty_slots: Sequence[int],
        sampling_params: TTSamplingParams | None = None,
    ) -> Tensor:
        """Compute `tokens[row, start_pos[row]:prompt_lens[row]]` of each row; what is before is in the cache.

        Returns logits [N, 1, V] of each row's last token, or with `sampling_params` ids [N]. Never traced.
        """
        samples, last = sampling_params is not None, []
        for row, end in enumerate(int(end) for end in prompt_lens):
            logits = self._prefill_row(
                tokens[row, :end], int(start_pos[row]), page_table[row, None], kv_cache
            )
            if sampling_params is not None:
                self._sampler.load(params_of(row, sampling_params))
                self._sampler.seed([end] * ROWS)
            last.append(self._sampler.sample(logits).ids if samples else logits)
        return torch.stack([self._on_host(out, is_tokens=samples)[0] for out in last])

    def _prefill_row(self, tokens: Tensor, start: int, blocks: Tensor, kv_cache: list[Cache]) -> Any:
        """Logits of 32 rows that are all those of the last of `tokens`."""
        # Prefixes end with blocks, other chunks may not: what such a block holds is computed again.
        start = start // self._block_size * self._block_size
        whole = self._resident.padded(blocks, 1)
        while True:
            size = next((size for size in self._chunks if size >= len(tokens) - start), self._chunks[-1])
            own = self._resident.padded(blocks[:, start // self._block_size :], 1)
            chunk = Chunk.put(self._mesh, tokens, start, size, whole, own, self._max_seq_len)
            logits = self._network.prefill(chunk, kv_cache)
            start += size
            if start >= len(tokens):
                return logits

    def decode_forward(
        self,
        *,
        tokens: Tensor,
        page_table: Tensor,
        kv_cache: list[Cache],
        start_pos: Tensor,
        enable_trace: bool,
        read_from_device: bool,
        sampling_params: TTSamplingParams | None = None,
        reload_inputs: bool,
        reload_page_table: bool,
        reload_sampling_params: bool,
        reset_sampling_state: bool,
    ) -> Handle | Tensor:
        """Compute one token of each live row, from what the devices hold after the reload commands.

        Returns a handle for `read_decode_output`, or with `read_from_device` logits [B, 1, V] or, with
        `sampling_params`, ids [B]. What stands in empty rows means nothing.
        """
        # Nothing else may be taken from the host: in a steady decode its tokens and positions are late.
        resident, samples = self._resident, sampling_params is not None
        if reload_inputs or reset_sampling_state:
            resident.load(tokens, start_pos)
        if reload_inputs or reset_sampling_state or reload_page_table:
            resident.load_page_table(page_table)
        if sampling_params is not None and reload_sampling_params:
            self._sampler.load(params_of_all(sampling_params))
        if samples:
            self._sampler.seed(resident.count())
        if enable_trace and samples in self._traces:
            trace, out = self._traces[samples]
            ttnn.execute_trace(self._mesh, trace, cq_id=0, blocking=False)
        else:
            out = self._step(kv_cache, samples)
        handle = (out, len(tokens))
        return self.process_decode_output_host(handle, samples) if read_from_device else handle

    def _step(self, kv_cache: list[Cache], samples: bool) -> Any:
        """The programs of a decode, run or captured: logits of the devices' parts, or ids."""
        resident = self._resident
        logits = self._network.decode(resident.tokens, resident.positions, resident.page_table, kv_cache)
        if not samples:
            return logits
        ids = self._sampler.sample(logits).ids
        resident.advance(ids)
        return ids

    def read_decode_output(self, out: Handle, async_read: bool = False) -> Any:
        """Start to copy an output to the host: (handle, events), or the handle once it is there."""
        on_device, rows = out
        copied = (ttnn.from_device(on_device, blocking=not async_read), rows)
        return (copied, [ttnn.record_event(self._mesh, 0)]) if async_read else copied

    def process_decode_output_host(self, out: Handle, is_tokens: bool) -> Tensor:
        copied, rows = out
        return self._on_host(copied, is_tokens)[:rows]

    def _on_host(self, tensor: Any, is_tokens: bool) -> Tensor:
        """Ids [32], which every device has, or logits [32, 1, V] put together from all devices."""
        parts: list[Tensor] = [ttnn.to_torch(part) for part in ttnn.get_device_tensors(tensor)]
        if is_tokens:
            return parts[0].reshape(ROWS).to(torch.int64)
        return torch.cat(parts, dim=-1).reshape(ROWS, 1, -1).float()

    def warmup_model_prefill(
        self, *, kv_cache: list[Cache], enable_trace: bool, can_sample_on_device: bool
    ) -> None:
        """Prefill a chunk of each size into block 0, which vLLM gives to no request."""
        if self.already_warmed_up_prefill:
            return
        for size in self._chunks:
            length = min(size, self._max_seq_len)
            for params in [None, TTSamplingParams.neutral(1)][: 1 + can_sample_on_device]:
                self.prefill_forward(
                    tokens=torch.zeros(1, length, dtype=torch.int32),
                    page_table=torch.zeros(1, 1, dtype=torch.int32),
                    kv_cache=kv_cache,
                    enable_trace=False,
                    prompt_lens=[length],
                    start_pos=[0],
                    empty_slots=[0],
                    sampling_params=params,
                )
        self.already_warmed_up_prefill = True

    def warmup_model_decode(
        self,
        *,
        kv_cache: list[Cache],
        max_batch_size: int,
        num_blocks: int,
        can_sample_on_device: bool,
        enable_trace: bool,
    ) -> None:
        """Compile the programs of a decode, or with `enable_trace` capture them. All rows are empty."""
        self._sampler.seed([0] * ROWS)
        for samples in [False, True][: 1 + can_sample_on_device]:
            if not enable_trace:
                self._step(kv_cache, samples)
                continue
            trace = ttnn.begin_trace_capture(self._mesh, cq_id=0)
            out = self._step(kv_cache, samples)
            ttnn.end_trace_capture(self._mesh, trace, cq_id=0)
            self._traces[samples] = (trace, out)

    # vLLM inspects these where it does not know an architecture by itself. The plugin calls none of them.

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError("the plugin calls prefill_forward and decode_forward")

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError("the plugin calls prefill_forward and decode_forward")

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError("the plugin calls prefill_forward and decode_forward")
