"""How large the KV cache is and what it looks like, in the adapter's terms and in vLLM's."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec

from vllm_tt_plugin.errors import ConfigurationError, Problem
from vllm_tt_plugin.lanes import lanes_of, rows_per_lane

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DEFAULT_MAX_TOKENS = 131_072
"""Tokens a KV pool holds where the adapter does not say (the adapter contract's default)."""


@attrs.frozen
class KVCacheShape:
    """One layer's cache on one device: ``[num_blocks, kv_heads, block_size, head_size]``."""

    kv_heads: int
    block_size: int
    head_size: int
    dtype: torch.dtype
    num_layers: int

    @classmethod
    def of(cls, config: "VllmConfig", num_devices: int) -> "KVCacheShape":
        """A lane's devices share the KV heads among them; heads are repeated where devices outnumber them."""
        lanes = lanes_of(config)
        model = config.model_config
        heads = model.get_total_num_kv_heads()
        return cls(
            kv_heads=heads // min(num_devices // lanes, heads),
            block_size=config.cache_config.block_size,
            head_size=model.get_head_size(),
            dtype=kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, model),
            num_layers=model.get_num_layers(config.parallel_config),
        )

    @classmethod
    def of_specs(cls, specs: Mapping[str, KVCacheSpec]) -> "KVCacheShape":
        """The shape that an adapter's own description, alike for all its layers, comes to."""
        spec = next(iter(specs.values()))
        assert isinstance(spec, FullAttentionSpec), "adapter_specs lets no other kind pass"
        return cls(
            kv_heads=spec.num_kv_heads,
            block_size=spec.block_size,
            head_size=spec.head_size,
            dtype=spec.dtype,
            num_layers=len(specs),
        )

    def specs(self) -> dict[str, KVCacheSpec]:
        """What vLLM's planner is told: one full-attention layer each, all of one group."""
        spec = FullAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=self.kv_heads,
            head_size=self.head_size,
            dtype=self.dtype,
        )
        return {f"model.layers.{index}.self_attn.attn": spec for index in range(self.num_layers)}

    def bytes_for(self, tokens: int) -> int:
        """Bytes that ``tokens`` tokens take in all layers, and the block that vLLM keeps for itself."""
        blocks = math.ceil(tokens / self.block_size) + 1
        return blocks * sum(spec.page_size_bytes for spec in self.specs().values())


def adapter_specs(adapter_class: type[Any], config: "VllmConfig") -> dict[str, KVCacheSpec] | None:
    """The specs of an adapter that describes its own cache, or None.

    Raises ``ConfigurationError`` where they form more than one group: page tables are one for all layers.
    """
    describe = getattr(adapter_class, "get_kv_cache_spec", None)
    specs: dict[str, KVCacheSpec] | None = describe(config) if describe is not None else None
    if specs is not None and (
        len({spec.page_size_bytes for spec in specs.values()}) != 1
        or not all(type(spec) is FullAttentionSpec for spec in specs.values())
    ):
        raise ConfigurationError(
            [
                Problem(
                    f"{adapter_class.__name__}.get_kv_cache_spec describes layers that are not all alike,"
                    " or that do not attend to everything",
                    "Serve a model whose layers all keep the same full-attention cache",
                )
            ]
        )
    return specs


def max_tokens(adapter_class: type[Any], config: "VllmConfig", num_devices: int) -> int:
    """The token budget of the KV pool, which each lane has one of.

    Raises ``ConfigurationError`` if it is below ``max_model_len``, which is never lowered by itself.
    """
    budget = DEFAULT_MAX_TOKENS
    ask = getattr(adapter_class, "get_max_tokens_all_users", None)
    longest = config.model_config.max_model_len
    if ask is not None:
        budget = ask(
            model_name=config.model_config.model,
            num_devices=num_devices,
            tt_data_parallel=lanes_of(config),
            max_model_len=longest,
            max_num_seqs=rows_per_lane(config),
        )
    if budget < longest and config.cache_config.num_gpu_blocks_override is None:
        raise ConfigurationError(
            [
                Problem(
                    f"the model's KV pool holds {budget} tokens on this mesh, and max_model_len is {longest}",
                    f"Start with --max-model-len {budget} or less",
                )
            ]
        )
    return budget


def blocks_per_request(config: "VllmConfig", kv_cache: KVCacheConfig) -> int:
    """The width of every page table."""
    needed = math.ceil(config.model_config.max_model_len / config.cache_config.block_size)
    return min(needed, kv_cache.num_blocks)
