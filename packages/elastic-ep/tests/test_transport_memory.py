"""The memory transport, quick and slow, and what only it can do."""

import pytest
import torch
from elastic_ep import DeadlineError, Flag, MemoryNetwork, Span, Transport, TransportError, wait
from elastic_ep.testing.transport_conformance import End, TransportConformance


class TestMemory(TransportConformance):
    network = MemoryNetwork()

    @pytest.fixture(autouse=True)
    def _fresh_network(self) -> None:
        self.network = MemoryNetwork()

    def make(self, name: str) -> Transport:
        return self.network.end(name)

    def kill(self, transport: Transport) -> None:
        self.network.kill(transport.name)


class TestSlowMemory(TestMemory):
    @pytest.fixture(autouse=True)
    def _fresh_network(self) -> None:
        self.network = MemoryNetwork(seed=7, delay=5, repeat=0.5)


def pair(network: MemoryNetwork) -> tuple[End, End]:
    a, b = End(network.end("a")), End(network.end("b"))
    wait(a.transport, [a.transport.connect(b.transport.card())], 5)
    return a, b


def test_a_seed_repeats_a_run() -> None:
    def polls(seed: int) -> list[int]:
        a, _ = pair(MemoryNetwork(seed=seed, delay=9))
        counts = []
        for _ in range(10):
            op = a.transport.write("b", [Span("data", 0, "data", 0, 8)])
            count = 0
            while not op.done:
                a.transport.poll()
                count += 1
            counts.append(count)
        return counts

    assert polls(3) == polls(3)
    assert polls(3) != polls(4)


def test_a_frozen_peer_leaves_transfers_open_until_it_thaws() -> None:
    network = MemoryNetwork()
    a, b = pair(network)
    network.freeze("b")
    op = a.transport.write("b", [Span("data", 0, "data", 0, 8)], Flag("flags", 0, 5))
    with pytest.raises(DeadlineError, match="'b'"):
        wait(a.transport, [op], 0.01)
    network.thaw("b")
    wait(a.transport, [op], 5)
    assert b.flags[0] == 5


def test_a_rank_that_dies_inside_a_transfer_leaves_half_of_it() -> None:
    network = MemoryNetwork()
    a, b = pair(network)
    a.data.fill_(9)
    a.transport.write("b", [Span("data", i * 8, "data", i * 8, 8) for i in range(4)], Flag("flags", 0, 1))
    for _ in range(2):
        a.transport.poll()
    network.kill("a")
    for _ in range(9):
        b.transport.poll()
    assert int((b.data == 9).sum()) == 16
    assert b.flags[0] == 0


def test_a_lost_transfer_fails_and_says_so() -> None:
    network = MemoryNetwork()
    a, _ = pair(network)
    network.loss = 1.0
    op = a.transport.write("b", [Span("data", 0, "data", 0, 8)])
    with pytest.raises(TransportError, match="to b failed"):
        wait(a.transport, [op], 5)


def test_a_repeated_flag_never_undoes_a_later_one() -> None:
    network = MemoryNetwork(seed=1, delay=6, repeat=1.0)
    a, b = pair(network)
    for value in range(1, 40):
        wait(
            a.transport, [a.transport.write("b", [Span("data", 0, "data", 0, 8)], Flag("flags", 0, value))], 5
        )
        assert b.flags[0] == value
        a.transport.poll()
        assert torch.equal(b.flags, torch.tensor([value] + [0] * 7))


def test_names_are_used_once() -> None:
    network = MemoryNetwork()
    network.end("a")
    with pytest.raises(TransportError, match="used before"):
        network.end("a")
