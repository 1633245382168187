"""Values for a mock cluster, whose memory reads as zeros: each call is made, and torch computes beside it.

`Shadowed` stands in for the module; its tensors have shadows, one torch tensor for each device of the mesh.
Most are computed by ttnn's own golden functions; what those leave out, or do for one device only, is written
here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import ttnn

Shadow = list[torch.Tensor]

TYPES = {
    ttnn.bfloat16: torch.bfloat16,
    ttnn.float32: torch.float32,
    ttnn.int32: torch.int64,
    ttnn.uint32: torch.int64,
    ttnn.uint16: torch.int64,
}
GOLDEN = ("topk", "add", "subtract", "multiply", "exp", "log", "sum", "max", "gather")


class Shadowed:
    """Passes on what it does not know, so that it may stand where the module stands."""

    def __init__(self, mesh: Any) -> None:
        self._mesh_shape: tuple[int, int] = tuple(mesh.shape)
        self._shadows: dict[int, Shadow] = {}
        self._splits: dict[int, Sequence[int | None]] = {}
        self._alive: list[Any] = []
        self.seeds: torch.Tensor | None = None
        """What the generators of rows were last seeded with."""

    def __getattr__(self, name: str) -> Any:
        if name in GOLDEN:
            return self._golden(name)
        return getattr(ttnn, name)

    def of(self, tensor: Any) -> Shadow:
        return self._shadows[tensor.tensor_id]

    def _keep(self, tensor: Any, shadow: Shadow) -> Any:
        self._shadows[tensor.tensor_id] = shadow
        return tensor

    def _golden(self, name: str) -> Callable[..., Any]:
        operation = getattr(ttnn, name)
        golden = ttnn.get_golden_function(operation)

        def call(*arguments: Any, **options: Any) -> Any:
            out = operation(*arguments, **options)
            several = out if isinstance(out, list | tuple) else [out]
            computed = []
            for device in range(self._devices):
                given, named = self._on(device, arguments), self._on(device, options)
                values = golden(*given, **named)
                computed.append(values if isinstance(values, list | tuple) else [values])
            for index, tensor in enumerate(several):
                found = [values[index].reshape(tuple(tensor.shape)) for values in computed]
                self._keep(tensor, [value.to(TYPES[tensor.dtype]) for value in found])
            return out

        return call

    @property
    def _devices(self) -> int:
        return self._mesh_shape[0] * self._mesh_shape[1]

    def _on(self, device: int, value: Any) -> Any:
        if isinstance(value, ttnn.Tensor):
            return self.of(value)[device]
        if isinstance(value, dict):
            return {name: self._on(device, part) for name, part in value.items()}
        return tuple(self._on(device, part) for part in value) if isinstance(value, tuple) else value

    def ShardTensor2dMesh(  # noqa: N802 (ttnn's name)
        self, mesh: Any, dims: Sequence[int | None], mesh_shape: tuple[int, int]
    ) -> Any:
        mapper = ttnn.ShardTensor2dMesh(mesh, dims=dims, mesh_shape=mesh_shape)
        self._splits[id(mapper)] = dims
        self._alive.append(mapper)  # else another could get its id
        return mapper

    def from_torch(self, value: torch.Tensor, *, mesh_mapper: Any, **options: Any) -> Any:
        tensor = ttnn.from_torch(value, mesh_mapper=mesh_mapper, **options)
        rows, columns = self._mesh_shape
        value = value.to(TYPES[options["dtype"]])
        shadow = []
        for device in range(self._devices):
            part = value
            for dim, size, index in zip(
                self._splits[id(mesh_mapper)], (rows, columns), divmod(device, columns), strict=True
            ):
                if dim is not None:
                    part = part.chunk(size, dim=dim)[index]
            shadow.append(part)
        return self._keep(tensor, shadow)

    def copy_host_to_device_tensor(self, host: Any, device: Any) -> None:
        ttnn.copy_host_to_device_tensor(host, device)
        self._keep(device, self.of(host))

    def typecast(self, tensor: Any, dtype: Any) -> Any:
        out = ttnn.typecast(tensor, dtype)
        return self._keep(out, [part.to(TYPES[dtype]) for part in self.of(tensor)])

    def to_layout(self, tensor: Any, layout: Any) -> Any:
        return self._keep(ttnn.to_layout(tensor, layout), self.of(tensor))

    def all_gather(self, tensor: Any, dim: int, cluster_axis: int) -> Any:
        out = ttnn.all_gather(tensor, dim=dim, cluster_axis=cluster_axis)
        parts, columns = self.of(tensor), self._mesh_shape[1]
        gathered = []
        for device in range(self._devices):
            mates = [
                d
                for d in range(self._devices)
                if _line(d, columns, cluster_axis) == _line(device, columns, cluster_axis)
            ]
            gathered.append(torch.cat([parts[mate] for mate in mates], dim=dim))
        return self._keep(out, gathered)

    def manual_seed(self, seeds: Any, user_ids: Any) -> Any:
        out = ttnn.manual_seed(seeds, user_ids=user_ids)
        assert self.of(user_ids)[0].tolist() == list(range(len(self.of(seeds)[0])))
        self.seeds = self.of(seeds)[0]
        return out

    def sampling(self, values: Any, ids: Any, *, k: Any, p: Any, temp: Any) -> Any:
        """A draw as the operation describes it, with torch's numbers: seeded rows of the 32 highest."""
        out = ttnn.sampling(values, ids, k=k, p=p, temp=temp)
        assert self.seeds is not None, "unseeded, all rows would draw alike"
        drawn = []
        for device in range(self._devices):
            scores, of, top_k, top_p, scale = (self.of(part)[device] for part in (values, ids, k, p, temp))
            rows = [
                _draw(
                    scores[0, 0, row].float() * scale[row].float(),
                    int(top_k[row]),
                    float(top_p[row]),
                    int(self.seeds[row]),
                )
                for row in range(len(scale))
            ]
            drawn.append(
                torch.stack([of[0, 0, row, place] for row, place in enumerate(rows)]).reshape(
                    tuple(out.shape)
                )
            )
        return self._keep(out, drawn)


def _line(device: int, columns: int, axis: int) -> int:
    """Devices with the same number are gathered along `axis`."""
    return device // columns if axis == 1 else device % columns


def _draw(scores: torch.Tensor, top_k: int, top_p: float, seed: int) -> int:
    best = scores.topk(top_k)
    probs = best.values.softmax(-1)
    probs = torch.where(probs.cumsum(-1) - probs < top_p, probs, 0.0)
    generator = torch.Generator().manual_seed(seed)
    return int(best.indices[torch.multinomial(probs, 1, generator=generator)])
