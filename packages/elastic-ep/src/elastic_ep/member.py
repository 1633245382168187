"""A member: what one rank serves and prepares. A pure machine: ``(state, event) -> (state, actions)``.

    JOINING ─Prepare→ PREPARING → PREPARED ─announced→ ARMED ─step `at`→ COMMITTED ─Retire→ ACTIVE, or GONE
    ACTIVE ─Prepare→ PREPARING ...          └─Abort→ ACTIVE
    any ─Fence→ STOPPED ─Resume→ ACTIVE

A member serves in every phase but JOINING, STOPPED and GONE, as long as its placement names it. It has no
clock and trusts no timeout: it only says whom it suspects.
"""

import attrs

from elastic_ep.membership import (
    Apply,
    Boundary,
    CancelPrepare,
    Completed,
    Exit,
    Flip,
    Heard,
    Interrupt,
    Keep,
    LeaseDue,
    Member,
    MemberAction,
    MemberEvent,
    MemberPhase,
    Overdue,
    PrepareEnded,
    Run,
    StartPrepare,
    Tell,
)
from elastic_ep.wire import (
    Abort,
    Aborted,
    Commit,
    CommitAt,
    Committed,
    Fence,
    Hello,
    Lease,
    Message,
    Prepare,
    Prepared,
    PrepareFailed,
    Resume,
    Resumed,
    Retire,
    Retired,
    Stopped,
    Suspect,
    stale,
)

LEAD = 2
"""Steps between the leader's announcement and the switch. One would do for the serving ranks: a rank
completes a step only with the leader's part of it, which carries the announcement. The second gives joiners
time to hear of it."""

MemberResult = tuple[Member, tuple[MemberAction, ...]]

ANSWERED_BY: dict[type[Message], tuple[type[Message], ...]] = {
    Prepare: (Prepared, PrepareFailed),
    Commit: (Committed,),
    Retire: (Retired,),
    Abort: (Aborted,),
    Fence: (Stopped,),
    Resume: (Resumed,),
}


def join(hello: Hello) -> Member:
    """A member that was launched under its hello's ballot. It says hello until it is told to prepare."""
    return Member(hello.sender, hello, hello.ballot)


def act(state: Member, event: MemberEvent) -> MemberResult:
    """One transition."""
    if state.phase == MemberPhase.GONE:
        return state, ()
    match event:
        case Heard(message):
            return (state, ()) if stale(message, state.ballot, state.serving) else _heard(state, message)
        case PrepareEnded(ballot, why) if state.phase == MemberPhase.PREPARING and ballot == state.ballot:
            head = (ballot.epoch, ballot.attempt, state.rank)
            if why:
                return _answer(state, PrepareFailed(*head, why))
            return _answer(attrs.evolve(state, phase=MemberPhase.PREPARED), Prepared(*head))
        case Boundary():
            return _boundary(state)
        case Completed(epoch, step) if state.serves and (epoch, step) == (state.serving, state.step):
            return _completed(state, step)
        case Overdue(rank, why):
            return state, (Tell(Suspect(*_head(state), state.serving, state.step, rank, why)),)
        case LeaseDue():
            greet = (Tell(state.answer),) if state.phase == MemberPhase.JOINING else ()
            return state, (Tell(Lease(*_head(state), state.serving, state.step)), *greet)
    return state, ()


def _heard(state: Member, message: Message) -> MemberResult:
    again = message.ballot == state.ballot
    if again and state.answer.ballot == message.ballot and isinstance(state.answer, _answers(message)):
        return state, (Tell(state.answer),)
    phase = state.phase
    match message:
        case Prepare() if phase == MemberPhase.JOINING or (phase == MemberPhase.ACTIVE and not again):
            return _prepare(state, message)
        case CommitAt() if again and phase == MemberPhase.PREPARED:
            return attrs.evolve(state, phase=MemberPhase.ARMED, at=message.at), ()
        case Commit() if again and phase == MemberPhase.PREPARED:
            return attrs.evolve(state, told=True), ()
        case Retire() if again and phase == MemberPhase.COMMITTED:
            return _retire(state)
        case Abort() if _abortable(state, again):
            return _abort(state, message)
        case Fence() if not again:
            return _fence(state, message)
        case Resume() if again and phase in (MemberPhase.STOPPED, MemberPhase.PREPARED):
            return _resume(state, message)
    return state, ()


def _answers(message: Message) -> tuple[type[Message], ...]:
    return ANSWERED_BY.get(type(message), ())


def _prepare(state: Member, message: Prepare) -> MemberResult:
    preparing = attrs.evolve(
        state, ballot=message.ballot, phase=MemberPhase.PREPARING, stage=message.stage, told=False, at=None
    )
    return preparing, (StartPrepare(message.ballot, message.stage, message.cards),)


def _boundary(state: Member) -> MemberResult:
    if state.phase == MemberPhase.ARMED and state.step in (None, state.at):
        return _flip(state)
    if not state.runs:
        return state, ()
    assert state.step is not None
    if state.leads and state.told and state.phase == MemberPhase.PREPARED:
        state = attrs.evolve(state, phase=MemberPhase.ARMED, at=state.step + LEAD)
    return state, (_run(state),)


def _flip(state: Member) -> MemberResult:
    assert state.stage is not None
    assert state.at is not None
    epoch, placement = state.ballot.epoch, state.stage.placement
    flipped = attrs.evolve(
        state,
        phase=MemberPhase.COMMITTED,
        placement=placement,
        serving=epoch,
        step=state.at,
        applied=state.at - 1 if state.applied is None else state.applied,
        stage=None,
        told=False,
        at=None,
    )
    flipped, told = _answer(flipped, Committed(*_head(state), state.at))
    return flipped, (Flip(epoch, placement), *((_run(flipped),) if flipped.serves else told))


def _run(state: Member) -> Run:
    assert state.serving is not None
    assert state.step is not None
    if state.stage is None or state.at is None or not state.leads:
        return Run(state.serving, state.step)
    assert state.placement is not None
    also = tuple(rank for rank in state.stage.placement.ranks if rank not in state.placement.ranks)
    return Run(state.serving, state.step, CommitAt(*_head(state), state.at), also)


def _completed(state: Member, step: int) -> MemberResult:
    assert state.applied is not None
    # To say sooner that it has switched would take time from those that still run their first step since.
    said = state.answer
    told = (Tell(said),) if isinstance(said, Committed) and step == said.step + 1 else ()
    if step <= state.applied:
        return attrs.evolve(state, step=step + 1), told
    return attrs.evolve(state, step=step + 1, applied=step), (Apply(step), *told)


def _retire(state: Member) -> MemberResult:
    assert state.placement is not None
    stays = state.rank in state.placement.ranks
    phase = MemberPhase.ACTIVE if stays else MemberPhase.GONE
    retired, told = _answer(attrs.evolve(state, phase=phase), Retired(*_head(state)))
    return retired, (Keep(state.placement.ranks), *told) if stays else (Keep(()), *told, Exit())


def _abortable(state: Member, again: bool) -> bool:
    """An abort ends a preparation, or overtakes the command to prepare."""
    if state.phase in (MemberPhase.PREPARING, MemberPhase.PREPARED):
        return again and state.serving is not None
    return state.phase == MemberPhase.ACTIVE and not again


def _abort(state: Member, message: Abort) -> MemberResult:
    assert state.placement is not None
    cancels = (
        ()
        if state.phase == MemberPhase.ACTIVE
        else (CancelPrepare(state.ballot), Keep(state.placement.ranks))
    )
    quiet = attrs.evolve(
        state, ballot=message.ballot, phase=MemberPhase.ACTIVE, stage=None, told=False, at=None
    )
    quiet, told = _answer(quiet, Aborted(*_head(quiet)))
    return quiet, (*cancels, *told)


def _fence(state: Member, message: Fence) -> MemberResult:
    cancels = (CancelPrepare(state.ballot),) if state.phase == MemberPhase.PREPARING else ()
    stopped = attrs.evolve(
        state, ballot=message.ballot, phase=MemberPhase.STOPPED, stage=None, told=False, at=None
    )
    stopped, told = _answer(stopped, Stopped(*_head(stopped), state.serving, state.step))
    return stopped, (*cancels, Interrupt(), *told)


def _resume(state: Member, message: Resume) -> MemberResult:
    resumed = attrs.evolve(
        state,
        phase=MemberPhase.ACTIVE,
        placement=message.placement,
        serving=message.epoch,
        step=message.step,
        applied=message.step - 1 if state.applied is None else state.applied,
        stage=None,
        halted=not message.runs,
    )
    resumed, told = _answer(resumed, Resumed(*_head(resumed)))
    return resumed, (Flip(message.epoch, message.placement), Keep(message.placement.ranks), *told)


def _answer(state: Member, message: Message) -> MemberResult:
    return attrs.evolve(state, answer=message), (Tell(message),)


def _head(state: Member) -> tuple[int, int, int]:
    return state.ballot.epoch, state.ballot.attempt, state.rank
