"""Whether evening out the load of the experts pays: a pure decision on what was counted.

A step waits, layer by layer, for the rank with the most to do. The *stretch* of a placement is how much
longer that makes a step than an even load would: the sum over layers of the hottest rank's load, divided by
the sum of the ranks' mean loads. It is 1 at best.
"""

import attrs

from elastic_ep.errors import PlanError
from elastic_ep.placement import EMPTY, Placement
from elastic_ep.plan import Load, Plan, rebalance


@attrs.frozen
class Balancer:
    """How a group evens out its load by itself.

    It looks ``every`` so many seconds at what was counted since the last look. A look is hot at a stretch of
    ``hot`` and above, cool below ``cool``; a pass is worth thinking of after ``looks`` hot ones without a
    cool one between. It is begun if each replica that it copies takes, on average, at least ``worth`` of a
    rank's mean load in a layer off the hottest ranks. Every expert is left with ``min_replicas``. PlanError
    unless 1 <= ``cool`` <= ``hot``, and the others are positive.
    """

    every: float = 10.0
    hot: float = 1.2
    cool: float = 1.1
    looks: int = 2
    worth: float = 0.02
    min_replicas: int = 1

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.cool <= self.hot or min(self.every, self.looks, self.worth, self.min_replicas) <= 0:
            raise PlanError(f"{self} is no balancer: give 1 <= cool <= hot, and the others above 0")


@attrs.frozen
class Look:
    """What is kept from one look to the next: the placement, and how many hot looks at it there were."""

    placement: Placement
    hot: int = 0


def look(balancer: Balancer, last: Look, placement: Placement, load: Load) -> tuple[Look, Plan | None]:
    """One look, and the plan of a pass if one pays. Nobody decides on a load of nothing, nor while experts
    are missing."""
    before = last.hot if placement == last.placement else 0
    now = stretch(placement, load)
    if now is None or placement.missing():
        return Look(placement, before), None
    hot = 0 if now < balancer.cool else before + (now >= balancer.hot)
    if hot < balancer.looks:
        return Look(placement, hot), None
    plan = _paying(balancer, placement, load)
    return Look(placement, hot if plan is None else 0), plan


def stretch(placement: Placement, load: Load) -> float | None:
    """At least 1; None if there is no load or no rank."""
    hottest, mean = zip(*_layers(placement, load), strict=True)
    return sum(hottest) / sum(mean) if sum(mean) else None


def _paying(balancer: Balancer, placement: Placement, load: Load) -> Plan | None:
    try:
        plan = rebalance(placement, load, balancer.min_replicas)
    except PlanError:
        return None  # too few ranks for so many replicas, or no slot to move experts through
    before, after = stretch(placement, load), stretch(plan.after, load)
    assert before is not None
    assert after is not None
    copies = sum(len(stage.copies) for stage in plan.stages)
    relief = (before - after) * placement.shape.layers
    return plan if relief > 0 and relief >= balancer.worth * copies else None


def _layers(placement: Placement, load: Load) -> list[tuple[float, float]]:
    """For each layer the load of its hottest rank and the mean over ranks."""
    found = []
    for layer, counts in enumerate(load):
        replicas = [len(ids) for ids in placement.holders(layer)]
        ranks = [
            sum(counts[expert] / replicas[expert] for expert in placement.row(layer, rank) if expert != EMPTY)
            for rank in placement.ranks
        ]
        found.append((max(ranks, default=0.0), sum(ranks) / max(1, len(ranks))))
    return found
