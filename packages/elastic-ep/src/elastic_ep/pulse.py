"""What the link's thread says for a rank that serves: that it lives, if it does, and what it has counted.

A rank whose serving thread hangs has another thread that could go on speaking for it. Waiting for others is
no hang: a thread that waits looks around all the while, and each look is a sign. What is known to take its
time, as captures and loading do, says how much of it before it begins.
"""

import ctypes
import time
from collections.abc import Callable

import torch

from elastic_ep.codec import encode
from elastic_ep.member import act
from elastic_ep.membership import LeaseDue, Member, Tell
from elastic_ep.seat import Seat
from elastic_ep.transport import size_of
from elastic_ep.wire import Counted, Message


class Pulse:
    """Signs of life of the serving thread; read by another.

    ``patience``: seconds from one sign to the next, unless that sign says otherwise.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._due: float | None = None

    def beat(self, patience: float | None = None) -> None:
        """It lives, and will say so again within so many seconds."""
        self._due = self._clock() + (self._patience if patience is None else patience)

    @property
    def lives(self) -> bool:
        """Whether its next sign is not overdue; so it is said to live before the first."""
        due = self._due
        return due is None or self._clock() <= due


class Voice:
    """Asked every beat, in the link's thread. It only reads."""

    def __init__(self, seat: Seat) -> None:
        self.pulse = Pulse(seat.patience.stall)
        self._seat = seat
        self._counted = time.monotonic()

    def beat(self, member: Member, load: torch.Tensor | None) -> list[bytes]:
        """Nothing from a rank that hangs. ``load`` is `elastic_ep.step.Step`'s."""
        if not self.pulse.lives:
            return []
        _, actions = act(member, LeaseDue())
        told: list[Message] = [action.message for action in actions if isinstance(action, Tell)]
        now = time.monotonic()
        if load is not None and now - self._counted >= self._seat.counting:
            self._counted = now
            told.append(_counted(member, load))
        return [encode(message) for message in told]


def _counted(member: Member, load: torch.Tensor) -> Counted:
    """The counts as they are; whoever hears them takes the difference."""
    ballot, counts = member.ballot, ctypes.string_at(load.data_ptr(), size_of(load))
    return Counted(ballot.epoch, ballot.attempt, member.rank, member.serving, member.step, counts)
