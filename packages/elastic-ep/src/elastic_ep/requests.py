"""What is asked of the coordinator: whether it can be done now, and what is said of its end."""

import datetime

import attrs

from elastic_ep.control import (
    Action,
    Begun,
    Coordinator,
    Finished,
    Phase,
    Reason,
    Refused,
    Scale,
)


def refusal(state: Coordinator, asked: Scale) -> Refused | None:
    """Why this cannot be begun now, if it cannot."""
    if state.phase != Phase.STABLE:
        return attrs.evolve(busy(state), ticket=asked.ticket)
    if asked.plan.before != state.placement:
        why = "the plan starts from a placement that is not the serving one; plan again"
        return Refused(why, Reason.OUTDATED, asked.ticket)
    reserved = sorted(set(asked.plan.joiners) & set(state.gone))
    if reserved:
        why = f"ranks {reserved} of an earlier life have not ended yet; ask again, or take other ids"
        return Refused(why, Reason.BUSY, asked.ticket)
    return None


def busy(state: Coordinator) -> Refused:
    """What runs, since when, and what can be done about it."""
    since = None if state.operation is None else state.operation.since
    asked = "" if not since else f", as was asked at {_clock(since)}"
    return Refused(
        f"another operation is running: the group {state.doing}{asked}; its phase is {state.phase.value}. "
        "Ask again when it has ended, or cancel it",
        Reason.BUSY,
        since=since,
    )


def again(state: Coordinator, ticket: str) -> tuple[Action, ...] | None:
    """What was said already to whoever asked under this ticket; None if nobody has."""
    if not ticket:
        return None
    if state.operation is not None and state.operation.ticket == ticket:
        return (Begun(ticket),)
    if state.next is not None and state.next.ticket == ticket:
        return ()
    if state.last is not None and state.last.ticket == ticket:
        return Begun(ticket), state.last
    return None


def ended(state: Coordinator, ok: bool, why: str) -> tuple[Coordinator, tuple[Action, ...]]:
    """The running operation is no more, if there is one; whoever asked for it is told."""
    if state.operation is None:
        return state, ()
    outcome = Finished(ok, why, state.operation.ticket)
    last = state.last if state.operation.yields else outcome
    return attrs.evolve(state, operation=None, last=last), (outcome,)


def _clock(since: float) -> str:
    return f"{datetime.datetime.fromtimestamp(since, datetime.UTC):%H:%M:%S} UTC"
