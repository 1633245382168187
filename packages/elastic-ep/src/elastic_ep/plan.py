"""Plans: from the placement that serves to the one that shall, in stages that a serving group can take.

A stage copies experts into slots that nothing routes to, from slots that are routed to; then one flip of
the tables makes its placement the serving one. So inside a stage no slot is both written and read, whatever
the order of the copies, and an abort before the flip leaves a placement that nothing has touched.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import attrs

from elastic_ep.balance import LayerSeats
from elastic_ep.errors import PlanError, SizeError
from elastic_ep.placement import Placement, Shape, check_ranks, nobody
from elastic_ep.staging import Stage, stages

Load = Sequence[Sequence[float]]
"""``[layers][experts]``: how often each expert was routed to, in any unit."""


@attrs.frozen
class Plan:
    """How a group gets from ``before`` to ``after``; no stages if it is there already.

    ``lost`` names each ``(layer, expert)`` that no rank of ``before`` holds. Where `resize` was told to
    reload them, the stages list them under ``loads``; otherwise they have no slot.
    """

    before: Placement
    after: Placement
    stages: tuple[Stage, ...]
    lost: tuple[tuple[int, int], ...]

    @property
    def joiners(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.after.ranks if rank not in self.before.ranks)

    @property
    def leavers(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.before.ranks if rank not in self.after.ranks)


def place(shape: Shape, ranks: Iterable[int], load: Load | None = None, min_replicas: int = 1) -> Placement:
    """A first placement for ranks that hold nothing yet: replicated and packed by load.

    Raises SizeError if the ranks cannot hold every expert ``min_replicas`` times, PlanError for bad ranks or
    loads.
    """

    def arrange(layer: LayerSeats) -> None:
        layer.fill()
        layer.swap(layer.seats())

    return _arrange(nobody(shape), ranks, load, min_replicas, True, arrange)


def resize(
    before: Placement,
    ranks: Iterable[int],
    load: Load | None = None,
    min_replicas: int = 1,
    reload: bool = True,
) -> Plan:
    """Grow, shrink or replace: the plan by which the group comes to consist of ``ranks``.

    A rank that stays keeps its slots; one is rewritten only for an expert that would fall below
    ``min_replicas``. So growth of a group that keeps ``min_replicas`` changes no slot that serves.
    ``before`` holds living ranks only (see `Placement.without`); experts lost with the dead get slots to be
    reloaded from outside, unless ``reload`` is false. Raises SizeError and PlanError as `place` does.
    """

    def arrange(layer: LayerSeats) -> None:
        layer.fill()
        layer.swap(layer.fresh)

    return _plan(before, _arrange(before, ranks, load, min_replicas, reload, arrange))


def rebalance(before: Placement, load: Load, min_replicas: int = 1, reload: bool = True) -> Plan:
    """Even out the load among the ranks there are, moving a replica only where that is worth its copy.

    Planning again with the same load finds nothing to do. Raises SizeError and PlanError as `resize` does.
    """

    return _plan(before, _arrange(before, before.ranks, load, min_replicas, reload, LayerSeats.rebalance))


def restore(placement: Placement) -> Placement:
    """With slots for the experts that no rank holds, of a group that does not serve, so that any slot may be
    filled from outside. The same again if nothing is missing, or if the slots do not suffice."""
    if not placement.ranks or not placement.missing():
        return placement
    try:
        return resize(placement, placement.ranks).after
    except SizeError:
        return placement


def _plan(before: Placement, after: Placement) -> Plan:
    return Plan(before, after, stages(before, after), before.missing())


def _arrange(
    before: Placement,
    ranks: Iterable[int],
    load: Load | None,
    min_replicas: int,
    reload: bool,
    arrange: Callable[[LayerSeats], None],
) -> Placement:
    shape, target = before.shape, tuple(sorted(ranks))
    loads = _loads(shape, load)
    skipped = frozenset() if reload else frozenset(before.missing())
    _check_size(shape, target, min_replicas, skipped)
    changes: dict[tuple[int, int], int] = {}
    for layer in range(shape.layers):
        needed = [0 if (layer, expert) in skipped else min_replicas for expert in range(shape.experts)]
        seats = LayerSeats({rank: list(before.row(layer, rank)) for rank in target}, loads[layer], needed)
        arrange(seats)
        for rank, row in seats.settled().items():
            changes |= {(layer, rank * shape.slots + slot): expert for slot, expert in enumerate(row)}
    return nobody(shape).evolve(target, changes)


def _check_size(
    shape: Shape, ranks: tuple[int, ...], min_replicas: int, skipped: Collection[tuple[int, int]]
) -> None:
    check_ranks(shape, ranks)
    if min_replicas < 1:
        raise PlanError(f"min_replicas is {min_replicas}; it must be at least 1")
    skips = Counter(layer for layer, _ in skipped)
    experts = shape.experts - min(skips[layer] for layer in range(shape.layers))
    least = max(1, min_replicas, -(-experts * min_replicas // shape.slots))
    if len(ranks) < least:
        raise SizeError(
            f"{len(ranks)} ranks of {shape.slots} slots cannot hold {experts} experts "
            f"on {min_replicas} ranks each: "
            f"{len(ranks) * shape.slots} slots for {experts * min_replicas} replicas; "
            f"at least {least} ranks are needed"
        )


def _loads(shape: Shape, load: Load | None) -> Load:
    if load is None:
        return ((1.0,) * shape.experts,) * shape.layers
    sizes = {len(row) for row in load}
    if len(load) != shape.layers or sizes != {shape.experts}:
        raise PlanError(
            f"the load has {len(load)} layers of {sorted(sizes)} experts; "
            f"expected {shape.layers} layers of {shape.experts}"
        )
    for layer, row in enumerate(load):
        for expert, value in enumerate(row):
            if not 0 <= value < float("inf"):
                raise PlanError(
                    f"the load of expert {expert} in layer {layer} is {value}; "
                    "it must be finite and not negative"
                )
    return load
