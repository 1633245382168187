"""Asking the coordinator for an operation, from the host's side: say it, hear that it runs, learn how it
ended."""

import queue
import time
import uuid
from collections.abc import Callable

from elastic_ep.control import Begun, Coordinator, Event, Finished, Reason, Refused, Scale
from elastic_ep.errors import BusyError, GroupError, OutdatedError
from elastic_ep.plan import Plan
from elastic_ep.seat import Patience

Answer = Begun | Finished | Refused

KEPT = 16
"""Operations whose end may still be asked for: the latest ones. Only one runs at a time."""


class Asking:
    """Operations that were asked for and not finished with, by ticket. Any thread may ask.

    ``order`` sends to the coordinator or raises GroupError; ``state`` gives its saved state.
    """

    def __init__(
        self, order: Callable[[Event], None], state: Callable[[], Coordinator], patience: Patience
    ) -> None:
        self._order = order
        self._state = state
        self._patience = patience
        self._answers: dict[str, queue.SimpleQueue[Answer]] = {}

    def ask(self, plan: Plan) -> Scale:
        """Return when the operation runs. Raises what `elastic_ep.Group.begin` does."""
        asked = Scale(plan, uuid.uuid4().hex, time.time())
        self._answers[asked.ticket] = queue.SimpleQueue()
        for ticket in list(self._answers)[:-KEPT]:
            self._answers.pop(ticket, None)
        try:
            self._await_begin(asked)
        except GroupError:
            self._answers.pop(asked.ticket, None)
            raise
        return asked

    def outcome(self, asked: Scale, deadline: float) -> Finished | None:
        """How it ended: as was told, or else as was saved. None if it has not by then."""
        answers = self._answers.setdefault(asked.ticket, queue.SimpleQueue())
        while time.monotonic() < deadline:
            try:
                answer: Answer | None = answers.get(timeout=self._patience.beat)
            except queue.Empty:
                answer = self._state().last
            if isinstance(answer, Finished) and answer.ticket == asked.ticket:
                self._answers.pop(asked.ticket, None)
                return answer
        return None

    def hear(self, answer: Answer) -> None:
        answers = self._answers.get(answer.ticket)
        if answers is not None:
            answers.put(answer)

    def _await_begin(self, asked: Scale) -> None:
        """Says it until it is answered: a coordinator that is replaced may not have heard it."""
        answers, deadline = self._answers[asked.ticket], time.monotonic() + self._patience.give_up
        while time.monotonic() < deadline:
            self._order(asked)
            try:
                answer = answers.get(timeout=self._patience.lease)
            except queue.Empty:
                continue
            match answer:
                case Begun():
                    return
                case Refused(why, Reason.BUSY):
                    raise BusyError(why, answer.since)
                case Refused(why, Reason.OUTDATED):
                    raise OutdatedError(why)
            raise GroupError(answer.why)
        raise GroupError(f"no coordinator answered within {self._patience.give_up} s")
