"""Values for the ttnn Llama on mock clusters, and stand-ins for the calls of traces, which crash there."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import ttnn

from .shadows import GOLDEN, TYPES, Shadowed

T = torch.Tensor
UNROUNDED = TYPES | dict.fromkeys((ttnn.bfloat16, ttnn.bfloat8_b), torch.float32)
"""Values are not rounded as the devices round them, so that mistakes show and near ties do not."""
MORE_GOLDEN = ("rms_norm", "linear", "maximum")
AS_IT_IS = ("to_memory_config", "unsqueeze_to_4D", "reshape", "to_layout", "typecast", "from_device")
NOT_IN_A_TRACE = ("from_torch", "to_torch", "from_device", "copy_host_to_device_tensor", "record_event")


class LlamaShadows(Shadowed):
    """Knows the operations of the model, too."""

    def __init__(self, mesh: Any) -> None:
        super().__init__(mesh)
        self.experimental = self._several(ttnn.experimental, EXPERIMENTAL)
        self.transformer = self._several(ttnn.transformer, TRANSFORMER)
        self.embedding = self._by(ttnn.embedding, lambda places, table, layout: table.flatten(0, -2)[places])

    def __getattr__(self, name: str) -> Any:
        if name in GOLDEN or name in MORE_GOLDEN:
            return self._by(getattr(ttnn, name), ttnn.get_golden_function(getattr(ttnn, name)))
        return super().__getattr__(name)

    def _several(self, place: Any, references: dict[str, Callable[..., Any]]) -> SimpleNamespace:
        return SimpleNamespace(
            **{name: self._by(getattr(place, name), reference) for name, reference in references.items()}
        )

    def _by(self, operation: Any, reference: Callable[..., Any]) -> Callable[..., Any]:
        """The operation, whose values `reference` computes for each device; None: it changed an input."""

        def call(*arguments: Any, **options: Any) -> Any:
            out = operation(*arguments, **options)
            computed = [
                reference(*self._on(device, arguments), **self._on(device, options))
                for device in range(self._devices)
            ]
            if computed[0] is not None:
                several = isinstance(out, list | tuple)
                for index, tensor in enumerate(out if several else [out]):
                    self.store(tensor, [values[index] if several else values for values in computed])
            return out

        return call

    def store(self, tensor: Any, values: list[T]) -> None:
        kind, shape = UNROUNDED[tensor.dtype], tuple(tensor.shape)
        self._keep(tensor, [value.reshape(shape).to(kind, copy=True) for value in values])

    def repeat(self, tensor: Any, new: Any) -> None:
        """Give `tensor` the values of `new`, if it has any: not all that an operation returns has."""
        if new.tensor_id in self._shadows:
            self.store(tensor, self.of(new))

    def held(self) -> dict[int, list[T]]:
        """A copy of all values, by the ids of their tensors."""
        return {key: [value.clone() for value in values] for key, values in self._shadows.items()}

    def restore(self, held: dict[int, list[T]]) -> None:
        self._shadows = held

    def from_torch(self, value: T, **options: Any) -> Any:
        if UNROUNDED[options["dtype"]] != torch.float32:
            return super().from_torch(value, **options)
        exact = super().from_torch(value.float(), **options | {"dtype": ttnn.float32})
        return self._keep(ttnn.from_torch(value, **options), self.of(exact))

    def zeros(self, shape: Any, **options: Any) -> Any:
        out = ttnn.zeros(shape, **options)
        self.store(out, [torch.zeros(tuple(shape)) for _ in range(self._devices)])
        return out

    def copy(self, source: Any, target: Any) -> Any:
        self.store(target, self.of(source))
        return ttnn.copy(source, target)

    def plus_one(self, tensor: Any, *, skip_negative_entries: bool) -> Any:
        assert skip_negative_entries
        self.store(tensor, [value + (value >= 0) for value in self.of(tensor)])
        return ttnn.plus_one(tensor, skip_negative_entries=True)

    def all_reduce(self, tensor: Any, cluster_axis: int) -> Any:
        assert (cluster_axis, self._mesh_shape[0]) == (1, 1)
        out = ttnn.all_reduce(tensor, cluster_axis=1)
        total = torch.stack([part.float() for part in self.of(tensor)]).sum(0)
        self.store(out, [total] * self._devices)
        return out

    def sampling(self, values: Any, ids: Any, **options: Any) -> Any:
        """A row without numbers, as empty ones are, draws some token."""
        self.store(values, [part.nan_to_num() for part in self.of(values)])
        return super().sampling(values, ids, **options)

    def get_device_tensors(self, tensor: Any) -> list[Any]:
        parts = ttnn.get_device_tensors(tensor)
        return [self._keep(part, [values]) for part, values in zip(parts, self.of(tensor), strict=True)]

    def to_torch(self, tensor: Any) -> T:
        (value,), shape = self.of(tensor), ttnn.to_torch(tensor).shape
        return value.reshape(shape).clone()


def _same(name: str) -> Callable[..., Any]:
    def call(self: LlamaShadows, tensor: Any, *arguments: Any, **options: Any) -> Any:
        out = getattr(ttnn, name)(tensor, *arguments, **options)
        self.store(out, self.of(tensor))
        return out

    return call


for _name in AS_IT_IS:
    setattr(LlamaShadows, _name, _same(_name))


class TracedShadows:
    """Stands where the module stands, and holds the rules of traces.

    Between begin and end no program may be compiled, nothing may be read, written or made on the host, and
    nothing is computed: the calls are recorded. Executing the trace makes them again, on the same tensors.
    """

    def __init__(self, shadows: LlamaShadows) -> None:
        self.shadows = shadows
        self.traces: dict[int, list[Any]] = {}
        self.executed: list[int] = []
        self.mesh: Any = None
        self.programs = 0
        """How many the mesh had when a trace was last captured; those compiled since may harm it."""
        self._recording: list[Any] | None = None
        self._before: dict[int, list[T]] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.shadows, name)
        if isinstance(found, SimpleNamespace):
            return SimpleNamespace(**{key: self._recorded(key, call) for key, call in vars(found).items()})
        return found if isinstance(found, type) or not callable(found) else self._recorded(name, found)

    def _recorded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any, **options: Any) -> Any:
            if self._recording is not None and name in NOT_IN_A_TRACE:
                raise RuntimeError(f"ttnn.{name} within a trace")
            out = call(*arguments, **options)
            if self._recording is not None:
                self._recording.append((call, arguments, options, out))
            return out

        return recorded

    def begin_trace_capture(self, mesh: Any, *, cq_id: int) -> int:
        assert self._recording is None, "a trace is captured already"
        mesh.set_program_cache_misses_allowed(False)
        self._recording, self._before = [], self.shadows.held()
        return len(self.traces)

    def end_trace_capture(self, mesh: Any, trace: int, *, cq_id: int) -> None:
        assert self._recording is not None, "no trace is captured"
        assert trace == len(self.traces), "another trace is captured"
        mesh.set_program_cache_misses_allowed(True)
        self.traces[trace], self._recording = self._recording, None
        self.mesh, self.programs = mesh, mesh.num_program_cache_entries()
        self.shadows.restore(self._before)

    def execute_trace(self, mesh: Any, trace: int, *, cq_id: int, blocking: bool) -> None:
        assert not blocking
        mesh.set_program_cache_misses_allowed(False)
        for call, arguments, options, out in self.traces[trace]:
            again = call(*arguments, **options)
            for tensor, new in zip(_tensors(out), _tensors(again), strict=True):
                self.shadows.repeat(tensor, new)
        mesh.set_program_cache_misses_allowed(True)
        self.executed.append(trace)


def _tensors(out: Any) -> list[Any]:
    return [one for one in (out if isinstance(out, list | tuple) else [out]) if isinstance(one, ttnn.Tensor)]


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


EXPERIMENTAL: dict[str, Callable[..., Any]] = {
    "nlp_create_qkv_heads_decode": _split_rows,
    "nlp_create_qkv_heads": _split_prompt,
    "nlp_concat_heads_decode": lambda heads, num_heads: heads[:, :, :num_heads],
    "nlp_concat_heads": lambda heads: heads.transpose(1, 2),
    "rotary_embedding_hf": _rotated,
    "paged_update_cache": _update,
    "paged_fill_cache": _fill,
}
TRANSFORMER: dict[str, Callable[..., Any]] = {
    "paged_scaled_dot_product_attention_decode": _attend_rows,
    "chunked_scaled_dot_product_attention": _attend_prompt,
}
