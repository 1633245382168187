"""A Qwen 3 whose layers alternate between full attention and a sliding window: several KV cache groups."""

from collections.abc import Sequence
from typing import Any

import torch
from paged import LayerCache, PagedModel, Reload
from torch import Tensor
from transformers import Qwen3ForCausalLM
from tt_sampling import TTSamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec


class WindowedQwen3(PagedModel):
    _HYBRID_KV_CACHE_GROUPS_ENABLED = True
    network_class = Qwen3ForCausalLM

    @classmethod
    def get_kv_cache_spec(cls, vllm_config: Any) -> dict[str, KVCacheSpec]:
        config = vllm_config.model_config.hf_config
        common = {
            "block_size": vllm_config.cache_config.block_size,
            "num_kv_heads": config.num_key_value_heads,
            "head_size": config.head_dim,
            "dtype": torch.float32,
        }
        full, window = (
            FullAttentionSpec(**common),
            SlidingWindowSpec(sliding_window=config.sliding_window, **common),
        )
        return {
            f"model.layers.{index}.self_attn": window if kind == "sliding_attention" else full
            for index, kind in enumerate(config.layer_types)
        }

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
        page_tables_per_layer: list[Tensor] | None = None,
        sampling_params: TTSamplingParams | None = None,
    ) -> Tensor:
        """Logits ``[N, 1, V]``, or ids ``[N]``."""
        tables = self.tables_of(len(kv_cache), page_table, page_tables_per_layer, len(tokens))
        places = [(int(start), int(end)) for start, end in zip(start_pos, prompt_lens, strict=True)]
        rows = [
            (start, end, {"input_ids": row[None, start:end].long()})
            for row, (start, end) in zip(tokens, places, strict=True)
        ]
        return self.prefill(kv_cache, rows, tables, empty_slots, sampling_params)

    def decode_forward(
        self,
        *,
        tokens: Tensor,
        page_table: Tensor,
        kv_cache: list[LayerCache],
        start_pos: Tensor,
        enable_trace: bool,
        read_from_device: bool,
        page_tables_per_layer: list[Tensor] | None = None,
        sampling_params: TTSamplingParams | None = None,
        reload_inputs: bool,
        reload_page_table: bool,
        reload_sampling_params: bool,
        reset_sampling_state: bool,
    ) -> Tensor:
        """Logits ``[B, 1, V]``, or ids ``[B]``."""
        commands = Reload(reload_inputs, reload_page_table, reload_sampling_params)
        inputs = (tokens, start_pos, page_table, page_tables_per_layer)
        return self.decode(kv_cache, inputs, sampling_params, commands)
