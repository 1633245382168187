"""A rank's data plane: all that hangs on one transport."""

from collections.abc import Callable

from elastic_ep.lane import Lane
from elastic_ep.placement import EMPTY, Placement
from elastic_ep.prepare import Preparation, Preparer
from elastic_ep.routing import RoutingTables, tables
from elastic_ep.runner import Runner
from elastic_ep.seat import Seat
from elastic_ep.service import Service
from elastic_ep.step import Step
from elastic_ep.transport import Transport
from elastic_ep.tuning import Tuning


class Plane:
    """The transport with everything registered, the lane, the programs over it, and who prepares changes.

    ``peers`` are the ranks that it is connected to, by transport name; it is ``degraded`` while experts are
    missing. ``ended`` is called when a preparation is.
    """

    def __init__(
        self,
        seat: Seat,
        service: Service,
        board: RoutingTables,
        transport: Transport,
        make_runner: Callable[[], Runner],
        ended: Callable[[Preparation], None],
    ) -> None:
        self.transport = transport
        self._rank = seat.rank
        self._board = board
        self.lane = Lane(transport, seat.rank, service.lane, service.dtype)
        for part, tensors in (("dense", service.dense), ("experts", service.experts)):
            for name, tensor in tensors.items():
                transport.register(f"{part}.{name}", tensor)
        tuning = Tuning(transport)
        self.card = transport.card()
        self.step = Step(service, self.lane, board, make_runner, seat.counting > 0)
        self.peers: dict[int, str] = {}
        self.degraded = False
        self.preparer = Preparer(
            seat.rank,
            service,
            transport,
            tuning,
            self.lane.make_ready,
            self.step.capture,
            ended,
            seat.patience.give_up,
            seat.niceness,
        )

    def keep(self, ranks: tuple[int, ...]) -> None:
        """Disconnect all others."""
        for rank in sorted(set(self.peers) - set(ranks)):
            peer = self.peers.pop(rank)
            self.transport.disconnect(peer)
            self.lane.forget(rank, peer)

    def switch(self, placement: Placement, ready: Preparation | None) -> None:
        """Put a placement to use, between two steps. What is prepared only needs copying."""
        if ready is not None and ready.tables is not None and ready.placement == placement:
            self._board.write(ready.tables)
            self.degraded = ready.degraded
        else:
            self._reload(placement)
            self._board.write(tables(placement))
            self.degraded = bool(placement.missing())
        if not self.step.in_place:
            self.preparer.settle()  # one that was cancelled may still be filling a device
            self.step.capture()

    def _reload(self, placement: Placement) -> None:
        """Slots that are routed to from now on and hold something else: their experts were lost."""
        held = self.preparer.contents
        wanted = {
            (layer, slot): expert
            for layer in range(placement.shape.layers)
            for slot, expert in enumerate(placement.row(layer, self._rank))
            if expert not in (EMPTY, held.get((layer, slot)))
        }
        if wanted:
            self.preparer.cancel()
            self.keep(placement.ranks)
            self.preparer.settle()
            for (layer, slot), expert in wanted.items():
                self.preparer.load(layer, expert, slot)
