"""What a group becomes when ranks are lost or are of no use any more: pure, from state to state.

`elastic_ep.coordinator` decides when; here is what.
"""

import attrs

from elastic_ep.control import Action, Coordinator, Kill, OnLoss, Phase
from elastic_ep.plan import restore
from elastic_ep.requests import ended
from elastic_ep.wire import Ballot

Result = tuple[Coordinator, tuple[Action, ...]]


def dismiss(state: Coordinator, ranks: set[int]) -> Result:
    """End ranks that are of no use any more; their ids stay reserved until they are seen dead."""
    alive = sorted(ranks - set(state.dead))
    gone = tuple(sorted({*state.gone, *alive}))
    return attrs.evolve(state, gone=gone), tuple(Kill(rank) for rank in alive)


def fenced(state: Coordinator, why: str) -> tuple[Coordinator, tuple[Action, ...], tuple[int, ...]]:
    """All that serve are to stop, under an epoch that nobody has tried for; the last are those to wait
    for."""
    interrupted = state.phase == Phase.COMMITTING
    stopping = state.involved if interrupted else state.placement.ranks
    others = {*state.involved, *state.waiting} - set(stopping)
    fencing = attrs.evolve(
        state,
        ballot=Ballot(state.ballot.epoch + 1, 0),
        committing=state.ballot.epoch if interrupted else None,
        stops=(),
        why=why,
    )
    fencing, kills = dismiss(fencing, others)
    return fencing, kills, tuple(rank for rank in stopping if rank not in state.dead)


def resumed(state: Coordinator) -> Result:
    """All survivors have stopped: go on without the dead, from the step that not all of them have completed.

    If a commit was interrupted and any survivor has switched, all switch: each was prepared before the
    commit began. If none has, no step of the new epoch can be complete, because a step needs every rank, so
    all go on as before.
    """
    forward = any(stop.serving == state.committing for stop in state.stops if stop.serving is not None)
    base = state.stages[0].placement if forward else state.placement
    placement = base.without(state.dead)
    if state.on_loss == OnLoss.RELOAD:
        placement = restore(placement)
    steps = [stop.step for stop in state.stops if stop.step is not None and stop.sender in placement.ranks]
    state, kills = dismiss(state, {stop.sender for stop in state.stops} - set(placement.ranks))
    state, said = ended(state, False, state.why)
    resuming = attrs.evolve(
        state,
        placement=placement,
        epoch=state.ballot.epoch,
        step=min(steps, default=state.step),
        stages=(),
        committing=None,
        stops=(),
        dead=(),
    )
    return resuming, (*kills, *said)


def more(ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple(sorted({*ranks, rank}))


def less(ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple(other for other in ranks if other != rank)
