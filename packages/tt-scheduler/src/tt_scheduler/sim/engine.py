"""The simulation: arrivals, lanes, one shared phase for each step, and a clock that the device moves."""

import math
import random
from collections.abc import Sequence
from typing import Protocol

import attrs

from tt_scheduler.chunks import padded
from tt_scheduler.errors import SimulationError
from tt_scheduler.lanes import choose_lane
from tt_scheduler.phases import Phase, PhasePolicy, StepRecord, Work
from tt_scheduler.sim.arrivals import Arrival
from tt_scheduler.sim.device import Device, SimStep
from tt_scheduler.sim.lane import Chunk, Lane, LaneShape, SimRequest


@attrs.frozen
class LaneSlice:
    """What one lane computes in a step."""

    chunks: Sequence[Chunk] = ()
    decodes: Sequence[SimRequest] = ()


@attrs.frozen
class RanStep:
    """One step of a run: its time in seconds, what it computed, and tokens or rows of each lane."""

    start_s: float
    seconds: float
    step: SimStep
    lane_prefills: tuple[int, ...]
    lane_decodes: tuple[int, ...]


@attrs.frozen
class Run:
    """All that happened."""

    requests: tuple[SimRequest, ...]
    refused: tuple[Arrival, ...]
    """Requests whose prompt no lane could ever hold."""
    steps: tuple[RanStep, ...]


class Mode(Protocol):
    """How a step is filled."""

    def fill(self, lanes: Sequence[Lane], now: float, budget: int) -> list[LaneSlice]:
        """A slice for each lane, with at most ``budget`` tokens to compute in each."""
        ...

    def measured(self, seconds: float) -> None:
        """How long the step took that ``fill`` filled last."""
        ...


@attrs.define
class PhasePure:
    """Steps of one phase, which a policy chooses.

    Prompts are cut into chunks of ``sizes``. Where the policy caps a prefill step, chunks count as padded to
    them; the budget of tokens that each lane has in all steps counts chunks as they are, like vLLM's.
    """

    policy: PhasePolicy
    sizes: Sequence[int] = ()
    _record: StepRecord = attrs.field(default=StepRecord(Phase.EMPTY), init=False)

    def fill(self, lanes: Sequence[Lane], now: float, budget: int) -> list[LaneSlice]:
        work = _work(lanes, now)
        choice = self.policy.choose(work)
        slices = [LaneSlice() for _ in lanes]
        if choice.phase is Phase.PREFILL:
            slices = _prefill(lanes, budget, choice.prefill_tokens, self.sizes)
        elif choice.phase is Phase.DECODE:
            slices = [LaneSlice(decodes=lane.decode()) for lane in lanes]
        tokens = sum(padded(chunk.tokens, self.sizes) for part in slices for chunk in part.chunks)
        self._record = StepRecord(choice.phase, tokens, sum(len(part.decodes) for part in slices))
        if choice.phase is not Phase.EMPTY:
            self.policy.ran(self._record, work)
        return slices

    def measured(self, seconds: float) -> None:
        self.policy.measured(self._record, seconds)


@attrs.define
class MixedBudget:
    """vLLM's own way: every step decodes all that run, and spends what is left of the budget on prompts.

    A device that is bound to one phase a step cannot do this; it is here for comparison. ``step_tokens``
    lowers the budget, which bounds the decode gaps.
    """

    step_tokens: int | None = None

    def fill(self, lanes: Sequence[Lane], now: float, budget: int) -> list[LaneSlice]:
        most = min(budget, self.step_tokens or budget)
        decodes = [lane.decode() for lane in lanes]
        return [
            LaneSlice(lane.prefill(max(0, most - len(rows)), math.inf), rows)
            for lane, rows in zip(lanes, decodes, strict=True)
        ]

    def measured(self, seconds: float) -> None:
        """Nothing to learn."""


@attrs.frozen
class Setup:
    """What is simulated besides the arrivals."""

    device: Device
    shape: LaneShape
    lanes: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    step_tokens: int = attrs.field(default=2048, validator=attrs.validators.ge(1))
    """Most tokens of a lane in a step (vLLM's ``max_num_batched_tokens``)."""
    jitter: float = attrs.field(default=0.0, validator=(attrs.validators.ge(0), attrs.validators.lt(1)))
    """Each step takes its cost times a random factor from ``1 - jitter`` to ``1 + jitter``."""
    seed: int = 0


def simulate(arrivals: Sequence[Arrival], setup: Setup, mode: Mode) -> Run:
    """Serve all arrivals to their end. A request stays in the lane that ``choose_lane`` names for it.

    Raises ``SimulationError`` if the mode leaves requests waiting for ever.
    """
    lanes = [Lane(setup.shape) for _ in range(setup.lanes)]
    clock = _Clock(setup)
    pending = [SimRequest(f"r{i}", arrival) for i, arrival in enumerate(sorted(arrivals))][::-1]
    requests: list[SimRequest] = []
    refused: list[Arrival] = []
    while pending or any(lane.running or lane.waiting for lane in lanes):
        while pending and pending[-1].arrival.at_s <= clock.now:
            _route(pending.pop(), lanes, requests, refused)
        slices = mode.fill(lanes, clock.now, setup.step_tokens)
        if any(part.chunks or part.decodes for part in slices):
            mode.measured(clock.run(slices))
            for lane, part in zip(lanes, slices, strict=True):
                lane.end_step(part.chunks, part.decodes, clock.now)
        elif pending:
            clock.now = max(clock.now, pending[-1].arrival.at_s)
        elif any(lane.running or lane.waiting for lane in lanes):
            raise SimulationError(
                f"at {clock.now:.3f} s requests wait, and {mode} fills no step; let it choose what could run"
            )
    return Run(tuple(requests), tuple(refused), tuple(clock.steps))


@attrs.define
class _Clock:
    """Runs steps on the device, one after the other."""

    setup: Setup
    now: float = 0.0
    steps: list[RanStep] = attrs.field(factory=list)
    _dice: random.Random = attrs.field(init=False)
    _captured: set[int] = attrs.field(factory=set)
    _prefilled: bool | None = None

    def __attrs_post_init__(self) -> None:
        self._dice = random.Random(self.setup.seed)

    def run(self, slices: Sequence[LaneSlice]) -> float:
        """Move on by the time that the step takes, in seconds, and return it."""
        lengths = tuple(chunk.tokens for part in slices for chunk in part.chunks)
        rows = tuple(len(part.decodes) for part in slices)
        mixed = bool(lengths) and any(rows)
        changes = not mixed and self._prefilled not in (None, bool(lengths))
        step = SimStep(lengths, sum(rows), changes)
        new = self.setup.device.shapes(step) - self._captured
        cost = self.setup.device.seconds(step) + self.setup.device.recapture_s * len(new)
        seconds = cost * self._dice.uniform(1 - self.setup.jitter, 1 + self.setup.jitter)
        tokens = tuple(sum(chunk.tokens for chunk in part.chunks) for part in slices)
        self.steps.append(RanStep(self.now, seconds, step, tokens, rows))
        self.now += seconds
        self._captured |= new
        self._prefilled = None if mixed else bool(lengths)
        return seconds


def _route(
    request: SimRequest, lanes: Sequence[Lane], requests: list[SimRequest], refused: list[Arrival]
) -> None:
    loads = [lane.load for lane in lanes]
    lane = choose_lane(loads, request.arrival.prompt_tokens)
    if not loads[lane].can_ever_hold(request.arrival.prompt_tokens):
        refused.append(request.arrival)
        return
    lanes[lane].waiting.append(request)
    requests.append(request)


def _prefill(lanes: Sequence[Lane], budget: int, cap: int | None, sizes: Sequence[int]) -> list[LaneSlice]:
    """``budget`` for each lane, ``cap`` for all; the lane whose request has waited longest takes first."""
    room = math.inf if cap is None else cap

    def oldest(index: int) -> float:
        first = [*lanes[index].chunking, *list(lanes[index].waiting)[:1]]
        return min((request.arrival.at_s for request in first), default=math.inf)

    slices = [LaneSlice() for _ in lanes]
    for index in sorted(range(len(lanes)), key=oldest):
        chunks = lanes[index].prefill(budget, room, sizes)
        slices[index] = LaneSlice(chunks)
        room -= sum(padded(chunk.tokens, sizes) for chunk in chunks)
    return slices


def _work(lanes: Sequence[Lane], now: float) -> Work:
    decoding = [request for lane in lanes for request in lane.decoding]
    waiting = [request for lane in lanes for request in lane.waiting]
    return Work(
        decodes=len(decoding),
        chunks=sum(len(lane.chunking) for lane in lanes),
        admissible=sum(lane.admissible for lane in lanes),
        gap_s=max((now - request.token_times[-1] for request in decoding), default=0.0),
        waited_s=max((now - request.arrival.at_s for request in waiting), default=0.0),
    )
