"""How large the KV cache is and what it looks like, in the adapter's terms and in vLLM's.

Layers of one group keep the same kind of cache and share their block lists. Most models have one group;
where sliding windows stand beside full attention, vLLM makes several groups over one pool of blocks, and
layers of different groups overlay each other: a block belongs to one group at a time.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from tt_registry import Capabilities
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)

from vllm_tt_plugin.errors import ConfigurationError, Problem
from vllm_tt_plugin.lanes import lanes_of, rows_per_lane

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DEFAULT_MAX_TOKENS = 131_072
"""Tokens a KV pool holds where the adapter does not say (the adapter contract's default)."""
_SERVED_KINDS = (FullAttentionSpec, SlidingWindowSpec)


@attrs.frozen
class LayerCache:
    """One layer's cache, in the order of layers."""

    shape: tuple[int, int, int, int]
    """``(num_blocks, kv_heads, block_size, head_size)`` on one device."""
    dtype: torch.dtype
    tensor_index: int
    """Layers of the same index share one buffer."""
    group: int = 0


@attrs.frozen
class PageTables:
    """The form of page tables: ``[rows, width]`` for each KV cache group, padded with 0."""

    width: int
    group_of_layer: tuple[int, ...] = ()
    """The group of each layer; empty where all layers are of one, and need no tables of their own."""

    @classmethod
    def of(cls, layers: Sequence[LayerCache], width: int) -> "PageTables":
        several = len({layer.group for layer in layers}) > 1
        return cls(width, tuple(layer.group for layer in layers) if several else ())

    @property
    def groups(self) -> int:
        return max(self.group_of_layer, default=0) + 1

    def empty(self, rows: int) -> npt.NDArray[np.int32]:
        """``[groups, rows, width]``."""
        return np.zeros((self.groups, rows, self.width), np.int32)

    def per_layer(self, tables: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """For each layer its group's table; None where one serves all."""
        return [tables[group] for group in self.group_of_layer] or None


def plain_specs(config: "VllmConfig", num_devices: int) -> dict[str, KVCacheSpec]:
    """What vLLM's planner is told of a model that does not describe its cache: full attention everywhere.

    A lane's devices share the KV heads among them; heads are repeated where devices outnumber them.
    """
    model = config.model_config
    heads = model.get_total_num_kv_heads()
    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=heads // min(num_devices // lanes_of(config), heads),
        head_size=model.get_head_size(),
        dtype=kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, model),
    )
    layers = range(model.get_num_layers(config.parallel_config))
    return {f"model.layers.{index}.self_attn.attn": spec for index in layers}


def adapter_specs(
    adapter_class: type[Any], capabilities: Capabilities, config: "VllmConfig"
) -> dict[str, KVCacheSpec] | None:
    """The specs of an adapter that describes its own cache, or None.

    Raises ``ConfigurationError`` for kinds of attention that page tables cannot tell of, for layers without
    their number, and where layers differ and the adapter has no way to allocate them.
    """
    describe = getattr(adapter_class, "get_kv_cache_spec", None)
    specs: dict[str, KVCacheSpec] | None = describe(config) if describe is not None else None
    if specs is not None:
        problems = _problems_of(adapter_class, capabilities, specs)
        if problems:
            raise ConfigurationError(problems)
    return specs


def _problems_of(
    adapter_class: type[Any], capabilities: Capabilities, specs: Mapping[str, KVCacheSpec]
) -> list[Problem]:
    name = f"{adapter_class.__name__}.get_kv_cache_spec"
    problems = []
    kinds = {type(spec).__name__ for spec in specs.values() if type(spec) not in _SERVED_KINDS}
    if kinds:
        problems.append(
            Problem(
                f"{name} describes {', '.join(sorted(kinds))}",
                "Serve a model whose layers are FullAttentionSpec or SlidingWindowSpec: other caches are not"
                " lists of blocks by position",
            )
        )
    numbers = [_layer_number(layer) for layer in specs]
    if sorted(numbers, key=str) != sorted(range(len(specs)), key=str):
        problems.append(
            Problem(
                f"{name} names the layers {', '.join(specs)}",
                "Give each name a part layers.<i>, with i from 0 to the number of layers, each once",
            )
        )
    alike = len(set(specs.values())) == 1
    if not alike and capabilities.hybrid_kv_cache_groups and not _allocates_layers(adapter_class):
        problems.append(
            Problem(
                f"{name} describes layers of different kinds, and the class has no"
                " allocate_kv_cache_per_layer",
                "Add it, or leave _HYBRID_KV_CACHE_GROUPS_ENABLED out",
            )
        )
    return problems


def _allocates_layers(adapter_class: type[Any]) -> bool:
    return hasattr(adapter_class, "allocate_kv_cache_per_layer")


def _layer_number(name: str) -> int | None:
    found = re.search(r"\blayers\.(\d+)\b", name)
    return int(found[1]) if found else None


def bytes_for(specs: Mapping[str, KVCacheSpec], tokens: int) -> int:
    """Bytes that ``tokens`` tokens take in all layers, and the block that vLLM keeps for itself.

    Sliding windows are counted at full length. Several groups share the pool that results, so what windows
    leave free holds more tokens.
    """
    return sum((math.ceil(tokens / spec.block_size) + 1) * spec.page_size_bytes for spec in specs.values())


def layer_caches(kv_cache: KVCacheConfig) -> tuple[LayerCache, ...]:
    """The cache of each layer, as vLLM planned it.

    Layers whose pages coincide in vLLM's allocation overlay each other and share a buffer. Pages that overlap
    in part, which only layouts with blocks outermost have, get buffers of their own.
    """
    starts = _starts(kv_cache)
    specs = {
        layer: (_spec_of(group.kv_cache_spec, layer), number)
        for number, group in enumerate(kv_cache.kv_cache_groups)
        for layer in group.layer_names
    }
    buffers: dict[tuple[int, int], int] = {}
    caches = []
    for layer in sorted(specs, key=lambda name: _layer_number(name) or 0):
        spec, group = specs[layer]
        assert isinstance(spec, AttentionSpec), "adapter_specs lets no other kind pass"
        pages = starts[layer], spec.page_size_bytes
        caches.append(
            LayerCache(
                shape=(kv_cache.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_size),
                dtype=spec.dtype,
                tensor_index=buffers.setdefault(pages, len(buffers)),
                group=group,
            )
        )
    return tuple(caches)


def _starts(kv_cache: KVCacheConfig) -> dict[str, int]:
    """Where each layer's first block lies in vLLM's one allocation, in bytes."""
    return {
        layer: tensor.offset + index * tensor.layer_stride
        for tensor in kv_cache.kv_cache_tensors
        for index, layer in enumerate(tensor.layers)
    }


def _spec_of(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


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
    """The width of every page table: no request needs more blocks of a group, and none can hold more.

    A window's list goes on from position 0, so without full attention it may be longer than the pool.
    """
    needed = math.ceil(config.model_config.max_model_len / config.cache_config.block_size)
    kinds = [spec for group in kv_cache.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]
    if not any(isinstance(spec, FullAttentionSpec) for spec in kinds):
        return needed
    return min(needed, kv_cache.num_blocks)
