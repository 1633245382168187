"""Which replica sits on which rank, one layer at a time. Pure and deterministic: ties go to the lower id.

The greedy order is the one that EPLB made common: the next replica goes to the expert with the highest load
per replica, and the heaviest copy is seated first, on the lightest rank. What is added here: replicas that
serve stay where they are, and a copy that finds no seat looks for the shortest chain of moves that makes
one (an augmenting path, so it is found if there is any).
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from elastic_ep.placement import EMPTY

Seat = tuple[int, int]
"""``(rank, slot of that rank)``."""

WORTH = 1.05
"""A replica is moved for balance only where what it relieves is hotter by this factor than what it
burdens."""

ROUNDS = 8
"""Rounds of rebalancing at most; two or three are usual before nothing changes."""


class LayerSeats:
    """The seats of one layer while a plan is made.

    ``rows[rank]`` are that rank's slots; ``load[expert]`` says how often it is routed to,
    ``needed[expert]`` how many replicas it has at least (0: it has no slot).
    """

    def __init__(self, rows: dict[int, list[int]], load: Sequence[float], needed: Sequence[int]) -> None:
        self.rows = rows
        self.load = load
        self._before = {rank: tuple(row) for rank, row in rows.items()}
        self.needed = needed
        self.count = [0] * len(load)
        for row in rows.values():
            for expert in row:
                if expert != EMPTY:
                    self.count[expert] += 1
        self.fresh = {seat for seat in self.seats() if rows[seat[0]][seat[1]] == EMPTY}
        self.wanted = self._wanted()

    def share(self, expert: int) -> float:
        """Load of one replica, once the expert has the replicas it shall have."""
        return 0.0 if expert == EMPTY else self.load[expert] / max(1, self.wanted[expert])

    def weight(self, rank: int) -> float:
        return sum(self.share(expert) for expert in self.rows[rank])

    def fill(self) -> None:
        """Seat every needed copy, then as many wanted ones as fit without moving a replica that serves."""
        for expert in self._hottest(lambda expert: self.needed[expert] - self.count[expert]):
            path = self._chain(expert, None)
            assert path is not None, "the sizes were checked: an augmenting path exists"
            self._seat(expert, path)
        for expert in self._hottest(lambda expert: self.wanted[expert] - self.count[expert]):
            path = self._chain(expert, self.fresh)
            if path is not None:
                self._seat(expert, path)
        self.wanted = list(self.count)
        self._use_what_is_left()

    def rebalance(self) -> None:
        """Exchange replicas and swap their seats until nothing more is worth a copy."""
        before = None
        for _ in range(ROUNDS):
            if before == (before := [list(row) for row in self.rows.values()]):
                return
            self._exchange_replicas()
            self.fill()
            self.swap(self.seats() if self._has_slack() else self.fresh)

    def swap(self, movable: Container[Seat]) -> None:
        """Swap replicas of the heaviest rank for others' while it is too heavy and that lightens it."""
        mean = sum(self.weight(rank) for rank in self.rows) / len(self.rows)
        while True:
            heavy = min(self.rows, key=lambda rank: (-self.weight(rank), rank))
            best = min(self._swaps(heavy, movable), default=None)
            if self.weight(heavy) <= WORTH * mean or best is None or WORTH * best[0] >= self.weight(heavy):
                return
            _, slot, other, place = best
            mine, theirs = self.rows[heavy], self.rows[other]
            mine[slot], theirs[place] = theirs[place], mine[slot]

    def seats(self) -> set[Seat]:
        return {(rank, slot) for rank, row in self.rows.items() for slot in range(len(row))}

    def settled(self) -> dict[int, list[int]]:
        """The rows, with every expert that stayed on its rank back in its old slot."""
        return {rank: _settle(self._before[rank], row) for rank, row in self.rows.items()}

    def _exchange_replicas(self) -> None:
        """Let experts with cold replicas give one up for experts with hot ones."""
        while True:
            takers = [e for e in self._placeable() if self.wanted[e] < len(self.rows)]
            givers = [e for e in self._placeable() if self.wanted[e] > max(1, self.needed[e])]
            if not takers or not givers:
                return
            hot = min(takers, key=lambda e: (-self.share(e), e))
            cold = min(givers, key=lambda e: (self.load[e] / (self.wanted[e] - 1), e))
            if hot == cold or self.share(hot) <= WORTH * self.load[cold] / (self.wanted[cold] - 1):
                return
            self.wanted[hot] += 1
            self.wanted[cold] -= 1

    def _has_slack(self) -> bool:
        """Whether some slot is empty or redundant, so that replicas can be swapped through it."""
        return max(self.count) > 1 or any(EMPTY in row for row in self.rows.values())

    def _placeable(self) -> list[int]:
        return [expert for expert, least in enumerate(self.needed) if least]

    def _wanted(self) -> list[int]:
        """Replicas each expert shall have: those that serve and those needed, then free slots by load."""
        wanted = [max(have, least) for have, least in zip(self.count, self.needed, strict=True)]
        spare_slots = len(self.fresh) - (sum(wanted) - sum(self.count))
        for _ in range(-spare_slots):
            givers = [e for e in self._placeable() if wanted[e] > self.needed[e]]
            wanted[min(givers, key=lambda e: (self.load[e] / (wanted[e] - 1), e))] -= 1
        for _ in range(spare_slots):
            takers = [e for e in self._placeable() if wanted[e] < len(self.rows)]
            if takers:
                wanted[min(takers, key=lambda e: (-self.load[e] / wanted[e], wanted[e], e))] += 1
        return wanted

    def _hottest(self, copies: Callable[[int], int]) -> list[int]:
        """Each expert as often as ``copies`` says, heaviest share first."""
        order = sorted(self._placeable(), key=lambda expert: (-self.share(expert), expert))
        return [expert for expert in order for _ in range(copies(expert))]

    def _opening(self, rank: int) -> int | None:
        """A slot of the rank that is free, or whose replica is one more than its expert shall have."""
        row = self.rows[rank]
        if EMPTY in row:
            return row.index(EMPTY)
        spare = [slot for slot, expert in enumerate(row) if self.count[expert] > self.wanted[expert]]
        return min(spare, key=lambda slot: (-self.share(row[slot]), slot), default=None)

    def _chain(self, expert: int, movable: Container[Seat] | None) -> list[Seat] | None:
        """The shortest run of seats where ``expert`` takes the first and each one displaced takes the next.

        The last seat is an opening. Only replicas in ``movable`` seats may be displaced on the way (None:
        any).
        """
        queue: deque[tuple[int, list[Seat]]] = deque([(expert, [])])
        seen: set[int] = set()
        while queue:
            who, path = queue.popleft()
            ranks = [rank for rank in self.rows if rank not in seen and who not in self.rows[rank]]
            seen.update(ranks)
            end = self._lightest_opening(ranks)
            if end is not None:
                return [*path, end]
            for rank in ranks:
                for slot, sitting in enumerate(self.rows[rank]):
                    if movable is None or (rank, slot) in movable:
                        queue.append((sitting, [*path, (rank, slot)]))
        return None

    def _lightest_opening(self, ranks: Iterable[int]) -> Seat | None:
        found = []
        for rank in ranks:
            slot = self._opening(rank)
            if slot is not None:
                sitting = self.rows[rank][slot]
                found.append((sitting != EMPTY, self.weight(rank) - self.share(sitting), rank, slot))
        return min(found)[2:] if found else None

    def _seat(self, expert: int, path: list[Seat]) -> None:
        self.count[expert] += 1
        for rank, slot in path:
            row = self.rows[rank]
            expert, row[slot] = row[slot], expert
        if expert != EMPTY:
            self.count[expert] -= 1

    def _use_what_is_left(self) -> None:
        """Fill slots that stayed free with the hottest experts their ranks do not hold yet."""
        for rank in sorted(self.rows):
            row = self.rows[rank]
            for slot in (slot for slot, expert in enumerate(row) if expert == EMPTY):
                absent = [e for e in self._placeable() if e not in row]
                if not absent:
                    break
                row[slot] = min(absent, key=lambda e: (-self.share(e), self.count[e], e))
                self.count[row[slot]] += 1
                self.wanted[row[slot]] += 1

    def _swaps(self, heavy: int, movable: Container[Seat]) -> Iterator[tuple[float, int, int, int]]:
        """Every swap that lightens ``heavy``: ``(higher weight of the two afterwards, slot, other rank, its
        slot)``."""
        mine, top = self.rows[heavy], self.weight(heavy)
        given = [(slot, who, self.share(who)) for slot, who in enumerate(mine) if (heavy, slot) in movable]
        for other, theirs in self.rows.items():
            low = self.weight(other)
            taken = [
                (slot, self.share(who))
                for slot, who in enumerate(theirs)
                if (who == EMPTY or who not in mine) and (other, slot) in movable
            ]
            for slot, who, share in given:
                if who not in theirs:
                    for place, less in taken:
                        if share > less:
                            yield max(top - share + less, low + share - less), slot, other, place


def _settle(before: Sequence[int], row: Sequence[int]) -> list[int]:
    arrived = iter([expert for expert in row if expert not in before])
    return [expert if expert in row and expert != EMPTY else next(arrived, EMPTY) for expert in before]
