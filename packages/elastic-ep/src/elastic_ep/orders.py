"""What the coordinator says in each phase, and which answer it waits for."""

from elastic_ep.control import Action, Coordinator, Phase, Send
from elastic_ep.wire import (
    COORDINATOR,
    Abort,
    Aborted,
    Commit,
    Committed,
    Fence,
    Hello,
    Message,
    Prepare,
    Prepared,
    Resume,
    Resumed,
    Retire,
    Retired,
    Stopped,
)

ANSWERS: dict[Phase, type[Message]] = {
    Phase.LAUNCHING: Hello,
    Phase.PREPARING: Prepared,
    Phase.COMMITTING: Committed,
    Phase.RETIRING: Retired,
    Phase.ABORTING: Aborted,
    Phase.FENCING: Stopped,
    Phase.RESUMING: Resumed,
}


def commands(state: Coordinator) -> tuple[Action, ...]:
    """The command of this phase, to each rank that has not answered it."""
    return tuple(Send(rank, said) for rank in state.waiting if (said := _command(state, rank)) is not None)


def _command(state: Coordinator, rank: int) -> Message | None:
    head = (state.ballot.epoch, state.ballot.attempt, COORDINATOR)
    match state.phase:
        case Phase.PREPARING:
            new = set(state.involved) - set(state.placement.ranks)
            cards = tuple(card for card in state.cards if rank in new or card[0] in new)
            return Prepare(*head, state.stages[0], cards)
        case Phase.COMMITTING:
            return Commit(*head)
        case Phase.RETIRING:
            return Retire(*head)
        case Phase.ABORTING:
            return Abort(*head, state.why)
        case Phase.FENCING:
            return Fence(*head, state.dead)
        case Phase.RESUMING:
            return Resume(*head, state.placement, state.step, state.runs)
    return None
