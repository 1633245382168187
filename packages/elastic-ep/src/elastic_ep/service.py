"""What a rank serves: the one interface that a model brings."""

from collections.abc import Mapping
from typing import Protocol

import attrs
import torch

from elastic_ep.lane_shape import LaneShape
from elastic_ep.placement import Placement, Shape
from elastic_ep.runner import Static


class Device(Protocol):
    """The part of a model that runs on a device: weights in the device's memory, which no other rank writes
    to, and programs captured over tensors there.

    Ranks exchange tokens and weights through the host. So the methods of a service that has a device bring
    the inputs of a program to it, replay the program, and bring the results back; its group is given a
    runner that ``reruns``, such as `EagerRunner`.

    It is opened where the service is built, in the rank's own process: nothing of it outlives the fork that
    made that. Three threads come here: one builds, one prepares, one serves, and what is set for a thread,
    such as the current GPU, each must set. While programs are replayed, another thread may call `fill`; a
    device that is not to be used by two at once needs a lock.
    """

    in_place: bool
    """Whether captured programs stay valid when only contents change; if not, a commit captures again."""

    def capture(self) -> None:
        """Bring in the dense weights, which the host has by now, and record all programs.

        For a joiner in the background, before the first step; if not ``in_place``, in the serving thread at
        each commit. `fill` does not run meanwhile.
        """

    def check(self) -> None:
        """RunnerError if a tensor no longer lies where it lay at capture. Called at every commit."""

    def fill(self, layer: int, slot: int) -> None:
        """Take over the weights that have come into a slot of the service's ``experts``; nothing is routed
        there yet. Done when it returns: others may come into the host's slot next.

        Called in the background, before the first capture too, and between two steps where lost experts were
        loaded.
        """

    def close(self) -> None:
        """Let go of the device: the rank has left, within `Patience.leave`, or the group ends.

        Not called for a rank that raises or is killed, since others wait for the end of its process; nor for
        a joiner whose operation is given up, which is killed.
        """


class Service(Protocol):
    """One rank's model and its work.

    Tensors are made once and written in place ever after: their addresses are captured. All ranks of a
    group have the same ``fingerprint``: it names the model, its shapes and its numerics.
    """

    shape: Shape
    lane: LaneShape
    dtype: torch.dtype
    fingerprint: str

    @property
    def dense(self) -> Mapping[str, torch.Tensor]:
        """What every rank holds whole; a joiner reads it from a rank that serves."""

    @property
    def experts(self) -> Mapping[str, torch.Tensor]:
        """``[layers, slots, ...]`` each: the weights in this rank's slots."""

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """What else its programs read and write."""

    @property
    def device(self) -> Device | None:
        """Where programs of its own run, if any do."""

    def load_dense(self) -> None:
        """Fill ``dense`` from outside the group: nobody serves yet."""

    def load_expert(self, layer: int, expert: int, slot: int) -> None:
        """Bring an expert into a slot from outside the group: no rank holds it."""

    def tune(self, found: bytes | None) -> bytes:
        """Find out how its programs run best, or take over what the rank has found out that a joiner reads
        from; None if nobody serves yet. What joiners shall get from this rank, at most a MiB.

        Called in the background, when the weights are there and before the capture.
        """

    def begin(self, step: int) -> None:
        """Bring in the inputs of a step; the same again if it is run again. Called outside of programs.

        It must not wait for requests: who takes longer than `Patience.stall` is taken to hang, here as in
        `apply` and `seen`, and everybody waits for it. A rank without requests brings in none.
        """

    def before(self, static: Static, layer: int) -> None:
        """Program: ``tokens``, ``experts``, ``weights`` and ``count`` for this layer's exchange."""

    def run_experts(self, static: Static, layer: int) -> None:
        """Program: rows ``in`` through the experts in the slots that ``in_head`` names, into ``results``.

        Rows whose slot is -1 may become anything.
        """

    def after(self, static: Static, layer: int) -> None:
        """Program: take up ``output``."""

    def apply(self, step: int) -> None:
        """The step is complete everywhere it matters: give its results out. Once for each step."""

    def leaving(self, leaves: bool) -> None:
        """The rank is to leave: take no more requests, and end those that are here. Or, if that is given up,
        it stays. Called between steps."""

    @property
    def idle(self) -> bool:
        """Whether nobody would miss anything if the rank left now. One that is to leave is asked in the
        background, and serves on until it is; if that takes longer than `Patience.prepare`, it stays."""

    def seen(self, record: "Seen") -> None:
        """Something worth counting happened; called between steps, so be quick."""


@attrs.frozen
class Stepped:
    """A step was completed; ``at`` is monotonic, in seconds."""

    epoch: int
    step: int
    at: float


@attrs.frozen
class Flipped:
    """The tables were switched, which took ``seconds``, ``work`` of them on a core; ``captures`` is how many
    there were since the start."""

    epoch: int
    placement: Placement
    at: float
    seconds: float
    work: float
    captures: int


@attrs.frozen
class Readied:
    """A preparation ended; it failed if it says why."""

    epoch: int
    at: float
    seconds: float
    why: str


Seen = Stepped | Flipped | Readied
