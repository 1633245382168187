"""Which phase runs next.

A step on the device is prefill-only, decode-only or empty. A policy sees plain counts and answers with a
phase; it holds whatever it must remember itself, and learns what really ran through ``ran``.
"""

import enum
from typing import Protocol

import attrs


class Phase(enum.Enum):
    """What one step computes."""

    EMPTY = "empty"
    PREFILL = "prefill"
    DECODE = "decode"


@attrs.frozen
class Work:
    """How many requests could run now, over all lanes. Policies only ask whether a count is zero, so a caller
    may stop counting at one."""

    decodes: int
    """Running requests whose next step is a decode."""
    chunks: int
    """Running requests whose prompt, or replay after a preemption, is partly computed."""
    admissible: int
    """Waiting requests that nothing but memory keeps from starting; one that waits for its grammar does not
    count."""

    @property
    def prefills(self) -> int:
        """Requests that a prefill step could serve."""
        return self.chunks + self.admissible


class PhasePolicy(Protocol):
    """Chooses the phase of each step."""

    def choose(self, work: Work) -> Phase:
        """The phase to try. PREFILL only if ``work.prefills``, DECODE only if ``work.decodes``."""
        ...

    def ran(self, phase: Phase, work: Work) -> None:
        """Learn which phase ran in the end: a prefill that could place nothing becomes a decode.

        ``work`` is what ``choose`` was asked about. Empty steps are not told.
        """
        ...


@attrs.define
class PrefillFirst:
    """Prefill whenever there is something to prefill. Best time to first token, unbounded decode gaps."""

    def choose(self, work: Work) -> Phase:
        if work.prefills:
            return Phase.PREFILL
        return Phase.DECODE if work.decodes else Phase.EMPTY

    def ran(self, phase: Phase, work: Work) -> None:
        """Nothing to remember."""


@attrs.define
class Interleave:
    """At most ``prefill_steps`` prefill steps, then ``decode_steps`` decode steps, while both wait.

    A decode step that ran while no prefill was waiting costs the next prompt nothing and pays nothing off:
    only contested steps are counted. A prefill step that ran while no decode was waiting clears the count.
    Raises ``ValueError`` if either number is below 1.
    """

    prefill_steps: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    decode_steps: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    _prefills_since_decode: int = attrs.field(default=0, init=False)
    _decodes_owed: int = attrs.field(default=0, init=False)

    def choose(self, work: Work) -> Phase:
        if not work.prefills:
            return Phase.DECODE if work.decodes else Phase.EMPTY
        if work.decodes and self._decodes_owed:
            return Phase.DECODE
        return Phase.PREFILL

    def ran(self, phase: Phase, work: Work) -> None:
        if not work.decodes:
            self._prefills_since_decode = self._decodes_owed = 0
        elif phase is Phase.PREFILL:
            self._prefills_since_decode += 1
            if self._prefills_since_decode >= self.prefill_steps:
                self._prefills_since_decode, self._decodes_owed = 0, self.decode_steps
        elif phase is Phase.DECODE:
            self._prefills_since_decode = 0
            if work.prefills and self._decodes_owed:
                self._decodes_owed -= 1
