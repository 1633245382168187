"""What a rank does in the background for one that joins."""

import time
from collections.abc import Iterable

from elastic_ep import (
    Ballot,
    EagerRunner,
    Flag,
    MemoryNetwork,
    MemoryTransport,
    Patience,
    RoutingTables,
    Seat,
    Shape,
    Span,
    place,
)
from elastic_ep.lane_writes import lengths
from elastic_ep.plane import Plane
from elastic_ep.prepare import Preparation
from elastic_ep.rendezvous import Meeting
from elastic_ep.staging import Stage
from elastic_ep.testing.toy import ToyConfig, ToyService

CONFIG = ToyConfig(Shape(layers=1, experts=2, slots=2, max_ranks=3), tokens=4, hidden=8)


class Noting(MemoryTransport):
    """Notes for whom writes were made ready."""

    def __init__(self, name: str, network: MemoryNetwork) -> None:
        super().__init__(name, network)
        self.ready: list[str] = []

    def make_ready(self, peer: str, spans: Iterable[Span], flag: Flag | None = None) -> None:
        super().make_ready(peer, spans, flag)
        self.ready.append(peer)


def plane_of(rank: int, transport: MemoryTransport, ended: list[Preparation]) -> Plane:
    seat, service = Seat(rank, Ballot(1, 0), Meeting("here", 0), Patience()), ToyService(CONFIG, rank)
    return Plane(seat, service, RoutingTables(CONFIG.shape), transport, EagerRunner, ended.append)


def test_all_writes_to_a_new_peer_are_made_ready_and_none_to_one_that_is_known() -> None:
    network, ended = MemoryNetwork(), list[Preparation]()
    transport = Noting("0", network)
    network.ends["0"] = transport
    here = plane_of(0, transport, ended)
    others = {rank: plane_of(rank, network.end(str(rank)), []) for rank in (1, 2)}
    cards = tuple((rank, plane.card) for rank, plane in others.items())
    here.preparer.start(
        Ballot(1, 0), Stage(place(CONFIG.shape, (0, 1, 2))), cards, known={1: "1"}, joins=False
    )
    deadline = time.monotonic() + 20
    while not ended:
        assert time.monotonic() < deadline
        transport.poll()
    assert ended[0].why == ""
    assert ended[0].peers == {2: "2"}
    assert transport.ready == ["2"] * 2 * len(lengths(CONFIG.lane.rows))
