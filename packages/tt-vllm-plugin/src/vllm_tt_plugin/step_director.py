"""One step over all lanes: one shared phase, and the rows that requests hold.

One lane is the plain case of this: whoever has one lane and whoever has many go through the same code.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import attrs
from tt_scheduler import (
    BoundedGap,
    Choice,
    Interleave,
    Phase,
    PhasePolicy,
    PrefillFirst,
    RowAccount,
    StepRecord,
    Work,
    padded,
)
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.metrics import LaneCounts, StepMetrics
from vllm_tt_plugin.phased_scheduler import PhasedScheduler, chunk_sizes
from vllm_tt_plugin.plan import moves_requests


@attrs.frozen
class Step:
    """What every lane scheduled under one phase, and the global rows of requests that start."""

    phase: Phase
    outputs: tuple[SchedulerOutput, ...]
    rows: dict[str, int]
    moves_requests: bool
    """Whether any lane starts, ends, preempts or resumes a request."""


@attrs.frozen
class _Running:
    record: StepRecord
    start: float
    made_decodes_wait: bool


@attrs.define
class StepDirector:
    """Chooses each step's phase and keeps the account of rows; lane i owns rows ``[i * n, (i + 1) * n)``."""

    policy: PhasePolicy
    rows_per_lane: int
    clock: Callable[[], float] = time.monotonic
    metrics: StepMetrics = attrs.field(factory=StepMetrics)
    _accounts: list[RowAccount] = attrs.field(factory=list, init=False)
    _running: deque[_Running] = attrs.field(factory=deque, init=False)
    _last_end: float = attrs.field(default=0.0, init=False)
    _first_lane: int = attrs.field(default=0, init=False)
    _served_at: float = attrs.field(default=0.0, init=False)
    """When the running decodes had all got a token, at the latest."""

    def step(self, lanes: Sequence[PhasedScheduler], throttle_prefills: bool = False) -> Step:
        """Schedule one step.

        A prefill that places nothing in any lane becomes a decode of all of them, within the same step.
        """
        now = self.clock()
        work = self._work(lanes, now)
        choice = self.policy.choose(work)
        phase, outputs = self._schedule_or_decode(lanes, choice, work, throttle_prefills)
        falls_back = phase is not choice.phase
        tokens = _tokens(outputs)
        if not tokens:
            phase = Phase.EMPTY
        elif phase is Phase.PREFILL:
            padded_tokens = sum(map(_padded_tokens, outputs, [lane.chunk_sizes for lane in lanes]))
            self._note(StepRecord(phase, prefill_tokens=padded_tokens), work, now)
        else:
            self._note(StepRecord(phase, decode_rows=tokens), work, now)
        moves = True in [moves_requests(output) for output in outputs]
        rows = self._account_rows(outputs) if moves else {}
        preempted = sum([len(output.preempted_req_ids or ()) for output in outputs]) if moves else 0
        over_target = choice.over_target and phase is Phase.PREFILL
        self.metrics.step(phase, len(rows), preempted, falls_back, over_target, work.gap_s)
        if self.metrics.due or phase is Phase.EMPTY:
            self.metrics.write([LaneCounts(*lane.get_request_counts()) for lane in lanes])
        return Step(phase, tuple(outputs), rows, moves)

    def finished(self, step_phase: Phase) -> None:
        """Note that the oldest step under way has ended; policies learn from how long it took."""
        if step_phase is Phase.EMPTY or not self._running:
            return
        step, now = self._running.popleft(), self.clock()
        self.policy.measured(step.record, now - max(step.start, self._last_end))
        self._last_end = now
        if step.record.phase is Phase.DECODE or not step.made_decodes_wait:
            self._served_at = now

    def _schedule_or_decode(
        self, lanes: Sequence[PhasedScheduler], choice: Choice, work: Work, throttle_prefills: bool
    ) -> tuple[Phase, list[SchedulerOutput]]:
        outputs = self._schedule(lanes, choice, throttle_prefills)
        if choice.phase is not Phase.PREFILL or not work.decodes or _tokens(outputs):
            return choice.phase, outputs
        tried, outputs = outputs, self._schedule(lanes, Choice(Phase.DECODE), throttle_prefills)
        for before, output in zip(tried, outputs, strict=True):
            _carry_on(before, output)
        return Phase.DECODE, outputs

    def _schedule(
        self, lanes: Sequence[PhasedScheduler], choice: Choice, throttle_prefills: bool
    ) -> list[SchedulerOutput]:
        """Schedule every lane. Where tokens are limited, the first claim on them goes from lane to lane."""
        budget = choice.prefill_tokens
        if budget is None:
            return [lane.schedule_phase(choice.phase, None, throttle_prefills) for lane in lanes]
        self._first_lane = (self._first_lane + 1) % len(lanes)
        outputs: dict[int, SchedulerOutput] = {}
        for offset in range(len(lanes)):
            index = (self._first_lane + offset) % len(lanes)
            outputs[index] = lanes[index].schedule_phase(choice.phase, budget, throttle_prefills)
            budget -= _padded_tokens(outputs[index], lanes[index].chunk_sizes)
        return [outputs[index] for index in range(len(lanes))]

    def _work(self, lanes: Sequence[PhasedScheduler], now: float) -> Work:
        decodes = chunks = admissible = 0
        waited_s = 0.0
        for lane in lanes:
            work = lane.work()
            decodes += work.decodes
            chunks += work.chunks
            admissible += work.admissible
            waited_s = max(waited_s, work.waited_s)
        if not decodes:
            self._served_at = now
        return Work(decodes, chunks, admissible, now - self._served_at, waited_s)

    def _note(self, record: StepRecord, work: Work, now: float) -> None:
        self.policy.ran(record, work)
        waits = record.phase is Phase.PREFILL and bool(work.decodes)
        self._running.append(_Running(record, now, made_decodes_wait=waits))

    def _account_rows(self, outputs: Sequence[SchedulerOutput]) -> dict[str, int]:
        """Give back the rows of the finished and the preempted, then give rows to those who start."""
        while len(self._accounts) < len(outputs):
            self._accounts.append(RowAccount(self.rows_per_lane))
        taken: dict[str, int] = {}
        for lane, (account, output) in enumerate(zip(self._accounts, outputs, strict=True)):
            for request_id in output.finished_req_ids:
                account.release(request_id)
            for request_id in output.preempted_req_ids or ():
                account.release(request_id)
            cached = output.scheduled_cached_reqs
            starting = [data.req_id for data in output.scheduled_new_reqs]
            if cached.resumed_req_ids:
                starting += [name for name in cached.req_ids if name in cached.resumed_req_ids]
            for request_id in starting:
                taken[request_id] = lane * self.rows_per_lane + account.take(request_id)
        return taken


def _tokens(outputs: Sequence[SchedulerOutput]) -> int:
    return sum([output.total_num_scheduled_tokens for output in outputs])


def _padded_tokens(output: SchedulerOutput, sizes: Sequence[int]) -> int:
    """The tokens that a device computes for the chunks of a prefill."""
    return sum(padded(tokens, sizes) for tokens in output.num_scheduled_tokens.values())


def _carry_on(tried: SchedulerOutput, output: SchedulerOutput) -> None:
    """Keep in ``output`` what a call that scheduled nothing had told: vLLM tells it only once."""
    output.finished_req_ids = tried.finished_req_ids | output.finished_req_ids
    output.preempted_req_ids = (tried.preempted_req_ids or set()) | (output.preempted_req_ids or set())
    output.free_encoder_mm_hashes = [*tried.free_encoder_mm_hashes, *output.free_encoder_mm_hashes]


def phase_policy(config: TTConfig, can_resume_prefill: bool, most_tokens: int, lanes: int = 1) -> PhasePolicy:
    """The policy that ``config`` names; without a name, interleave where a prefill can be cut into chunks and
    resumed, else prefill first. ``most_tokens`` is the largest chunk of a lane."""
    name = config.phase_policy
    if name is None:
        interleaves = can_resume_prefill and config.decode_interleave_enabled
        name = "interleave" if interleaves else "prefill_first"
    if name == "interleave":
        return Interleave(config.decode_interleave_prefill_steps, config.decode_interleave_decode_steps)
    if name == "bounded_gap":
        return BoundedGap(config.target_itl_ms / 1e3, chunk_sizes(most_tokens), lanes=lanes)
    return PrefillFirst()
