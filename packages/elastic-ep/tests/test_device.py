"""A service with a device: its programs are captured, checked and filled where its rank's are."""

import functools
import threading
import time
from collections.abc import Callable

import pytest
import torch
from elastic_ep import (
    Ballot,
    EagerRunner,
    Lane,
    MemoryNetwork,
    Patience,
    Reload,
    RoutingTables,
    Runner,
    RunnerError,
    Seat,
    Shape,
    Stage,
    StaticRunner,
    place,
    tables,
)
from elastic_ep.plane import Plane
from elastic_ep.prepare import Preparation
from elastic_ep.rendezvous import Meeting
from elastic_ep.runner import Static
from elastic_ep.runner_cuda import CudaGraphRunner
from elastic_ep.step import Step
from elastic_ep.testing.toy import ToyConfig, ToyService

KINDS = [
    (StaticRunner, "cpu"),
    pytest.param(
        CudaGraphRunner,
        "cuda",
        marks=pytest.mark.skipif(
            not torch.cuda.is_available(), reason="CUDA graphs are recorded on a GPU only"
        ),
    ),
]
CONFIG = ToyConfig(Shape(layers=2, experts=4, slots=4, max_ranks=2), tokens=4, hidden=8)


class Memory:
    """A device with memory of its own, whose programs are recorded over it; see `elastic_ep.Device`."""

    def __init__(self, service: ToyService, kind: type[EagerRunner], device: str) -> None:
        self.in_place = True
        self._compute = functools.partial(ToyService.run_experts, service)
        self._host = service.experts["up"]
        lane = CONFIG.lane
        tensors = {
            "in": torch.zeros((lane.max_ranks + 1, lane.rows, lane.hidden)),
            "in_head": torch.zeros((lane.max_ranks + 1, 4 + lane.rows), dtype=torch.int64),
            "results": torch.zeros((lane.max_ranks + 1, lane.rows, lane.hidden)),
            "experts.up": torch.zeros_like(self._host),
            "state.rows": service.state["rows"].clone(),
        }
        self.static = {name: tensor.to(device) for name, tensor in tensors.items()}
        self.runners = [kind() for _ in range(CONFIG.shape.layers)]

    def capture(self) -> None:
        for layer, runner in enumerate(self.runners):
            runner.capture(functools.partial(self._compute, layer=layer), self.static)

    def check(self) -> None:
        for runner in self.runners:
            runner.check()

    def fill(self, layer: int, slot: int) -> None:
        self.static["experts.up"][layer, slot].copy_(self._host[layer, slot])

    def close(self) -> None:
        pass


class OnMemory(ToyService):
    def __init__(self, kind: type[EagerRunner] = StaticRunner, device: str = "cpu") -> None:
        super().__init__(CONFIG, 0)
        self.device: Memory = Memory(self, kind, device)

    def run_experts(self, static: Static, layer: int) -> None:
        for name in ("in", "in_head"):
            self.device.static[name].copy_(static[name])
        self.device.runners[layer].replay()
        static["results"].copy_(self.device.static["results"])


def alone(service: OnMemory, make_runner: Callable[[], Runner] = EagerRunner, counts: bool = False) -> Step:
    """A rank that serves by itself."""
    board = RoutingTables(CONFIG.shape)
    service.load_dense()
    placement = place(CONFIG.shape, (0,))
    board.write(tables(placement))
    lane = Lane(MemoryNetwork().end("0"), 0, service.lane)
    step = Step(service, lane, board, make_runner, counts)
    for layer in range(CONFIG.shape.layers):
        for slot, expert in enumerate(placement.row(layer, 0)):
            service.load_expert(layer, expert, slot)
            service.device.fill(layer, slot)
    return step


@pytest.mark.parametrize(("kind", "device"), KINDS)
def test_its_programs_are_captured_with_the_rank_s_and_give_the_dense_result(
    kind: type[EagerRunner], device: str
) -> None:
    service = OnMemory(kind, device)
    step = alone(service)
    step.capture()
    for number in range(5):
        step.run(1, number, {}, 1.0, lambda: False)
        service.apply(number)
    assert {runner.fingerprint().captures for runner in service.device.runners} == {1}


def test_a_tensor_that_moved_on_the_device_is_named_at_a_commit() -> None:
    service = OnMemory()
    step = alone(service)
    step.capture()
    step.check()
    service.device.static["experts.up"] = service.device.static["experts.up"].clone()
    with pytest.raises(RunnerError, match=r"experts.up from"):
        step.check()


def test_a_commit_captures_again_if_the_device_must() -> None:
    service = OnMemory()
    step = alone(service)
    assert step.in_place
    service.device.in_place = False
    assert not step.in_place
    for number in range(2):
        step.capture()
        step.run(1, number, {}, 1.0, lambda: False)
        service.apply(number)
    assert {runner.fingerprint().captures for runner in service.device.runners} == {2}


def test_a_runner_that_would_record_what_is_said_to_a_device_is_refused() -> None:
    with pytest.raises(RunnerError, match=r"StaticRunner would record .* EagerRunner"):
        alone(OnMemory(), StaticRunner)


def fills(patience: Patience) -> tuple[Plane, "Gated", threading.Event, Callable[[], None]]:
    """A rank's plane, its device, the gate that fills wait at, and what begins one."""
    service, placement, gate = OnMemory(), place(CONFIG.shape, (0,)), threading.Event()
    service.device = device = Gated(service, gate)
    seat = Seat(0, Ballot(1, 0), Meeting("here", 0), patience)
    transport = MemoryNetwork().end("0")
    plane = Plane(seat, service, RoutingTables(CONFIG.shape), transport, EagerRunner, lambda _: None)
    stage = Stage(placement, loads=(Reload(0, placement.row(0, 0)[0], 0),))
    return (
        plane,
        device,
        gate,
        lambda: plane.preparer.start(seat.ballot, stage, (), {}, joins=False),
    )


def test_a_commit_that_captures_waits_for_a_fill_that_was_given_up() -> None:
    plane, device, gate, begin = fills(Patience())
    begin()
    while not device.did:
        time.sleep(0.001)
    plane.preparer.cancel()
    threading.Timer(0.05, gate.set).start()
    placement = place(CONFIG.shape, (0,))
    plane.switch(placement, Preparation(Ballot(1, 0), placement, {}, tables(placement), 0.0))
    assert device.did == ["fill begins", "fill ends", "capture"]


def test_a_preparation_that_was_given_up_hangs_if_it_does_not_end_whatever_was_begun_since() -> None:
    plane, device, gate, begin = fills(Patience(lease=0.01, beat=0.005, stall=0.01, give_up=0.05))
    begin()
    while not device.did:
        time.sleep(0.001)
    assert not plane.preparer.hangs, "nobody has given it up"
    deadline = time.monotonic() + 5
    while not plane.preparer.hangs:
        assert time.monotonic() < deadline, "each new one made it forget how long the first goes on"
        plane.preparer.cancel()
        begin()
        time.sleep(0.01)
    gate.set()
    plane.preparer.settle()
    assert not plane.preparer.hangs


def test_a_rehearsal_counts_nothing() -> None:
    service = OnMemory()
    step = alone(service, counts=True)
    step.capture()
    step.rehearse()
    assert step.load is not None
    assert not step.load.any()
    step.run(1, 0, {}, 1.0, lambda: False)
    assert step.load.sum() == CONFIG.shape.layers * CONFIG.tokens * CONFIG.top


class Gated(Memory):
    """Notes what it does; must capture again at each commit, and fills for as long as the gate is shut."""

    def __init__(self, service: ToyService, gate: threading.Event) -> None:
        super().__init__(service, StaticRunner, "cpu")
        self.in_place = False
        self.did: list[str] = []
        self._gate = gate

    def capture(self) -> None:
        self.did.append("capture")
        super().capture()

    def fill(self, layer: int, slot: int) -> None:
        self.did.append("fill begins")
        self._gate.wait()
        self.did.append("fill ends")
