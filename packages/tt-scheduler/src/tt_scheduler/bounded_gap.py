"""A phase policy that bounds how long running requests wait for their next token."""

import math
from collections import deque
from collections.abc import Iterable

import attrs

from tt_scheduler.phases import Choice, Phase, StepRecord, Work, without_prefill
from tt_scheduler.step_costs import LearnedCost, Line

PREFILL_PRIOR = Line(0.05, 0.0004)
DECODE_PRIOR = Line(0.06, 0.0003)
IN_FLIGHT = 2
"""Steps that may run or wait for the device while the next one is chosen, as with vLLM's async scheduling."""


@attrs.frozen
class _Flight:
    step: StepRecord
    after: Phase
    upper_s: float


def _sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sizes)


@attrs.define
class BoundedGap:
    """Keep the gap between two tokens of every running request under ``target_s``; prefill in the rest.

    While both sides wait, it makes room for the most prefill after which a decode still ends in time: one
    chunk, or several, up to twice the largest for each of ``lanes`` that prefill side by side. It decodes if
    there is none, or if what would still fit is so small that a decode and then a larger chunk prefill
    faster. Where not even the smallest chunk and one decode fit into the target, it alternates the two, says
    so of such chunks, and takes the next larger size each time that the oldest waiting request has waited
    ``patience_s`` more.

    The line of a chunk's seconds by tokens and that of a decode's by rows start from the priors and follow
    what is measured. A step that changes the phase is learned apart, for a change may cost something itself.

    ``chunk_sizes`` are the tokens that the model was warmed up for, ascending. Raises ``ValueError`` if they
    are not, or if a time is not above 0.
    """

    target_s: float = attrs.field(validator=attrs.validators.gt(0))
    chunk_sizes: tuple[int, ...] = attrs.field(converter=_sizes)
    prefill_prior: Line = PREFILL_PRIOR
    decode_prior: Line = DECODE_PRIOR
    patience_s: float = attrs.field(default=30.0, validator=attrs.validators.gt(0))
    lanes: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    _first_chunk: LearnedCost = attrs.field(init=False)
    _next_chunk: LearnedCost = attrs.field(init=False)
    _decode: LearnedCost = attrs.field(init=False)
    _in_flight: deque[_Flight] = attrs.field(factory=lambda: deque(maxlen=IN_FLIGHT), init=False)
    _last: Phase = attrs.field(default=Phase.EMPTY, init=False)
    _since_decode: list[int] = attrs.field(factory=list, init=False)
    _rooms: tuple[int, ...] = attrs.field(init=False)

    @chunk_sizes.validator
    def _ascending(self, _: object, sizes: tuple[int, ...]) -> None:
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"chunk_sizes is {sizes}, expected one or more ascending numbers of tokens")

    def __attrs_post_init__(self) -> None:
        self._first_chunk = LearnedCost(self.prefill_prior)
        self._next_chunk = LearnedCost(self.prefill_prior)
        self._decode = LearnedCost(self.decode_prior)
        largest = self.chunk_sizes[-1]
        more = range(3 * largest, 2 * largest * self.lanes + 1, largest)
        self._rooms = (*self.chunk_sizes, *(largest + size for size in self.chunk_sizes), *more)

    def choose(self, work: Work) -> Choice:
        if not work.prefills:
            return without_prefill(work)
        if not work.decodes:
            return Choice(Phase.PREFILL)
        size = self._fitting(work)
        if size is None and self._last is not Phase.DECODE:
            return Choice(Phase.DECODE)
        if size is None:
            return Choice(Phase.PREFILL, self._aged(work.waited_s), over_target=True)
        return Choice(Phase.PREFILL, size)

    def ran(self, step: StepRecord, work: Work) -> None:
        upper_s = self._chunk_s(step.prefill_tokens) if step.phase is Phase.PREFILL else 0.0
        self._in_flight.append(_Flight(step, self._last, upper_s))
        if step.phase is Phase.DECODE:
            self._since_decode.clear()
        elif work.decodes:
            self._since_decode.append(step.prefill_tokens)
        self._last = step.phase

    def measured(self, step: StepRecord, seconds: float) -> None:
        """Learn from a step that ``ran`` told of; any other is passed over."""
        if not any(flight.step == step for flight in self._in_flight):
            return
        while (flight := self._in_flight.popleft()).step != step:
            pass
        if step.phase is Phase.DECODE:
            if flight.after is Phase.PREFILL:
                self._decode.learn(step.decode_rows, seconds)
        elif flight.after is Phase.DECODE:
            self._first_chunk.learn(step.prefill_tokens, seconds)
        else:
            self._next_chunk.learn(step.prefill_tokens, seconds)

    def _fitting(self, work: Work) -> int | None:
        """The largest room after which a decode still ends within the target."""
        decode_s = self._decode.upper_s(work.decodes + work.prefills)
        slack_s = self.target_s - self._gap_s(work) - decode_s
        size = next((size for size in reversed(self._rooms) if self._chunk_s(size) <= slack_s), None)
        return size if size and self._worthwhile(size, decode_s) else None

    def _worthwhile(self, size: int, decode_s: float) -> bool:
        """Whether the chunk computes tokens as fast as those since the last decode, with the next one's cost.

        A slower one would lower the rate of prefill: it is better to decode early and start with a large one.
        """
        cycle_s = decode_s + sum(map(self._chunk_s, self._since_decode))
        return size * cycle_s >= sum(self._since_decode) * self._chunk_s(size)

    def _gap_s(self, work: Work) -> float:
        """The longest gap when the next step starts: steps in flight lengthen it, or end it."""
        gap_s = work.gap_s
        for flight in self._in_flight:
            gap_s = 0.0 if flight.step.phase is Phase.DECODE else gap_s + flight.upper_s
        return gap_s

    def _chunk_s(self, tokens: int) -> float:
        costs = (self._first_chunk, self._next_chunk)
        own, other = costs if self._last is Phase.DECODE else costs[::-1]
        if own.knows(tokens) or (own and not other.knows(tokens)):
            return own.upper_s(tokens)
        return max(own.upper_s(tokens), other.upper_s(tokens))

    def _aged(self, waited_s: float) -> int:
        steps_up = math.floor(waited_s / self.patience_s)
        return self.chunk_sizes[min(steps_up, len(self.chunk_sizes) - 1)]
