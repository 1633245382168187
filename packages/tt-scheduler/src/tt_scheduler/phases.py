"""Which phase runs next.

A step on the device is prefill-only, decode-only or empty. A policy sees plain counts and times and answers
with a choice; it holds whatever it must remember itself. It learns what really ran through ``ran``, and how
long that took through ``measured``.
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
    """How many requests could run now, over all lanes, and how long they have waited."""

    decodes: int
    """Running requests whose next step is a decode."""
    chunks: int
    """Running requests whose prompt, or replay after a preemption, is partly computed."""
    admissible: int
    """Waiting requests that nothing but memory keeps from starting: one that waits for its grammar or for a
    row does not count. A caller may stop counting at one; ``BoundedGap`` then foresees one new row a step."""
    gap_s: float = 0.0
    """Longest time since a running decode got its last token, in seconds; 0 without decodes."""
    waited_s: float = 0.0
    """Longest time that a waiting request has waited, in seconds; 0 if none waits."""

    @property
    def prefills(self) -> int:
        """Requests that a prefill step could serve."""
        return self.chunks + self.admissible


@attrs.frozen
class Choice:
    """What a policy wants of the next step."""

    phase: Phase
    prefill_tokens: int | None = None
    """Most tokens that a prefill step may compute, over all lanes; None: the policy sets no limit.

    On a device that pads, chunks count as padded: 100 tokens of each of ten prompts are not one chunk of
    1,000. ``cut`` says what to take of each prompt.
    """
    over_target: bool = False
    """Whether the policy bounds something and knows that this step breaks the bound."""


@attrs.frozen
class StepRecord:
    """What a step computed, over all lanes."""

    phase: Phase
    prefill_tokens: int = 0
    """Tokens of prompts and replays, chunks counted as padded if the device pads."""
    decode_rows: int = 0
    """Requests that each got one token."""


class PhasePolicy(Protocol):
    """Chooses the phase of each step."""

    def choose(self, work: Work) -> Choice:
        """What to try. PREFILL only if ``work.prefills``, DECODE only if ``work.decodes``."""
        ...

    def ran(self, step: StepRecord, work: Work) -> None:
        """Learn what was scheduled in the end: a prefill that could place nothing becomes a decode.

        ``work`` is what ``choose`` was asked about. Empty steps are not told.
        """
        ...

    def measured(self, step: StepRecord, seconds: float) -> None:
        """Learn how long ``step`` took: from its start, or the end of the step before it if that is later, to
        its end.

        Told in the order in which steps ran, perhaps after later ones were chosen, perhaps never.
        """
        ...


@attrs.define
class PrefillFirst:
    """Prefill whenever there is something to prefill. Best time to first token, unbounded decode gaps."""

    def choose(self, work: Work) -> Choice:
        return Choice(Phase.PREFILL) if work.prefills else without_prefill(work)

    def ran(self, step: StepRecord, work: Work) -> None:
        """Nothing to remember."""

    def measured(self, step: StepRecord, seconds: float) -> None:
        """Nothing to learn."""


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

    def choose(self, work: Work) -> Choice:
        if not work.prefills or (work.decodes and self._decodes_owed):
            return without_prefill(work)
        return Choice(Phase.PREFILL)

    def ran(self, step: StepRecord, work: Work) -> None:
        if not work.decodes:
            self._prefills_since_decode = self._decodes_owed = 0
        elif step.phase is Phase.PREFILL:
            self._prefills_since_decode += 1
            if self._prefills_since_decode >= self.prefill_steps:
                self._prefills_since_decode, self._decodes_owed = 0, self.decode_steps
        elif step.phase is Phase.DECODE:
            self._prefills_since_decode = 0
            if work.prefills and self._decodes_owed:
                self._decodes_owed -= 1

    def measured(self, step: StepRecord, seconds: float) -> None:
        """Nothing to learn: only steps are counted."""


def without_prefill(work: Work) -> Choice:
    """A decode if any is due, else nothing."""
    return Choice(Phase.DECODE if work.decodes else Phase.EMPTY)
