"""What a rank does while a step waits for others: looks for a fence, and after the late ones."""

import random
import time
from collections.abc import Callable, Iterable

from elastic_ep.lane import Lane
from elastic_ep.pulse import Pulse

PROBE = 0.005
"""Seconds after which a rank that waits looks whether one of those it waits for is there at all."""


class Watch:
    """Asked once a layer and all the while a step waits, it says whether the step is fenced. Each time is a
    sign of life for ``pulse``.

    ``suspect`` is told every ``patience`` seconds who is late, and why. Between that, one of the late at a
    time is probed, which ends the wait with an error if it is gone.
    """

    def __init__(
        self,
        lane: Lane,
        peers: dict[int, str],
        patience: float,
        fenced: Callable[[], bool],
        suspect: Callable[[Iterable[int], str], None],
        pulse: Pulse,
    ) -> None:
        self._lane = lane
        self._peers = peers
        self._patience = patience
        self._fenced = fenced
        self._suspect = suspect
        self._pulse = pulse
        now = time.monotonic()
        self._due, self._probe = now + patience, now + PROBE

    def __call__(self) -> bool:
        self._pulse.beat()
        now, late = time.monotonic(), self._lane.late
        if late and now > self._probe:
            self._probe = now + PROBE
            self._lane.probe(self._peers[random.choice(late)])
        if now > self._due:
            self._due = now + self._patience
            self._suspect(late, f"late by {self._patience} s or more")
        return self._fenced()
