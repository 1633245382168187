"""A step as captured programs with transfers between them: layer by layer, pack and send, run the experts,
give back and unpack."""

from collections.abc import Callable

import torch

from elastic_ep.errors import FencedError, RunnerError
from elastic_ep.lane import NO_NOTE, Lane, Note, Programs
from elastic_ep.packing import count, pack, unpack
from elastic_ep.routing import RoutingTables
from elastic_ep.runner import Program, Runner, Static
from elastic_ep.service import Service


class Step:
    """The programs of all layers, each with its own runner, over one set of static tensors; ``captures`` says
    how often all were captured.

    If it ``counts``, ``load`` ``[layers, experts]`` is how often each expert was routed to since
    the capture.
    """

    def __init__(
        self,
        service: Service,
        lane: Lane,
        tables: RoutingTables,
        make_runner: Callable[[], Runner],
        counts: bool = False,
    ) -> None:
        self._service = service
        self._lane = lane
        self._tables = tables
        shape = service.shape
        self.load = torch.zeros((shape.layers, shape.experts), dtype=torch.int64) if counts else None
        layers = range(service.shape.layers)
        self._programs = [program for layer in layers for program in self._layer(layer)]
        self._runners = [make_runner() for _ in self._programs]
        if service.device is not None and not all(runner.reruns for runner in self._runners):
            raise RunnerError(
                f"{type(self._runners[0]).__name__} would record a service that has a device of its own; "
                "give it a runner that reruns, such as EagerRunner"
            )
        self._captured: Static = {}
        self.captures = 0
        replays = [runner.replay for runner in self._runners]
        self._layers = [Programs(*replays[3 * layer : 3 * layer + 3]) for layer in layers]

    @property
    def static(self) -> dict[str, torch.Tensor]:
        """Every tensor whose address the programs may hold."""
        parts = {"dense": self._service.dense, "experts": self._service.experts, "state": self._service.state}
        own = {f"{part}.{name}": t for part, tensors in parts.items() for name, t in tensors.items()}
        tables = {"slots": self._tables.slots, "replicas": self._tables.replicas}
        load = {} if self.load is None else {"load": self.load}
        return own | {f"tables.{name}": t for name, t in tables.items()} | load | self._lane.static

    @property
    def in_place(self) -> bool:
        device = self._service.device
        return all(runner.in_place for runner in self._runners) and (device is None or device.in_place)

    def capture(self) -> None:
        """Record all programs, and run each so that its first step is no slower than others.

        Contents of the static tensors may change.
        """
        self.captures += 1
        if self._service.device is not None:
            self._service.device.capture()
        static = self._captured = self.static
        for runner, program in zip(self._runners, self._programs, strict=True):
            runner.capture(program, static)
            runner.replay()
        if self.load is not None:
            self.load.zero_()

    def rehearse(self) -> None:
        """Check and exchange with nobody once: what a thread does for the first time takes it longer, and in
        a commit all others would wait for that."""
        self.check()
        for layer, programs in enumerate(self._layers):
            self._lane.exchange(0, layer, {}, programs, 0.0, degraded=True)
        if self.load is not None:
            self.load.zero_()

    def check(self) -> None:
        """RunnerError if a static tensor was replaced or moved since the capture."""
        moved = sorted(name for name, tensor in self.static.items() if tensor is not self._captured.get(name))
        if moved:
            raise RunnerError(
                f"static tensors were replaced since capture: {moved}; write with copy_ instead"
            )
        self._runners[0].check()
        if self._service.device is not None:
            self._service.device.check()

    def run(
        self,
        epoch: int,
        step: int,
        peers: dict[int, str],
        seconds: float,
        interrupted: Callable[[], bool],
        note: Note = NO_NOTE,
        degraded: bool = False,
    ) -> dict[int, Note]:
        """One step over all layers; the notes that came with it. Raises what `Lane.exchange` raises."""
        self._service.begin(step)
        for layer, programs in enumerate(self._layers):
            if interrupted():
                raise FencedError(f"step {step} was interrupted by a fence before layer {layer}")
            turn = step * len(self._layers) + layer
            self._lane.exchange(epoch, turn, peers, programs, seconds, interrupted, note, degraded)
        return self._lane.notes()

    def _layer(self, layer: int) -> tuple[Program, Program, Program]:
        service, shape, rank, counts = self._service, self._lane.shape, self._lane.rank, self.load is not None

        def send(static: Static) -> None:
            service.before(static, layer)
            pack(static, shape, rank, static["tables.slots"][layer], static["tables.replicas"][layer])
            if counts:
                count(static, static["load"][layer])

        def experts(static: Static) -> None:
            service.run_experts(static, layer)

        def receive(static: Static) -> None:
            unpack(static, shape)
            service.after(static, layer)

        return send, experts, receive
