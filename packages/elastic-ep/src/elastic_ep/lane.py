"""Dispatch and combine over fixed slots: one exchange sends each token to the replicas of its experts and
brings the results back.

Every buffer has a slot for each rank there could be, at an address that never changes. A slot is written by
one rank only, which first waits for its own earlier transfers; its flag holds exactly the epoch and turn of
what lies in it. So a fenced rank that wakes up writes where nobody looks, and what it writes carries a flag
that nobody waits for.
"""

from collections.abc import Callable

import attrs
import torch

from elastic_ep.errors import LaneError
from elastic_ep.routing import RoutingTables
from elastic_ep.transport import Flag, Op, Span, Transport, size_of, wait, wait_until

EPOCH_SHIFT = 40
"""A flag is ``epoch << 40 | turn + 1``: 2^40 turns an epoch, and never 0."""

Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``(rows [n, hidden], slots [n]) -> [n, hidden]``: the row through the expert in the slot."""


@attrs.frozen
class LaneShape:
    """Capacity: a rank brings up to ``tokens`` of ``hidden`` values, each for ``top`` experts."""

    max_ranks: int
    slots: int
    tokens: int
    top: int
    hidden: int

    @property
    def rows(self) -> int:
        """Rows of one slot: all of a rank's tokens may go to one rank, for each of their experts."""
        return self.tokens * self.top


class Lane:
    """One rank's end of the exchange."""

    def __init__(
        self, transport: Transport, rank: int, shape: LaneShape, dtype: torch.dtype = torch.float32
    ) -> None:
        """Allocates and registers, so the transport's card comes after this."""
        self.transport = transport
        self.rank = rank
        self.shape = shape
        ranks, rows = shape.max_ranks, shape.rows
        self._out = torch.zeros((ranks, rows, shape.hidden), dtype=dtype)
        self._out_slots = torch.full((ranks, rows), -1, dtype=torch.int64)
        self._in = torch.zeros_like(self._out)
        self._in_slots = torch.full_like(self._out_slots, -1)
        self._results = torch.zeros_like(self._out)
        self._back = torch.zeros_like(self._out)
        self._arrived = torch.zeros(ranks, dtype=torch.int64)
        self._returned = torch.zeros(ranks, dtype=torch.int64)
        self._open: list[Op] = []
        for name, tensor in self.buffers().items():
            transport.register(name, tensor)

    def buffers(self) -> dict[str, torch.Tensor]:
        """All memory that peers read or write, by the name it is registered under."""
        return {
            "lane.out": self._out,
            "lane.out_slots": self._out_slots,
            "lane.in": self._in,
            "lane.in_slots": self._in_slots,
            "lane.results": self._results,
            "lane.back": self._back,
            "lane.arrived": self._arrived,
            "lane.returned": self._returned,
        }

    def exchange(
        self,
        epoch: int,
        turn: int,
        peers: dict[int, str],
        tables: RoutingTables,
        layer: int,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        run: Experts,
        seconds: float,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> torch.Tensor:
        """One MoE layer of one step over all active ranks, this one among them.

        ``turn`` counts exchanges and only rises within an epoch. ``peers`` maps the other active ranks to
        their transport names. ``tokens`` is ``[n, hidden]`` with n up to ``shape.tokens``; ``experts`` and
        ``weights`` are ``[n, top]``, logical experts and what each counts. Gives ``[n, hidden]``: for each
        token the weighted sum over its experts, added in order.

        An exchange that did not end may be made again with the same tokens under a later epoch. Raises
        LaneError for what does not fit or is lost, DeadlineError naming the ranks that were late,
        FencedError, and what the transport raises.
        """
        self._check(tokens, experts, weights)
        wait(self.transport, self._unfinished(peers), seconds, interrupted)
        flag = epoch << EPOCH_SHIFT | turn + 1
        homes, rows = self._place(tables, layer, experts, turn)
        self._fill(tokens, homes, rows)
        self._send(peers, "lane.out", "lane.in", "lane.arrived", flag, self._out_slots)
        self._await(peers, self._arrived, flag, seconds, interrupted)
        self._run(run, [self.rank, *peers])
        self._send(peers, "lane.results", "lane.back", "lane.returned", flag, self._in_slots)
        self._await(peers, self._returned, flag, seconds, interrupted)
        wait(self.transport, self._unfinished(peers), seconds, interrupted)
        return self._sum(tokens, homes, rows, weights)

    def _check(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        count = tokens.shape[0]
        wanted = ((count, self.shape.hidden), (count, self.shape.top), (count, self.shape.top))
        given = (tuple(tokens.shape), tuple(experts.shape), tuple(weights.shape))
        if given != wanted or count > self.shape.tokens:
            most = self.shape.tokens
            raise LaneError(
                f"tokens, experts and weights are {given}; expected {wanted}, at most {most} tokens"
            )

    def _unfinished(self, peers: dict[int, str]) -> list[Op]:
        """Open transfers to ranks of this exchange. Those to others end when they are disconnected."""
        self._open = [op for op in self._open if op.error is None and not op.done]
        return [op for op in self._open if op.peer in peers.values()]

    def _place(
        self, tables: RoutingTables, layer: int, experts: torch.Tensor, turn: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For each token and expert the physical slot that computes it, and its row in the slot sent there:
        ``[n, top]``."""
        replicas = tables.replicas[layer].to(torch.int64)[experts]
        if not bool((replicas > 0).all()):
            lost = sorted({int(expert) for expert in experts[replicas == 0]})
            raise LaneError(f"layer {layer}: no rank holds experts {lost}; reload them or route around them")
        spread = torch.arange(experts.numel()).view_as(experts) + self.rank + turn
        homes = tables.slots[layer].to(torch.int64)[experts, spread % replicas]
        targets = homes // self.shape.slots
        sent = torch.nn.functional.one_hot(targets.flatten(), self.shape.max_ranks).cumsum(0) - 1
        return homes, sent.gather(1, targets.flatten()[:, None]).view_as(experts)

    def _fill(self, tokens: torch.Tensor, homes: torch.Tensor, rows: torch.Tensor) -> None:
        self._out_slots.fill_(-1)
        targets = homes // self.shape.slots
        self._out[targets, rows] = tokens[:, None, :].expand(-1, self.shape.top, -1).to(self._out.dtype)
        self._out_slots[targets, rows] = homes % self.shape.slots
        self._in[self.rank].copy_(self._out[self.rank])
        self._in_slots[self.rank].copy_(self._out_slots[self.rank])

    def _send(
        self, peers: dict[int, str], here: str, there: str, flags: str, flag: int, slots: torch.Tensor
    ) -> None:
        """The used rows of each peer's slot here to this rank's slot there, then the flag."""
        used = (slots >= 0).sum(dim=1).clamp(min=1).tolist()
        for rank, peer in peers.items():
            spans = [self._span(here, rank, there, used[rank])]
            if slots is self._out_slots:
                spans.append(self._span("lane.out_slots", rank, "lane.in_slots", self.shape.rows))
            self._open.append(self.transport.write(peer, spans, Flag(flags, self.rank, flag)))

    def _span(self, here: str, rank: int, there: str, rows: int) -> Span:
        slot = self.buffers()[here][0]
        size = size_of(slot)
        return Span(here, rank * size, there, self.rank * size, size_of(slot[0]) * rows)

    def _await(
        self,
        peers: dict[int, str],
        flags: torch.Tensor,
        flag: int,
        seconds: float,
        interrupted: Callable[[], bool],
    ) -> None:
        waited = torch.tensor(sorted(peers), dtype=torch.int64)
        present = set(peers.values())

        def all_here() -> bool:
            for op in self._open:
                if op.error is not None and op.peer in present:
                    raise op.error
            return bool((flags[waited] == flag).all())

        def late() -> str:
            return f"ranks {waited[flags[waited] != flag].tolist()}"

        wait_until(self.transport, all_here, seconds, late, interrupted)

    def _run(self, run: Experts, sources: list[int]) -> None:
        """All rows that came, whoever sent them, through this rank's experts."""
        slots = self._in_slots[sources]
        used = slots >= 0
        results = self._results[sources]
        if bool(used.any()):
            results[used] = run(self._in[sources][used], slots[used])
        self._results[sources] = results
        self._back[self.rank].copy_(self._results[self.rank])

    def _sum(
        self, tokens: torch.Tensor, homes: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        parts = self._back[homes // self.shape.slots, rows]
        total = torch.zeros_like(tokens)
        for nth in range(self.shape.top):
            total += weights[:, nth, None] * parts[:, nth]
        return total
