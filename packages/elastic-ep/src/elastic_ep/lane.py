"""Dispatch and combine over fixed slots: one exchange sends each token to the replicas of its experts and
brings the results back.

Every buffer has a slot for each rank there could be, at an address that never changes. A slot is written by
one rank only, which first waits for its own earlier transfers; its flag holds exactly the epoch and turn of
what lies in it. So a fenced rank that wakes up writes where nobody looks, and what it writes carries a flag
that nobody waits for. With each dispatch goes a note of four numbers: the way of what must reach all ranks
by an agreed step.
"""

from collections.abc import Callable, Sequence

import attrs
import torch

from elastic_ep.errors import LaneError
from elastic_ep.lane_shape import NOTE, LaneShape
from elastic_ep.lane_writes import Writes
from elastic_ep.packing import static_tensors
from elastic_ep.transport import LONGEST_NAP, Flag, Op, Span, Transport, size_of, wait, wait_until

EPOCH_SHIFT = 40
"""A flag is ``epoch << 40 | turn + 1``: 2^40 turns an epoch, and never 0."""

Note = tuple[int, int, int, int]
NO_NOTE: Note = (-1, -1, -1, -1)
ALERT_NAP = 5e-4
"""Longest rest, in seconds, of a rank that has exchanged with nobody yet: it waits long, since it begins
when the others are still some steps behind, and then they wait for it."""

REGISTERED = ("out", "out_head", "in", "in_head", "results", "back")


@attrs.frozen
class Programs:
    """What an exchange runs between its transfers; see `elastic_ep.packing`.

    ``pack`` fills ``out``, ``experts`` turns ``in`` into ``results``, ``unpack`` makes ``output`` of
    ``back``.
    """

    pack: Callable[[], None]
    experts: Callable[[], None]
    unpack: Callable[[], None]


class Lane:
    """One rank's end of the exchange. ``static`` are the tensors that programs work on; ``late`` the ranks
    that it waits for right now."""

    def __init__(
        self, transport: Transport, rank: int, shape: LaneShape, dtype: torch.dtype = torch.float32
    ) -> None:
        """Allocates and registers, so the transport's card comes after this."""
        self.transport = transport
        self.rank = rank
        self.shape = shape
        self.static = static_tensors(shape, dtype)
        self.late: tuple[int, ...] = ()
        self._arrived = torch.zeros(shape.max_ranks, dtype=torch.int64)
        self._returned = torch.zeros_like(self._arrived)
        self._noted = torch.zeros_like(self._arrived)
        self._words = torch.zeros((2, shape.max_ranks, NOTE), dtype=torch.int64)
        self._open: list[Op] = []
        self._probes: dict[str, Op] = {}
        self._notes: dict[int, Note] = {}
        self._said = NO_NOTE
        self._nap = ALERT_NAP
        self._writes = Writes(
            rank, shape, size_of(self.static["out_head"][0]), size_of(self.static["out"][0])
        )
        for name in REGISTERED:
            transport.register(f"lane.{name}", self.static[name])
        transport.register("lane.arrived", self._arrived)
        transport.register("lane.returned", self._returned)
        transport.register("lane.noted", self._noted)
        transport.register("lane.words", self._words)

    def exchange(
        self,
        epoch: int,
        turn: int,
        peers: dict[int, str],
        programs: Programs,
        seconds: float,
        interrupted: Callable[[], bool] = lambda: False,
        note: Note = NO_NOTE,
        degraded: bool = False,
    ) -> None:
        """One MoE layer of one step over all active ranks, this one among them.

        ``turn`` counts exchanges and only rises within an epoch. ``peers`` maps the other active ranks to
        their transport names; each gets the note. Unless ``degraded``, every expert must be somewhere.

        An exchange that did not end may be made again with the same tokens under a later epoch. Raises
        LaneError if an expert is nowhere, DeadlineError naming the ranks that were late, FencedError, and
        what the transport raises.
        """
        self.transport.poll()
        wait(self.transport, self._unfinished(peers), seconds, interrupted)
        flag = flag_of(epoch, turn)
        self.static["turn"].fill_(turn)
        programs.pack()
        used = _used(self.static["out_head"])
        if not degraded:
            self._check_homes(used[-1])
        if note != self._said:
            self.static["out_head"][:, :NOTE] = torch.tensor(note)
            self._said = note
        for rank, peer in peers.items():
            self._send(peer, *self._writes.dispatch(rank, used[rank], flag))
        self._await(peers, self._arrived, flag, seconds, interrupted)
        heads = self.static["in_head"][:, :NOTE].tolist()
        self._notes = {rank: tuple(heads[rank]) for rank in peers if heads[rank] != list(NO_NOTE)}
        programs.experts()
        self.static["back"][self.rank].copy_(self.static["results"][self.rank])
        used = _used(self.static["in_head"])
        for rank, peer in peers.items():
            self._send(peer, *self._writes.give_back(rank, used[rank], flag))
        self._await(peers, self._returned, flag, seconds, interrupted)
        wait(self.transport, self._unfinished(peers), seconds, interrupted)
        programs.unpack()
        if peers:
            self._nap = LONGEST_NAP

    def make_ready(self, rank: int, peer: str) -> None:
        """Do ahead what takes longer in a first exchange with a peer. Any thread may."""
        for spans, flag in self._writes.every(rank):
            self.transport.make_ready(peer, spans, flag)

    def announce(self, rank: int, peer: str, flag: int, note: Note) -> None:
        """Send a note to a rank that takes no part yet, which finds it by `overheard`."""
        coming, going = self._words
        going[rank] = torch.tensor(note)
        row = size_of(going[rank])
        span = Span("lane.words", size_of(coming) + rank * row, "lane.words", self.rank * row, row)
        self._open.append(self.transport.write(peer, [span], Flag("lane.noted", self.rank, flag)))

    def overheard(self) -> dict[int, Note]:
        """Notes that came outside an exchange, by sender; each is given once."""
        senders = [rank for rank, flag in enumerate(self._noted.tolist()) if flag]
        for rank in senders:
            self._noted[rank] = 0
        return {rank: tuple(self._words[0, rank].tolist()) for rank in senders}

    def probe(self, peer: str) -> None:
        """Write something that nobody reads, to learn whether the peer is there: if not, the wait that goes
        on raises. One that is frozen is probed once."""
        earlier = self._probes.get(peer)
        if earlier is None or earlier.done:
            start = size_of(self._words[0]) + self.rank * size_of(self._words[0, 0])
            span = Span("lane.words", start, "lane.words", start, size_of(self._words[0, 0]))
            self._probes[peer] = self.transport.write(peer, [span])
            self._open.append(self._probes[peer])

    def lost(self) -> set[str]:
        """Peers to which a transfer has failed since the last exchange began."""
        return {op.peer for op in self._open if op.error is not None}

    def forget(self, rank: int, peer: str) -> None:
        """A rank has gone: rows that it left behind are no work."""
        self._probes.pop(peer, None)
        self.static["in_head"][rank, NOTE:] = -1

    def notes(self) -> dict[int, Note]:
        """The notes of the last exchange, by sender."""
        return self._notes

    def _unfinished(self, peers: dict[int, str]) -> list[Op]:
        """Open transfers to ranks of this exchange. Those to others end when they are disconnected."""
        self._open = [op for op in self._open if op.error is None and not op.done]
        return [op for op in self._open if op.peer in peers.values()]

    def _check_homes(self, dumped: int) -> None:
        """What is in the dump beside padding has no home."""
        count = int(self.static["count"])
        if count > self.shape.tokens:
            raise LaneError(f"{count} tokens for a lane that was made for {self.shape.tokens}")
        if dumped > (self.shape.tokens - count) * self.shape.top:
            homeless = self.static["homes"][:count] < 0
            lost = sorted(set(self.static["experts"][:count][homeless].tolist()))
            raise LaneError(f"no rank holds experts {lost}; reload them or route around them")

    def _send(self, peer: str, spans: tuple[Span, ...], flag: Flag) -> None:
        op = self.transport.write(peer, spans, flag)
        if not op.done:
            self._open.append(op)

    def _await(
        self,
        peers: dict[int, str],
        flags: torch.Tensor,
        flag: int,
        seconds: float,
        interrupted: Callable[[], bool],
    ) -> None:
        present = set(peers.values())

        def all_here() -> bool:
            for op in self._open:
                if op.error is not None and op.peer in present:
                    raise op.error
            self.late = behind(flags, peers, flag)
            return not self.late

        try:
            wait_until(
                self.transport,
                all_here,
                seconds,
                lambda: f"ranks {list(self.late)}",
                interrupted,
                self._nap,
            )
        finally:
            self.late = ()


def _used(heads: torch.Tensor) -> list[int]:
    """How many rows of each slot are used."""
    used: list[int] = (heads[:, NOTE:] >= 0).sum(dim=1).tolist()
    return used


def behind(flags: torch.Tensor, ranks: Sequence[int] | dict[int, str], flag: int) -> tuple[int, ...]:
    """The ranks whose flag is another."""
    values = flags.tolist()
    return tuple(rank for rank in ranks if values[rank] != flag)


def flag_of(epoch: int, turn: int) -> int:
    """The value that marks what belongs to this turn."""
    return epoch << EPOCH_SHIFT | turn + 1
