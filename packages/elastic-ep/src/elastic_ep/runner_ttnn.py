"""Programs recorded as TT traces, over static tensors on the devices of one mesh.

Here static tensors are ttnn's, and a program calls ttnn: everything that it reads is a static tensor, what it
gives is copied into one. The mesh must be opened with a trace region. Written to ttnn 0.81: a trace replays
commands that hold the addresses of buffers; within a capture nothing may be compiled, read or written by the
host.
"""

from collections.abc import Mapping
from typing import Any

import torch

from elastic_ep.errors import RunnerError
from elastic_ep.runner import Address, EagerRunner, Program, Static


class TraceRunner(EagerRunner):
    """A trace outlives every change of the group that only writes contents; see `write`.

    Replays are queued, on the command queue ``queue``, and not waited for: what is read after them comes
    after them. RunnerError at capture if a static tensor is not on devices, or not on those of one mesh.
    """

    reruns = False

    def __init__(self, queue: int = 0) -> None:
        super().__init__()
        self._queue = queue
        self._trace: tuple[Any, Any] | None = None

    def release(self) -> None:
        """Give the trace's memory back; nothing is captured any more."""
        import ttnn

        if self._trace is not None:
            ttnn.release_trace(*self._trace)
        self._trace, self._program, self._captured = None, None, None

    def _record(self, program: Program) -> Program:
        import ttnn

        mesh, queue = _mesh_of(self._static), self._queue
        self.release()
        program(self._static)  # compiles what it needs
        trace = ttnn.begin_trace_capture(mesh, cq_id=queue)
        self._trace = (mesh, trace)
        try:
            program(self._static)
        finally:
            ttnn.end_trace_capture(mesh, trace, cq_id=queue)

        def replay(_: Static) -> None:
            ttnn.execute_trace(mesh, trace, cq_id=queue, blocking=False)

        return replay

    def _lie(self) -> dict[str, object]:
        return {name: self._address(tensor) for name, tensor in self._static.items()}

    def _address(self, tensor: Any) -> Address:
        """A tensor that was freed lies at 0."""
        if not tensor.is_allocated():
            return Address(0, (), (), str(tensor.dtype), "nowhere")
        form, memory = f"{tensor.dtype}, {tensor.layout}", tensor.memory_config()
        place = f"mesh {tensor.device().id()}, {memory.buffer_type}, {memory.memory_layout}"
        return Address(tensor.buffer_address(), tuple(tensor.padded_shape), (), form, place)


def write(tensor: Any, contents: torch.Tensor) -> None:
    """Give a static tensor new contents in place: the same on each device of its mesh.

    RunnerError if the shapes differ. Values are converted to the tensor's type.
    """
    import ttnn

    if tuple(contents.shape) != tuple(tensor.shape):
        raise RunnerError(
            f"contents of shape {tuple(contents.shape)} for a static tensor of shape {tuple(tensor.shape)}: "
            "shapes are fixed at capture"
        )
    everywhere = ttnn.ReplicateTensorToMesh(tensor.device())
    host = ttnn.from_torch(contents, dtype=tensor.dtype, layout=tensor.layout, mesh_mapper=everywhere)
    ttnn.copy_host_to_device_tensor(host, tensor)


def read(tensor: Any) -> torch.Tensor:
    """What a static tensor holds on the first device of its mesh, once all that was queued is done."""
    import ttnn

    contents: torch.Tensor = ttnn.to_torch(ttnn.get_device_tensors(tensor)[0])
    return contents


def _mesh_of(static: Mapping[str, Any]) -> Any:
    found = {name: None if isinstance(t, torch.Tensor) else t.device() for name, t in static.items()}
    meshes = {mesh.id(): mesh for mesh in found.values() if mesh is not None}
    if None in found.values() or len(meshes) != 1:
        where = {name: "the host" if mesh is None else f"mesh {mesh.id()}" for name, mesh in found.items()}
        raise RunnerError(f"static tensors are on {where}; make all of them on the devices of one mesh")
    return next(iter(meshes.values()))
