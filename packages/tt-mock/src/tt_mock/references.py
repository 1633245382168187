"""What operations compute that have no golden function, or one that will not do: torch in, torch out.

Each is called for one device with its tensors, and gives what the operation returns there; shapes need only
hold as many values. None: it changed a tensor that it was given. Integers come as int64, all else as float32.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

T = torch.Tensor


def _same(tensor: T, *_: Any, **__: Any) -> T:
    return tensor


def _embedding(places: T, table: T, **_: Any) -> T:
    return table.flatten(0, -2)[places]


def _plus_one(tensor: T, *, skip_negative_entries: bool = False, **_: Any) -> None:
    tensor += (tensor >= 0) | (not skip_negative_entries)


def _split(qkv: T, num_heads: int, num_kv_heads: int) -> list[T]:
    """[1, 1, S, _] -> three of [1, S, heads, D]."""
    size = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    heads = qkv.reshape(1, qkv.shape[2], -1, size)
    return list(torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=2))


def _split_rows(qkv: T, *, num_heads: int, num_kv_heads: int, memory_config: Any) -> list[T]:
    return _split(qkv, num_heads, num_kv_heads)


def _split_prompt(qkv: T, *, num_heads: int, num_kv_heads: int, transpose_k_heads: bool) -> list[T]:
    assert not transpose_k_heads
    return [part.transpose(1, 2) for part in _split(qkv, num_heads, num_kv_heads)]


def _rotated(heads: T, cos: T, sin: T, is_decode_mode: bool = False) -> T:
    assert cos.shape[1 if is_decode_mode else 2] == heads.shape[1 if is_decode_mode else 2]
    first, second = heads.float().chunk(2, dim=-1)
    return heads.float() * cos.float() + torch.cat((-second, first), dim=-1) * sin.float()


def _update(cache: T, new: T, *, update_idxs_tensor: T, page_table: T) -> None:
    size = cache.shape[2]
    for row, position in enumerate(update_idxs_tensor.tolist()):
        if position >= 0:
            cache[page_table[row, position // size], :, position % size] = new[0, row]


def _fill(cache: T, new: T, page_table: T, *, batch_idx: int) -> None:
    size = cache.shape[2]
    for place in range(0, new.shape[2], size):
        cache[page_table[batch_idx, place // size]] = new[0, :, place : place + size]


def _attended(query: T, keys: T, values: T, blocks: T, positions: T) -> T:
    """query: [heads, S, D] at `positions` [S] of the row with these blocks."""
    used = blocks[: int(positions.max()) // keys.shape[2] + 1]
    key, value = (cache[used].transpose(0, 1).flatten(1, 2).float()[None] for cache in (keys, values))
    mask = torch.arange(key.shape[2]) <= positions[:, None]
    return torch.nn.functional.scaled_dot_product_attention(
        query.float()[None], key, value, attn_mask=mask, enable_gqa=True
    )[0]


def _attend_rows(query: T, keys: T, values: T, page_table: T, *, cur_pos_tensor: T) -> T:
    out = torch.full(query.shape, float("nan"))
    for row, position in enumerate(cur_pos_tensor):
        if position >= 0:
            of_row = query[0, row, :, None]
            out[0, row] = _attended(of_row, keys, values, page_table[row], position[None])[:, 0]
    return out


def _attend_prompt(
    query: T,
    keys: T,
    values: T,
    page_table: T,
    *,
    chunk_start_idx_tensor: T,
    program_config: Any,
) -> T:
    start = int(chunk_start_idx_tensor)
    assert start % program_config.q_chunk_size == 0
    assert start % program_config.k_chunk_size == 0
    positions = start + torch.arange(query.shape[2])
    return _attended(query[0], keys, values, page_table[0], positions)[None]


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("from_device", "reshape", "to_layout", "to_memory_config", "typecast", "unsqueeze_to_4D"), _same
        ),
        "embedding": _embedding,
        "plus_one": _plus_one,
        "zeros": lambda shape, **_: torch.zeros(tuple(shape)),
        "experimental.nlp_create_qkv_heads": _split_prompt,
        "experimental.nlp_create_qkv_heads_decode": _split_rows,
        "experimental.nlp_concat_heads": lambda heads: heads.transpose(1, 2),
        "experimental.nlp_concat_heads_decode": lambda heads, num_heads: heads[:, :, :num_heads],
        "experimental.paged_fill_cache": _fill,
        "experimental.paged_update_cache": _update,
        "experimental.rotary_embedding_hf": _rotated,
        "transformer.chunked_scaled_dot_product_attention": _attend_prompt,
        "transformer.paged_scaled_dot_product_attention_decode": _attend_rows,
    }
)
"""By the operation's name below ttnn."""
