"""What each phase policy costs and gives, simulated: worst gap, throughput, time to first token.

Every preset serves every trace under prefill first, interleaving, a bounded gap with a roomy and with a tight
target, and mixed steps (vLLM's own token budget, which these devices cannot run). Throughput is relative to
prefill first, the median time to first token to interleaving 2:1. A bounded gap aims to keep its target on
every trace and, with the roomy one, to cost at most 1 % of throughput and no time to first token. The note
says what the phase changes alone cost that the target forces on prefill first: no policy can save those.

`strange` is the roomy target on steps that stray by 10 %, with a policy that starts from its default costs.
"""

import attrs
from _form import Figure, main
from tt_scheduler import BoundedGap
from tt_scheduler.sim import (
    PRESETS,
    TRACES,
    Arrival,
    PhasePure,
    Run,
    Setup,
    Summary,
    mode_named,
    simulate,
    summarize,
)

TARGETS_S = {"t3k-70b": (3.0, 0.9), "galaxy-70b": (1.0, 0.3), "n150-8b": (2.0, 1.0)}
"""The roomy and the tight target of each preset."""
PUBLISHED = {"interleave-2-1": (0.90, 0.987, 1.010), "interleave-1-1": (0.52, 0.975, 1.076)}
"""A T3K's worst gap, and throughput and time to first token relative to prefill first's."""


@attrs.frozen
class Served:
    """One preset under one trace: the runs and figures by name of policy."""

    setup: Setup
    runs: dict[str, Run]
    figures: dict[str, Summary]


def serve(setup: Setup, arrivals: list[Arrival], targets: tuple[float, float]) -> Served:
    modes = {
        "prefill-first": mode_named("prefill-first", setup),
        "interleave-2-1": mode_named("interleave:2:1", setup),
        "interleave-1-1": mode_named("interleave:1:1", setup),
        "bounded-roomy": mode_named(f"bounded-gap:{targets[0]}", setup),
        "bounded-tight": mode_named(f"bounded-gap:{targets[1]}", setup),
        "mixed": mode_named("mixed", setup),
    }
    runs = {name: simulate(arrivals, setup, mode) for name, mode in modes.items()}
    sizes = setup.device.padded_to
    strange = PhasePure(BoundedGap(targets[0], sizes, lanes=setup.lanes), sizes)
    runs["strange"] = simulate(arrivals, attrs.evolve(setup, jitter=0.1), strange)
    return Served(setup, runs, {name: summarize(run) for name, run in runs.items()})


def judged(served: Served, prefix: str, targets: tuple[float, float]) -> list[Figure]:
    """Three figures for each policy; aims for the bounded gaps."""
    first, two_one = served.figures["prefill-first"], served.figures["interleave-2-1"]
    target_s = {"bounded-roomy": targets[0], "bounded-tight": targets[1]}
    found = []
    for name, figure in served.figures.items():
        bounded, roomy = target_s.get(name), name == "bounded-roomy"
        speed = figure.tokens_per_s / first.tokens_per_s
        wait = figure.ttft_p50_s / two_one.ttft_p50_s
        forced = f"forced changes cost {forced_share(served, targets[0]):.1%}" if roomy else ""
        found += [
            Figure(f"{prefix}.{name}.worst_gap_s", figure.worst_gap_s, bounded and bounded + 1e-9),
            Figure(f"{prefix}.{name}.throughput_ratio", speed, at_least=0.99 if roomy else None, note=forced),
            Figure(f"{prefix}.{name}.ttft_p50_ratio", wait, at_most=1.0 if roomy else None),
        ]
    return found


def forced_share(served: Served, target_s: float) -> float:
    """The share of prefill first's time that the least number of phase changes under the target would add.

    It prefills for some time while requests wait for their next token. Each stretch of that between two
    decodes lasts at most the target less a decode, and each further stretch brings two changes.
    """
    run, device = served.runs["prefill-first"], served.setup.device
    lives = [(request.token_times[0], request.token_times[-1]) for request in run.requests]
    stretches = [0.0]
    for ran in run.steps:
        if ran.step.decode_rows:
            stretches.append(0.0)
        elif any(first <= ran.start_s < last for first, last in lives):
            stretches[-1] += ran.seconds
    room_s = target_s - device.decode_fixed_s - device.switch_s
    changes = sum(2 * max(0.0, stretch / room_s - 1) for stretch in stretches)
    return changes * device.switch_s / served.figures["prefill-first"].makespan_s


def calibration(served: Served) -> list[Figure]:
    """How near the saturating trace on the T3K preset comes to what was published."""
    waits = {name: mean_wait_s(run) for name, run in served.runs.items()}
    first = served.figures["prefill-first"]
    found = [Figure("calibration.prefill-first.worst_gap_s", first.worst_gap_s, note="published 11.16")]
    for name, (gap, speed, wait) in PUBLISHED.items():
        figure = served.figures[name]
        prefix = f"calibration.{name}"
        found += [
            Figure(f"{prefix}.worst_gap_s", figure.worst_gap_s, note=f"published {gap:.2f}"),
            Figure(
                f"{prefix}.throughput_ratio",
                figure.tokens_per_s / first.tokens_per_s,
                note=f"published {speed:.3f}",
            ),
            Figure(
                f"{prefix}.ttft_mean_ratio",
                waits[name] / waits["prefill-first"],
                note=f"published {wait:.3f}",
            ),
        ]
    return found


def mean_wait_s(run: Run) -> float:
    waits = [request.token_times[0] - request.arrival.at_s for request in run.requests]
    return sum(waits) / len(waits)


def measure(quick: bool) -> list[Figure]:
    figures = []
    for preset, targets in TARGETS_S.items():
        for trace, make in TRACES.items():
            arrivals = make()[: 40 if quick else None]
            served = serve(PRESETS[preset], arrivals, targets)
            figures += judged(served, f"{preset}.{trace}", targets)
            if (preset, trace) == ("t3k-70b", "saturating") and not quick:
                figures += calibration(served)
    return figures


if __name__ == "__main__":
    main(__file__, __doc__, measure)
