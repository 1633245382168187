"""From one placement to another in stages: copy into slots that nothing routes to, flip, and go on.

Each layer goes its own way, so all of them share the same few flips.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import attrs

from elastic_ep.errors import PlanError
from elastic_ep.placement import EMPTY, Placement

Row = tuple[int, ...]
"""``[physical]``: the experts of one layer."""

Flip = dict[int, int]
"""``physical id -> expert``: what one flip changes in one layer."""


@attrs.frozen
class Copy:
    """One expert of one layer, read from physical slot ``source`` into ``target``."""

    layer: int
    expert: int
    source: int
    target: int


@attrs.frozen
class Reload:
    """One expert of one layer that no rank holds, to be brought into ``target`` from outside the group."""

    layer: int
    expert: int
    target: int


@attrs.frozen
class DensePull:
    """A joiner and the rank from which it reads everything that is not an expert."""

    joiner: int
    source: int


@attrs.frozen
class Stage:
    """What is brought in place while the group serves, and the placement that one flip then puts to use."""

    placement: Placement
    copies: tuple[Copy, ...] = ()
    loads: tuple[Reload, ...] = ()
    dense: tuple[DensePull, ...] = ()

    def incoming(self, rank: int) -> tuple[Copy, ...]:
        """The copies that this rank reads."""
        return tuple(copy for copy in self.copies if self.placement.shape.rank_of(copy.target) == rank)


def stages(before: Placement, after: Placement) -> tuple[Stage, ...]:
    """The stages from ``before`` to ``after``; none if they are equal.

    Every expert that ``before`` holds is routed to some replica all the way. Ranks join with the first flip
    and leave with the last, which copies nothing: before it a leaver holds no expert that matters, and can
    drain. Raises PlanError if ``after`` drops an expert that ``before`` holds, or swaps experts where no
    slot is free or redundant to swap through.
    """
    _check_kept(before, after)
    shape, staying = before.shape, set(after.ranks)
    stay = [shape.rank_of(physical) in staying for physical in range(shape.physical)]
    rows = zip(before.table, after.table, strict=True)
    flips = [list(_flips(now, end, stay, shape.slots)) for now, end in rows]
    joined = tuple(sorted({*before.ranks, *after.ranks}))
    depth = max(max(map(len, flips)), 1 if joined != before.ranks else 0)
    found: list[Stage] = []
    now = before
    for step in range(depth):
        changes = {
            (layer, slot): expert
            for layer, steps in enumerate(flips)
            for slot, expert in (steps[step] if step < len(steps) else {}).items()
        }
        found.append(_stage(now, joined, changes))
        now = found[-1].placement
    if now != after:
        found.append(Stage(after))
    if found:
        found[0] = attrs.evolve(found[0], dense=_dense(before, after))
    return tuple(found)


def _check_kept(before: Placement, after: Placement) -> None:
    if before.shape != after.shape:
        raise PlanError(f"capacity is fixed: {before.shape} cannot become {after.shape}")
    dropped = sorted(set(after.missing()) - set(before.missing()))
    if dropped:
        raise PlanError(f"the new placement drops (layer, expert) {dropped}, which the old one holds")


def _flips(now: Row, after: Row, stay: Sequence[bool], slots: int) -> Iterator[Flip]:
    """The flips that bring the slots of staying ranks from ``now`` to ``after``.

    Each writes only slots that were empty, or empties slots whose expert another slot keeps.
    """
    row = list(now)
    while wrong := [slot for slot, stays in enumerate(stay) if stays and row[slot] != after[slot]]:
        arrivals = {slot: after[slot] for slot in wrong if row[slot] == EMPTY}
        held = Counter(row)
        held.update(arrivals.values())
        drops: Flip = {}
        for slot in wrong:
            if row[slot] != EMPTY and held[row[slot]] > 1:
                held[row[slot]] -= 1
                drops[slot] = EMPTY
        for flip in [arrivals | drops] if arrivals or drops else _detours(row, after, wrong, stay, slots):
            yield flip
            for slot, expert in flip.items():
                row[slot] = expert


def _detours(
    row: Sequence[int], after: Row, wrong: Sequence[int], stay: Sequence[bool], slots: int
) -> list[Flip]:
    """Only cycles of sole replicas are left: move one of each to a slot that is free or redundant."""
    counts = Counter(row)
    freed: Flip = {}
    moved: Flip = {}
    for cycle in _cycles(row, after, wrong):
        found = next(
            (
                (slot, other)
                for slot in cycle
                for other, stays in enumerate(stay)
                if stays and other not in moved and other not in cycle and slot // slots != other // slots
                if row[other] == EMPTY or counts[row[other]] > 1
            ),
            None,
        )
        if found:
            slot, other = found
            if row[other] != EMPTY:
                counts[row[other]] -= 1
                freed[other] = EMPTY
            moved |= {other: row[slot], slot: EMPTY}
    if not moved:
        raise PlanError(
            "the new placement swaps experts where no slot is free or redundant: nothing can be copied"
        )
    return [freed, moved] if freed else [moved]


def _cycles(row: Sequence[int], after: Row, wrong: Sequence[int]) -> Iterator[list[int]]:
    """The slots of each cycle in which every replica waits for the next slot to come free."""
    goal = {after[slot]: slot for slot in wrong}
    left = set(wrong)
    for start in wrong:
        cycle = []
        slot = start
        while slot in left:
            left.remove(slot)
            cycle.append(slot)
            slot = goal[row[slot]]
        if cycle:
            yield cycle


def _stage(now: Placement, ranks: Sequence[int], changes: dict[tuple[int, int], int]) -> Stage:
    """The stage of one flip; the sources of its copies are spread evenly over the ranks that hold the
    experts."""
    reads: Counter[int] = Counter()
    holders = [now.holders(layer) for layer in range(now.shape.layers)]
    copies, loads = [], []
    for (layer, target), expert in sorted(changes.items()):
        if expert == EMPTY:
            continue
        if not holders[layer][expert]:
            loads.append(Reload(layer, expert, target))
            continue
        source = min(holders[layer][expert], key=lambda slot: (reads[now.shape.rank_of(slot)], slot))
        reads[now.shape.rank_of(source)] += 1
        copies.append(Copy(layer, expert, source, target))
    return Stage(now.evolve(ranks, changes), tuple(copies), tuple(loads))


def _dense(before: Placement, after: Placement) -> tuple[DensePull, ...]:
    """Joiners share out the old ranks as sources, those that stay if there are any."""
    joiners = [rank for rank in after.ranks if rank not in before.ranks]
    sources = [rank for rank in before.ranks if rank in after.ranks] or list(before.ranks)
    return tuple(DensePull(joiner, sources[i % len(sources)]) for i, joiner in enumerate(joiners) if sources)
