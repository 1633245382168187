"""The coordinator: who serves, and what is being changed. A pure machine: ``(state, event) -> (state,
actions)``.

    STABLE ─Scale→ LAUNCHING → PREPARING → PREPARED ─CommitNow→ COMMITTING → RETIRING → next stage or STABLE
                   └─────────────┴────────────┴── cancel, failure, deadline, lost joiner → ABORTING → STABLE
    any ── a serving rank is lost → FENCING → RESUMING → STABLE

Each phase waits for one kind of answer from some ranks, and at every tick says its command again to those
that have not answered. So a lost message costs time and nothing else, and a coordinator that restarts from
its last state goes on.

An operation that yields makes way for one that does not: it is rolled back to the last placement that was
committed or, inside a commit, ends with that one.
"""

import attrs

from elastic_ep.control import (
    Action,
    Begun,
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
    Operation,
    Phase,
    Received,
    Refused,
    Scale,
    Tick,
    Unresponsive,
)
from elastic_ep.fencing import Result, dismiss, fenced, less, more, resumed
from elastic_ep.orders import ANSWERS, commands
from elastic_ep.requests import again, ended, refusal
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

UNCOMMITTED = (Phase.LAUNCHING, Phase.PREPARING, Phase.PREPARED)
CANCELLED = "cancelled"
MADE_WAY = "made way for an operation that was asked for"


def coordinate(state: Coordinator, event: Event) -> Result:
    """One transition."""
    match event:
        case Scale():
            return _scale(state, event)
        case CommitNow():
            return _commit(state)
        case Cancel():
            return _cancel(state)
        case Received(message):
            dropped = stale(message, state.ballot, state.epoch)
            return (state, ()) if dropped else _received(state, message)
        case Died(rank) if rank in state.gone:
            dead = state.dead if state.phase == Phase.STABLE else more(state.dead, rank)
            return attrs.evolve(state, gone=less(state.gone, rank), dead=dead), ()
        case Died(rank):
            return _lost(state, rank, f"rank {rank} died")
        case Unresponsive(rank) if rank in state.gone:
            return state, (Kill(rank),)
        case Unresponsive(rank) if rank in (*state.involved, *state.waiting):
            state, actions = _lost(state, rank, f"rank {rank} does not respond")
            return attrs.evolve(state, gone=more(state.gone, rank)), (Kill(rank), *actions)
        case Unresponsive():
            return state, ()
        case Expired(ballot):
            if ballot != state.ballot or state.phase not in (Phase.LAUNCHING, Phase.PREPARING):
                return state, ()
            return _abort(state, f"ranks {list(state.waiting)} were not ready in time")
        case Tick():
            return state, commands(state)


def _scale(state: Coordinator, asked: Scale) -> Result:
    said = again(state, asked.ticket)
    if said is not None:
        return state, said
    if state.operation is not None and state.operation.yields and not asked.yields and state.next is None:
        return _make_way(attrs.evolve(state, next=asked))
    refused = refusal(state, asked)
    if refused is not None:
        return state, (refused,)
    told, plan = (Begun(asked.ticket),), asked.plan
    state = attrs.evolve(state, operation=Operation(asked.ticket, asked.since, asked.yields))
    if not plan.stages:
        return _after(told, ended(state, True, "nothing to do"))
    started = attrs.evolve(state, stages=plan.stages, ballot=_next_ballot(state))
    launches = tuple(Launch(rank, started.ballot) for rank in plan.joiners)
    return _after((*told, *launches), _enter(started, Phase.LAUNCHING, plan.joiners))


def _make_way(state: Coordinator) -> Result:
    """End what runs for what comes next: back to the state before, or as soon as the commit is through."""
    return _abort(state, MADE_WAY) if state.phase in UNCOMMITTED else (state, ())


def _cancel(state: Coordinator) -> Result:
    if state.next is not None:
        outcome = Finished(False, CANCELLED, state.next.ticket)
        return attrs.evolve(state, next=None, last=outcome), (outcome,)
    if state.phase in UNCOMMITTED:
        return _abort(state, CANCELLED)
    return state, (Refused(f"there is nothing to cancel; the phase is {state.phase.value}"),)


def _commit(state: Coordinator) -> Result:
    if state.phase != Phase.PREPARED:
        return state, (Refused(f"there is nothing prepared to commit; the phase is {state.phase.value}"),)
    if state.runs:
        return _enter(state, Phase.COMMITTING, state.involved)
    # No step is run that could carry an announcement: everybody is simply told to go on.
    first = state.stages[0].placement
    leavers = set(state.placement.ranks) - set(first.ranks)
    serving, kills = dismiss(attrs.evolve(state, placement=first, epoch=state.ballot.epoch), leavers)
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
            state = attrs.evolve(state, gone=more(state.gone, rank))
    return _enter(state, state.phase, less(state.waiting, rank), again=True)


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
            resuming, actions = resumed(state)
            return _after(actions, _enter(resuming, Phase.RESUMING, resuming.placement.ranks))
        case Phase.RESUMING if state.stages:
            return _next_stage(state)
    return _finish(state)


def _next_stage(state: Coordinator) -> Result:
    left = state.stages[1:]
    if left and state.next is not None:
        return _finish(attrs.evolve(state, stages=(), why=MADE_WAY))
    state = attrs.evolve(state, stages=left)
    if not left:
        return _finish(state)
    return _enter(attrs.evolve(state, ballot=_next_ballot(state)), Phase.PREPARING, state.involved)


def _finish(state: Coordinator) -> Result:
    """Back to STABLE, with nothing left of the operation or the fence; then to what waited for that."""
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
    stable, said = ended(stable, not state.why, state.why)
    if stable.next is None:
        return stable, said
    return _after(said, _scale(attrs.evolve(stable, next=None), stable.next))


def _abort(state: Coordinator, why: str) -> Result:
    """Forget the stage: joiners are dismissed, serving ranks let go of what they prepared."""
    told = () if state.phase == Phase.LAUNCHING else state.placement.ranks
    state, kills = dismiss(attrs.evolve(state, why=why), set(state.involved) - set(state.placement.ranks))
    return _after(kills, _enter(state, Phase.ABORTING, told))


def _lost(state: Coordinator, rank: int, why: str) -> Result:
    if rank not in (*state.involved, *state.waiting):
        return state, ()
    state = attrs.evolve(state, dead=more(state.dead, rank))
    if state.phase == Phase.FENCING:
        return _enter(state, Phase.FENCING, less(state.waiting, rank), again=True)
    if rank in state.placement.ranks or state.phase == Phase.COMMITTING:
        return _fence(state, why)
    if state.phase in UNCOMMITTED:
        return _abort(state, why)
    return _enter(state, state.phase, less(state.waiting, rank), again=True)


def _fence(state: Coordinator, why: str) -> Result:
    fencing, kills, alive = fenced(state, why)
    return _after(kills, _enter(fencing, Phase.FENCING, alive))


def _next_ballot(state: Coordinator) -> Ballot:
    """The next try: for the epoch after the serving one, which earlier tries may have failed to reach."""
    last = state.ballot
    return Ballot(last.epoch, last.attempt + 1) if last.epoch > state.epoch else Ballot(state.epoch + 1, 0)


def _after(actions: tuple[Action, ...], result: Result) -> Result:
    return result[0], (*actions, *result[1])
