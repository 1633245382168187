"""Every runner: one result, one capture, one address for life."""

import inspect
from collections.abc import Mapping

import pytest
import torch
from elastic_ep import (
    EagerRunner,
    Placement,
    RoutingTables,
    Runner,
    RunnerError,
    Shape,
    StaticRunner,
    place,
    resize,
    tables,
)
from elastic_ep.runner_cuda import CudaGraphRunner

SHAPE = Shape(layers=1, experts=4, slots=3, max_ranks=4)

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs are recorded on a GPU only")
runners = pytest.mark.parametrize(
    "kind", [EagerRunner, StaticRunner, pytest.param(CudaGraphRunner, marks=on_a_gpu)]
)


def route(static: Mapping[str, torch.Tensor]) -> None:
    """The captured half of a step: logical experts to physical slots, replicas taken in turn."""
    experts, turn = static["experts"], static["turn"]
    count = static["replicas"][0].to(torch.int64)[experts]
    column = (static["places"] + turn) % count
    static["homes"].copy_(static["slots"][0].to(torch.int64)[experts, column])
    turn.add_(1)


def captured(
    kind: type[EagerRunner], device: str | None = None
) -> tuple[Runner, RoutingTables, dict[str, torch.Tensor]]:
    device = device or ("cuda" if kind is CudaGraphRunner else "cpu")
    board = RoutingTables(SHAPE, device)
    board.write(tables(place(SHAPE, (0, 1))))
    static = {
        "experts": torch.tensor([0, 1, 2, 3, 3], device=device),
        "places": torch.arange(5, device=device),
        "turn": torch.zeros(1, dtype=torch.int64, device=device),
        "homes": torch.zeros(5, dtype=torch.int64, device=device),
        "slots": board.slots,
        "replicas": board.replicas,
    }
    runner = kind()
    runner.capture(route, static)
    static["turn"].zero_()
    return runner, board, static


def expected(placement: Placement, experts: list[int], turn: int) -> list[int]:
    holders = placement.holders(0)
    return [holders[e][(i + turn) % len(holders[e])] for i, e in enumerate(experts)]


@runners
def test_a_hundred_reconfigurations_and_one_capture(kind: type[EagerRunner]) -> None:
    runner, board, static = captured(kind)
    before = runner.fingerprint()
    placement = place(SHAPE, (0, 1))
    for turn in range(100):
        placement = resize(placement, (0, 1, 3) if turn % 2 == 0 else (1, 2)).after
        board.write(tables(placement))
        static["experts"].copy_(torch.tensor([(turn + i) % 4 for i in range(5)]))
        runner.check()
        runner.replay()
        assert static["homes"].tolist() == expected(placement, static["experts"].tolist(), turn)
    assert runner.fingerprint() == before
    assert before.captures == 1


@runners
def test_a_moved_tensor_is_named(kind: type[EagerRunner]) -> None:
    runner, _, static = captured(kind)
    static["slots"] = static["slots"].clone()
    with pytest.raises(RunnerError, match=r"moved since capture: slots from .* write contents in place"):
        runner.check()
    runner.capture(route, static)
    runner.check()
    assert runner.fingerprint().captures == 2


@runners
def test_a_tensor_laid_out_anew_is_named(kind: type[EagerRunner]) -> None:
    runner, _, static = captured(kind)
    static["homes"] = static["homes"].view(5, 1)
    with pytest.raises(RunnerError, match="homes"):
        runner.check()


def test_static_replays_operations_and_not_python() -> None:
    calls = []

    def program(static: Mapping[str, torch.Tensor]) -> None:
        calls.append(1)
        static["x"].mul_(2 if len(calls) == 1 else 1000)

    static = {"x": torch.ones(2)}
    runner = StaticRunner()
    runner.capture(program, static)
    static["x"].fill_(3)
    runner.replay()
    runner.replay()
    assert static["x"].tolist() == [12.0, 12.0]
    assert len(calls) == 1


@runners
def test_nothing_captured_is_said(kind: type[EagerRunner]) -> None:
    for call in (kind().replay, kind().check):
        with pytest.raises(RunnerError, match="call capture first"):
            call()


def test_a_graph_wants_its_tensors_on_a_gpu() -> None:
    with pytest.raises(RunnerError, match=r"\['experts', 'homes', .*'turn'\] are not on a GPU"):
        captured(CudaGraphRunner, "cpu")


def test_torch_has_what_graphs_are_recorded_with() -> None:
    """All that can be said where there is no GPU."""
    assert inspect.signature(torch.cuda.graph).bind(torch.cuda.CUDAGraph)
    assert inspect.signature(torch.cuda.Stream.wait_stream).bind("self", "stream")
    assert callable(torch.cuda.CUDAGraph.replay)
    assert callable(torch.cuda.current_stream)


@pytest.mark.parametrize("kind", [EagerRunner, StaticRunner])
def test_weights_that_could_be_trained_are_not(kind: type[EagerRunner]) -> None:
    """Else every replay would be remembered for a backward pass."""
    static = {"x": torch.ones(2), "weight": torch.nn.Parameter(torch.ones(2))}

    def scale(held: Mapping[str, torch.Tensor]) -> None:
        held["x"].copy_(held["x"] * held["weight"])

    runner = kind()
    runner.capture(scale, static)
    runner.replay()
    assert not static["x"].requires_grad
