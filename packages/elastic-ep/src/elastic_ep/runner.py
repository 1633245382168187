"""Programs over static tensors: captured once, replayed on the same memory, whatever its contents have
become.

A CUDA graph, a TT trace and a program here are one idea: addresses and shapes are fixed at capture, and a
reconfiguration only writes new contents. `Runner.check` is called at every commit and says which tensor
broke that.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from elastic_ep.errors import RunnerError

Static = Mapping[str, torch.Tensor]
Program = Callable[[Static], None]
"""Reads and writes the static tensors in place, and gives nothing back."""


@attrs.frozen
class Address:
    """Where a static tensor lies and how it is laid out; no stride where that is not laid out by strides."""

    pointer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str


@attrs.frozen
class Fingerprint:
    """All that a captured program depends on: each static tensor's address, and how many captures there
    were."""

    captures: int
    addresses: tuple[tuple[str, Address], ...]


class Runner(Protocol):
    """``in_place`` says whether a captured program stays valid when only contents change; if not, a commit
    captures again. ``reruns`` says whether each replay runs the program's Python anew."""

    in_place: bool
    reruns: bool

    def capture(self, program: Program, static: Static) -> None:
        """Record the program over these tensors; replaces an earlier one. May run it, so contents may
        change."""

    def replay(self) -> None:
        """Run the captured program once on its tensors. RunnerError if nothing was captured."""

    def fingerprint(self) -> Fingerprint:
        """Of the tensors as they lie now."""

    def check(self) -> None:
        """RunnerError, naming the tensors, if any no longer lies where it lay at capture."""


class EagerRunner:
    """Runs the program anew each time: the reference for the others."""

    in_place = True
    reruns = True

    def __init__(self) -> None:
        self._captures = 0
        self._program: Program | None = None
        self._static: Static = {}
        self._captured: Fingerprint | None = None
        self._layouts: dict[str, object] = {}

    def capture(self, program: Program, static: Static) -> None:
        self._captures += 1
        self._static = static
        self._program = self._record(program)
        self._captured = self.fingerprint()
        self._layouts = self._lie()

    def replay(self) -> None:
        if self._program is None:
            raise RunnerError("nothing was captured; call capture first")
        with torch.no_grad():
            self._program(self._static)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(
            self._captures, tuple((name, self._address(t)) for name, t in sorted(self._static.items()))
        )

    def check(self) -> None:
        if self._captured is None:
            raise RunnerError("nothing was captured; call capture first")
        if self._lie() == self._layouts:
            return
        then, now = dict(self._captured.addresses), dict(self.fingerprint().addresses)
        moved = [
            f"{name} from {then.get(name)} to {now.get(name)}"
            for name in sorted(then | now)
            if then.get(name) != now.get(name)
        ]
        if moved:
            raise RunnerError(
                f"static tensors moved since capture: {'; '.join(moved)}; write contents in place instead"
            )

    def _lie(self) -> dict[str, object]:
        """Where the tensors lie now; quick, since it is asked at every commit."""
        return {
            name: (t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for name, t in self._static.items()
        }

    def _address(self, tensor: torch.Tensor) -> Address:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return Address(tensor.data_ptr(), shape, stride, str(tensor.dtype), str(tensor.device))

    def _record(self, program: Program) -> Program:
        return program


class StaticRunner(EagerRunner):
    """Records the program's tensor operations once, on the CPU, and replays exactly those on the recorded
    tensors.

    As in a CUDA graph, Python does not run again: a branch taken, a number computed or a tensor that is not
    in ``static`` at capture is part of the program from then on.
    """

    reruns = False

    def _record(self, program: Program) -> Program:
        recorder = _Recorder()
        with torch.no_grad(), recorder:
            program(self._static)
        return recorder.replay


class _Recorder(TorchFunctionMode):
    """Every tensor operation of a program, with the tensors it met: kept, so that ids stay theirs."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, found))
        return found

    def replay(self, _: Static) -> None:
        """The same operations on the same tensors, and on what they give this time."""
        made: dict[int, Any] = {}

        def current(value: Any) -> Any:
            return made.get(id(value), value)

        with torch.no_grad():
            for func, args, kwargs, found in self._calls:
                result = func(*tree_map(current, args), **tree_map(current, kwargs))
                for old, new in zip(tree_leaves(found), tree_leaves(result), strict=True):
                    if isinstance(old, torch.Tensor):
                        made[id(old)] = new
