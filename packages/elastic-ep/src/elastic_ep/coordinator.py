"""The coordinator: who serves, and what is being changed. A pure machine: ``(state, event) -> (state,
actions)``.

    STABLE ─Scale→ LAUNCHING → PREPARING → PREPARED ─CommitNow→ COMMITTING → RETIRING → next stage or STABLE
                   └─────────────┴────────────┴── cancel, failure, deadline, lost joiner → ABORTING → STABLE
    any ── a serving rank is lost → FENCING → RESUMING → STABLE

Each phase waits for one kind of answer from some ranks, and at every tick says its command again to those
that have not answered. So a lost message costs time and nothing else, and a coordinator that restarts from
its last state goes on.
"""

import attrs

from elastic_ep.control import (
    Action,
    Cancel,
    Check,
    CommitNow,
    Coordinator,
    Died,
    Event,
    Expired,
    Finished,
    Kill,
    Launch,
    OnLoss,
    Phase,
    Received,
    Refused,
    Scale,
    Tick,
    Unresponsive,
)
from elastic_ep.orders import ANSWERS, commands
from elastic_ep.plan import Plan, restore
from elastic_ep.wire import (
    Ballot,
    Hello,
    Message,
    PrepareFailed,
    Retired,
    Stopped,
    Suspect,
    stale,
)

Result = tuple[Coordinator, tuple[Action, ...]]

UNCOMMITTED = (Phase.LAUNCHING, Phase.PREPARING, Phase.PREPARED)


def coordinate(state: Coordinator, event: Event) -> Result:
    """One transition."""
    match event:
        case Scale(plan):
            return _scale(state, plan)
        case CommitNow():
            return _commit(state)
        case Cancel() if state.phase in UNCOMMITTED:
            return _abort(state, "cancelled")
        case Cancel():
            return state, (Refused(f"there is nothing to cancel; the phase is {state.phase.value}"),)
        case Received(message):
            dropped = stale(message, state.ballot, state.epoch)
            return (state, ()) if dropped else _received(state, message)
        case Died(rank) if rank in state.gone:
            dead = state.dead if state.phase == Phase.STABLE else _more(state.dead, rank)
            return attrs.evolve(state, gone=_less(state.gone, rank), dead=dead), ()
        case Died(rank):
            return _lost(state, rank, f"rank {rank} died")
        case Unresponsive(rank) if rank in state.gone:
            return state, (Kill(rank),)
        case Unresponsive(rank) if rank in (*state.involved, *state.waiting):
            state, actions = _lost(state, rank, f"rank {rank} does not respond")
            return attrs.evolve(state, gone=_more(state.gone, rank)), (Kill(rank), *actions)
        case Unresponsive():
            return state, ()
        case Expired(ballot):
            if ballot != state.ballot or state.phase not in (Phase.LAUNCHING, Phase.PREPARING):
                return state, ()
            return _abort(state, f"ranks {list(state.waiting)} were not ready in time")
        case Tick():
            return state, commands(state)


def _scale(state: Coordinator, plan: Plan) -> Result:
    if state.phase != Phase.STABLE:
        return state, (Refused(f"another operation is running; its phase is {state.phase.value}"),)
    if plan.before != state.placement:
        return state, (Refused("the plan starts from a placement that is not the serving one; plan again"),)
    reserved = sorted(set(plan.joiners) & set(state.gone))
    if reserved:
        return state, (Refused(f"ranks {reserved} of an earlier life are not seen dead yet; take other ids"),)
    if not plan.stages:
        return state, (Finished(True, "nothing to do"),)
    started = attrs.evolve(state, stages=plan.stages, ballot=_next_ballot(state))
    launches = tuple(Launch(rank, started.ballot) for rank in plan.joiners)
    return _after(launches, _enter(started, Phase.LAUNCHING, plan.joiners))


def _commit(state: Coordinator) -> Result:
    if state.phase != Phase.PREPARED:
        return state, (Refused(f"there is nothing prepared to commit; the phase is {state.phase.value}"),)
    if state.runs:
        return _enter(state, Phase.COMMITTING, state.involved)
    # No step is run that could carry an announcement: everybody is simply told to go on.
    first = state.stages[0].placement
    leavers = set(state.placement.ranks) - set(first.ranks)
    serving, kills = _dismiss(attrs.evolve(state, placement=first, epoch=state.ballot.epoch), leavers)
    return _after(kills, _enter(serving, Phase.RESUMING, first.ranks))


def _received(state: Coordinator, message: Message) -> Result:
    rank = message.sender
    match message:
        case Suspect():
            return state, (Check(message.rank, f"rank {rank}: {message.why}"),)
        case PrepareFailed() if state.phase in UNCOMMITTED and rank in state.involved:
            return _abort(state, f"rank {rank} could not prepare: {message.why}")
    if type(message) is not ANSWERS.get(state.phase) or rank not in state.waiting:
        return state, ()
    match message:
        case Hello() if message.fingerprint != state.fingerprint:
            why = f"rank {rank} has fingerprint {message.fingerprint}, not {state.fingerprint}"
            return _abort(state, why)
        case Hello():
            state = attrs.evolve(
                state, cards=tuple(sorted({**dict(state.cards), rank: message.card}.items()))
            )
        case Stopped():
            state = attrs.evolve(state, stops=(*state.stops, message))
        case Retired() if rank not in state.placement.ranks:
            state = attrs.evolve(state, gone=_more(state.gone, rank))
    return _enter(state, state.phase, _less(state.waiting, rank), again=True)


def _enter(state: Coordinator, phase: Phase, waiting: tuple[int, ...], again: bool = False) -> Result:
    """Go into a phase, or stay there ``again`` with fewer to wait for; with none, go on."""
    state = attrs.evolve(state, phase=phase, waiting=waiting)
    if not waiting:
        return _go_on(state)
    return state, () if again else commands(state)


def _go_on(state: Coordinator) -> Result:
    """All answers of the phase are in."""
    match state.phase:
        case Phase.LAUNCHING:
            return _enter(state, Phase.PREPARING, state.involved)
        case Phase.PREPARING:
            return attrs.evolve(state, phase=Phase.PREPARED), ()
        case Phase.COMMITTING:
            both, placement = state.involved, state.stages[0].placement
            serving = attrs.evolve(state, placement=placement, epoch=state.ballot.epoch)
            return _enter(serving, Phase.RETIRING, both)
        case Phase.RETIRING:
            return _next_stage(state)
        case Phase.FENCING:
            return _resume(state)
        case Phase.RESUMING if state.stages:
            return _next_stage(state)
    return _finish(state)


def _next_stage(state: Coordinator) -> Result:
    state = attrs.evolve(state, stages=state.stages[1:])
    if not state.stages:
        return _finish(state, operation=True)
    return _enter(attrs.evolve(state, ballot=_next_ballot(state)), Phase.PREPARING, state.involved)


def _finish(state: Coordinator, operation: bool = False) -> Result:
    """Back to STABLE, with nothing left of the operation or the fence."""
    ended = operation or bool(state.stages)
    stable = attrs.evolve(
        state,
        phase=Phase.STABLE,
        stages=(),
        dead=(),
        stops=(),
        committing=None,
        why="",
        cards=tuple(card for card in state.cards if card[0] in state.placement.ranks),
    )
    return stable, (Finished(not state.why, state.why),) if ended else ()


def _abort(state: Coordinator, why: str) -> Result:
    """Forget the stage: joiners are dismissed, serving ranks let go of what they prepared."""
    told = () if state.phase == Phase.LAUNCHING else state.placement.ranks
    state, kills = _dismiss(attrs.evolve(state, why=why), set(state.involved) - set(state.placement.ranks))
    return _after(kills, _enter(state, Phase.ABORTING, told))


def _dismiss(state: Coordinator, ranks: set[int]) -> Result:
    """End ranks that are of no use any more; their ids stay reserved until they are seen dead."""
    alive = sorted(ranks - set(state.dead))
    gone = tuple(sorted({*state.gone, *alive}))
    return attrs.evolve(state, gone=gone), tuple(Kill(rank) for rank in alive)


def _lost(state: Coordinator, rank: int, why: str) -> Result:
    if rank not in (*state.involved, *state.waiting):
        return state, ()
    state = attrs.evolve(state, dead=_more(state.dead, rank))
    if state.phase == Phase.FENCING:
        return _enter(state, Phase.FENCING, _less(state.waiting, rank), again=True)
    if rank in state.placement.ranks or state.phase == Phase.COMMITTING:
        return _fence(state, why)
    if state.phase in UNCOMMITTED:
        return _abort(state, why)
    return _enter(state, state.phase, _less(state.waiting, rank), again=True)


def _fence(state: Coordinator, why: str) -> Result:
    """Stop all that serve, under an epoch that nobody has tried for."""
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
    fencing, kills = _dismiss(fencing, others)
    alive = tuple(rank for rank in stopping if rank not in state.dead)
    return _after(kills, _enter(fencing, Phase.FENCING, alive))


def _resume(state: Coordinator) -> Result:
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
    ended = (Finished(False, state.why),) if state.stages else ()
    state, kills = _dismiss(state, {stop.sender for stop in state.stops} - set(placement.ranks))
    resumed = attrs.evolve(
        state,
        placement=placement,
        epoch=state.ballot.epoch,
        step=min(steps, default=state.step),
        stages=(),
        committing=None,
        stops=(),
        dead=(),
    )
    return _after((*kills, *ended), _enter(resumed, Phase.RESUMING, placement.ranks))


def _next_ballot(state: Coordinator) -> Ballot:
    """The next try: for the epoch after the serving one, which earlier tries may have failed to reach."""
    last = state.ballot
    return Ballot(last.epoch, last.attempt + 1) if last.epoch > state.epoch else Ballot(state.epoch + 1, 0)


def _after(actions: tuple[Action, ...], result: Result) -> Result:
    return result[0], (*actions, *result[1])


def _more(ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple(sorted({*ranks, rank}))


def _less(ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple(other for other in ranks if other != rank)
