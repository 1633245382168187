"""Values for a mock cluster, whose memory reads as zeros: each call is made, and torch computes beside it.

`Shadows` stands where the module ttnn stands, in the modules of a model: `model.ttnn = Shadows(mesh)`.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

import torch
import ttnn

from tt_mock.errors import ValuesError
from tt_mock.references import REFERENCES
from tt_mock.traces import Part

Shadow = list[torch.Tensor]
"""What a tensor holds: one torch tensor for each device of the mesh, row by row."""
INTEGERS = (ttnn.int32, ttnn.uint32, ttnn.uint16, ttnn.uint8)
NO_MORE: Mapping[str, Callable[..., Any]] = MappingProxyType({})


class Shadows:
    """Passes on what computes nothing, and keeps values beside what does.

    They are computed by `references`, by tt_mock.references, or else by the operation's golden function, and
    not rounded as devices round them: so mistakes show and near ties do not.
    """

    def __init__(self, mesh: Any, references: Mapping[str, Callable[..., Any]] = NO_MORE) -> None:
        """`references`: what operations compute on one device, by their names below ttnn."""
        self._mesh_shape: tuple[int, int] = tuple(mesh.shape)
        self._references = {**REFERENCES, **references}
        self._shadows: dict[int, Shadow] = {}
        self._without: dict[int, str] = {}
        self._splits: dict[int, Callable[[torch.Tensor], Shadow]] = {}
        self._joints: dict[int, int] = {}
        self._alive: list[Any] = []
        self.seeds: torch.Tensor | None = None
        """What the generators of rows were last seeded with."""

    def __getattr__(self, name: str) -> Any:
        return self.look_up(name)

    def look_up(self, name: str) -> Any:
        """What ttnn has under `name`, dots included, with values beside it; a Part for a module."""
        if hasattr(type(self), name):
            return getattr(self, name)
        found: Any = ttnn
        for part in name.split("."):
            found = getattr(found, part)
        if isinstance(found, ModuleType):
            return Part(self, name)
        if name in self._references:
            return self._by(found, self._references[name])
        if hasattr(found, "golden_function"):
            return (
                self._by(found, found.golden_function) if found.golden_function else self._blind(name, found)
            )
        return found

    def of(self, tensor: Any) -> Shadow:
        """What a tensor holds. Raises ValuesError where nothing computed it."""
        if tensor.tensor_id not in self._shadows:
            operation = self._without.get(tensor.tensor_id)
            told = f"ttnn.{operation} has no golden function" if operation else "its maker is not known"
            raise ValuesError(
                f"a tensor of shape {tensor.shape} has no values: {told}; give Shadows a reference"
            )
        return self._shadows[tensor.tensor_id]

    def store(self, tensor: Any, values: Sequence[torch.Tensor]) -> Any:
        """Make `tensor` hold a copy of `values`, one for each device; gives `tensor`."""
        kind, shape = _kind(tensor.dtype), tuple(tensor.shape)
        self._shadows[tensor.tensor_id] = [value.reshape(shape).to(kind, copy=True) for value in values]
        return tensor

    def repeat(self, old: Any, new: Any) -> None:
        for tensor, computed in zip(_several(old), _several(new), strict=True):
            if isinstance(computed, ttnn.Tensor) and computed.tensor_id in self._shadows:
                self.store(tensor, self.of(computed))

    def held(self) -> dict[int, Shadow]:
        return {key: [value.clone() for value in values] for key, values in self._shadows.items()}

    def restore(self, held: dict[int, Shadow]) -> None:
        self._shadows = held

    @property
    def _devices(self) -> range:
        return range(self._mesh_shape[0] * self._mesh_shape[1])

    def _by(self, operation: Any, reference: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            out = operation(*arguments, **options)
            computed = [
                reference(*self._on(device, arguments), **self._on(device, options))
                for device in self._devices
            ]
            if computed[0] is not None:
                for tensor, *values in zip(_several(out), *map(_several, computed), strict=True):
                    self.store(tensor, values)
            return out

        return call

    def _blind(self, name: str, operation: Any) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            out = operation(*arguments, **options)
            for tensor in _several(out):
                if isinstance(tensor, ttnn.Tensor):
                    self._without[tensor.tensor_id] = name
            return out

        return call

    def _on(self, device: int, value: Any) -> Any:
        if isinstance(value, ttnn.Tensor):
            return self.of(value)[device]
        if isinstance(value, dict):
            return {name: self._on(device, part) for name, part in value.items()}
        return (
            type(value)(self._on(device, part) for part in value) if type(value) in (tuple, list) else value
        )

    def ReplicateTensorToMesh(self, mesh: Any) -> Any:  # noqa: N802 (ttnn's names, here and below)
        return self._known(ttnn.ReplicateTensorToMesh(mesh), lambda value: [value] * len(self._devices))

    def ShardTensorToMesh(self, mesh: Any, dim: int) -> Any:  # noqa: N802
        split = lambda value: list(value.chunk(len(self._devices), dim))  # noqa: E731
        return self._known(ttnn.ShardTensorToMesh(mesh, dim=dim), split)

    def ShardTensor2dMesh(  # noqa: N802
        self, mesh: Any, dims: tuple[int | None, int | None], mesh_shape: tuple[int, int]
    ) -> Any:
        def split(value: torch.Tensor) -> Shadow:
            (down, across), (rows, columns) = dims, self._mesh_shape
            parts = [value] * rows if down is None else value.chunk(rows, down)
            return [
                piece
                for part in parts
                for piece in ([part] * columns if across is None else part.chunk(columns, across))
            ]

        return self._known(ttnn.ShardTensor2dMesh(mesh, dims=dims, mesh_shape=mesh_shape), split)

    def _known(self, mapper: Any, split: Callable[[torch.Tensor], Shadow]) -> Any:
        self._splits[id(mapper)] = split
        self._alive.append(mapper)  # else another could get its id
        return mapper

    def from_torch(self, value: torch.Tensor, *, mesh_mapper: Any = None, **options: Any) -> Any:
        """Without a mapper every device gets all of it. Raises ValuesError for one that was not made here."""
        tensor = ttnn.from_torch(value, mesh_mapper=mesh_mapper, **options)
        if mesh_mapper is None:
            return self.store(tensor, [value] * len(self._devices))
        if id(mesh_mapper) not in self._splits:
            raise ValuesError(
                "a mesh_mapper that is none of ReplicateTensorToMesh, ShardTensorToMesh and 2dMesh"
            )
        return self.store(tensor, self._splits[id(mesh_mapper)](value))

    def ConcatMeshToTensor(self, mesh: Any, dim: int) -> Any:  # noqa: N802
        composer = ttnn.ConcatMeshToTensor(mesh, dim=dim)
        self._joints[id(composer)] = dim
        self._alive.append(composer)
        return composer

    def to_torch(self, tensor: Any, *, mesh_composer: Any = None, **options: Any) -> torch.Tensor:
        """Raises ValuesError for a composer other than ConcatMeshToTensor."""
        read: torch.Tensor = ttnn.to_torch(tensor, mesh_composer=mesh_composer, **options)
        if mesh_composer is None:
            return self.of(tensor)[0].reshape(read.shape).clone()
        if id(mesh_composer) not in self._joints:
            raise ValuesError("a mesh_composer that is no ConcatMeshToTensor")
        return torch.cat(self.of(tensor), self._joints[id(mesh_composer)])

    def get_device_tensors(self, tensor: Any) -> list[Any]:
        parts = ttnn.get_device_tensors(tensor)
        return [self.store(part, [value]) for part, value in zip(parts, self.of(tensor), strict=True)]

    def copy_host_to_device_tensor(self, host: Any, device: Any) -> None:
        ttnn.copy_host_to_device_tensor(host, device)
        self.store(device, self.of(host))

    def copy(self, source: Any, target: Any) -> Any:
        self.store(target, self.of(source))
        return ttnn.copy(source, target)

    def wait_for_event(self, cq_id: Any, mesh_event: Any) -> None:
        """A wait on a mock device ends the process, so the host waits in its place."""
        ttnn.event_synchronize(mesh_event)

    def all_gather(self, tensor: Any, dim: int, cluster_axis: int) -> Any:
        out, parts = ttnn.all_gather(tensor, dim=dim, cluster_axis=cluster_axis), self.of(tensor)
        gathered = [
            torch.cat([parts[mate] for mate in self._line(d, cluster_axis)], dim) for d in self._devices
        ]
        return self.store(out, gathered)

    def all_reduce(self, tensor: Any, cluster_axis: int) -> Any:
        out, parts = ttnn.all_reduce(tensor, cluster_axis=cluster_axis), self.of(tensor)
        total = [
            torch.stack([parts[mate] for mate in self._line(d, cluster_axis)]).sum(0) for d in self._devices
        ]
        return self.store(out, total)

    def _place(self, device: int) -> tuple[int, int]:
        return divmod(device, self._mesh_shape[1])

    def _line(self, device: int, axis: int) -> list[int]:
        """The devices that `device` shares a row (axis 1) or a column (axis 0) with, itself too."""
        other = 1 - axis
        return [mate for mate in self._devices if self._place(mate)[other] == self._place(device)[other]]

    def manual_seed(self, seeds: Any, user_ids: Any) -> Any:
        out = ttnn.manual_seed(seeds, user_ids=user_ids)
        assert self.of(user_ids)[0].tolist() == list(range(len(self.of(seeds)[0])))
        self.seeds = self.of(seeds)[0]
        return out

    def sampling(self, values: Any, ids: Any, *, k: Any, p: Any, temp: Any) -> Any:
        """A draw as the operation describes it, with torch's numbers: seeded rows of the 32 highest."""
        out = ttnn.sampling(values, ids, k=k, p=p, temp=temp)
        drawn: Shadow = []
        before: Shadow = []
        for device in self._devices:
            given = [self.of(part)[device] for part in (values, ids, k, p, temp)]
            same = bool(drawn) and all(map(torch.equal, given, before))
            drawn.append(drawn[-1] if same else self._drawn(*given))
            before = given
        return self.store(out, drawn)

    def _drawn(
        self, values: torch.Tensor, ids: torch.Tensor, k: torch.Tensor, p: torch.Tensor, temp: torch.Tensor
    ) -> torch.Tensor:
        """Ids [rows, 1], as one device draws them; a row without numbers, as empty ones are, draws any."""
        if self.seeds is None:
            raise ValuesError("ttnn.sampling without manual_seed: unseeded, all rows would draw alike")
        scores = (values[0, 0] * temp[:, None]).nan_to_num()
        best = scores.sort(dim=-1, descending=True, stable=True)
        ranks = torch.arange(scores.shape[-1])
        probs = best.values.masked_fill(ranks >= k[:, None], -torch.inf).softmax(-1)
        probs = probs * (probs.cumsum(-1) - probs < p[:, None])
        places = [
            torch.multinomial(row, 1, generator=torch.Generator().manual_seed(int(seed)))
            for row, seed in zip(probs, self.seeds, strict=True)
        ]
        return ids[0, 0].gather(1, best.indices.gather(1, torch.stack(places)))


def _kind(dtype: Any) -> torch.dtype:
    return torch.int64 if dtype in INTEGERS else torch.float32


def _several(out: Any) -> list[Any]:
    return list(out) if isinstance(out, list | tuple) else [out]
