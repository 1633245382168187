"""What a run was like for those who waited for tokens, and for the device."""

import math
from collections.abc import Sequence
from itertools import pairwise

import attrs

from tt_scheduler.sim.engine import Run
from tt_scheduler.sim.lane import SimRequest


@attrs.frozen(kw_only=True)
class Summary:
    """Seconds, tokens and counts of one run. 0 stands for what no request had."""

    requests: int
    refused: int
    ttft_p50_s: float
    """Time to first token, from arrival."""
    ttft_p95_s: float
    gap_p50_s: float
    """Between two tokens of one request."""
    gap_p99_s: float
    worst_gap_s: float
    """The longest gap of a request that kept its row meanwhile."""
    worst_preempted_gap_s: float
    """The longest gap during which a request was preempted."""
    tokens_per_s: float
    """Generated tokens over the time until the last of them."""
    makespan_s: float
    busy_s: float
    """Time that steps took."""
    prefill_steps: int
    """Mixed steps count here and as decode steps."""
    decode_steps: int
    preemptions: int


def summarize(run: Run) -> Summary:
    """The figures of a run."""
    ttft = [request.token_times[0] - request.arrival.at_s for request in run.requests]
    gaps = [gap for request in run.requests for gap in _gaps(request, preempted=False)]
    broken = [gap for request in run.requests for gap in _gaps(request, preempted=True)]
    end = max((request.token_times[-1] for request in run.requests), default=0.0)
    tokens = sum(request.generated for request in run.requests)
    return Summary(
        requests=len(run.requests),
        refused=len(run.refused),
        ttft_p50_s=percentile(ttft, 50),
        ttft_p95_s=percentile(ttft, 95),
        gap_p50_s=percentile(gaps, 50),
        gap_p99_s=percentile(gaps, 99),
        worst_gap_s=max(gaps, default=0.0),
        worst_preempted_gap_s=max(broken, default=0.0),
        tokens_per_s=tokens / end if end else 0.0,
        makespan_s=end,
        busy_s=sum(ran.seconds for ran in run.steps),
        prefill_steps=sum(bool(ran.step.prefills) for ran in run.steps),
        decode_steps=sum(bool(ran.step.decode_rows) for ran in run.steps),
        preemptions=sum(len(request.preempted_after) for request in run.requests),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` of the values do not exceed; 0 without any."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def _gaps(request: SimRequest, preempted: bool) -> list[float]:
    """Gaps between tokens during which the request was preempted, or those during which it was not."""
    broken = set(request.preempted_after)
    return [
        after - before
        for out, (before, after) in enumerate(pairwise(request.token_times), 1)
        if (out in broken) is preempted
    ]


ROWS: tuple[tuple[str, str, str], ...] = (
    ("time to first token, median", "ttft_p50_s", ".3f"),
    ("time to first token, 95 %", "ttft_p95_s", ".3f"),
    ("gap between tokens, median", "gap_p50_s", ".4f"),
    ("gap between tokens, 99 %", "gap_p99_s", ".4f"),
    ("worst gap", "worst_gap_s", ".3f"),
    ("worst gap over a preemption", "worst_preempted_gap_s", ".3f"),
    ("tokens per second", "tokens_per_s", ".1f"),
    ("until the last token", "makespan_s", ".1f"),
    ("prefill steps", "prefill_steps", "d"),
    ("decode steps", "decode_steps", "d"),
    ("preemptions", "preemptions", "d"),
    ("refused", "refused", "d"),
)
"""What a table shows of a summary, times in seconds: words, field, format."""


def table(summaries: dict[str, Summary]) -> str:
    """The summaries side by side, one column each, times in seconds."""
    lines = [["", *summaries]]
    for words, field, form in ROWS:
        lines.append([words, *(format(getattr(summary, field), form) for summary in summaries.values())])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(map(str.rjust, line[1:], widths[1:]))]) for line in lines
    )
