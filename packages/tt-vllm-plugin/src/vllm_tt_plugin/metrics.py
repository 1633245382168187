"""What scheduler and sampler chose, as Prometheus metrics on the server's ``/metrics``.

Both live in the engine's process, and the front ends answer ``/metrics``: what crosses is files of
Prometheus's multiprocess mode, for one front end as for many. Metrics here belong to no registry, so that one
process may hold several engines; the files carry them all the same.
"""

import time
from collections import Counter as Tally
from collections.abc import Callable, Sequence

import attrs
from prometheus_client import CollectorRegistry, Counter, Gauge
from tt_sampling import Phase as SamplingPhase
from tt_sampling import Route
from tt_scheduler import Phase

FLUSH_S = 0.5
"""A step counts in plain integers; this often they are written, which takes a lock and a mapped file."""


@attrs.frozen
class LaneCounts:
    """Requests of one lane."""

    running: int
    waiting: int


class StepMetrics:
    """Counts steps and writes them out now and then."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, registry: CollectorRegistry | None = None
    ) -> None:
        self._clock = clock
        self._written_at = clock()
        self._steps: Tally[Phase] = Tally()
        self._fallbacks = self._over_target = self._admitted = self._preempted = 0
        self._worst_gap_s = 0.0
        self._steps_total = Counter("tt:steps", "Steps by phase.", ["phase"], registry=registry)
        self._fallbacks_total = Counter(
            "tt:prefill_fallbacks", "Prefill steps that placed nothing and became decodes.", registry=registry
        )
        self._over_target_total = Counter(
            "tt:over_target_steps",
            "Prefill steps after which no decode could keep the target gap, as the policy knew.",
            registry=registry,
        )
        self._admitted_total = Counter(
            "tt:admissions", "Requests that got a row: arrivals and resumed ones.", registry=registry
        )
        self._preempted_total = Counter("tt:preemptions", "Requests that lost their row.", registry=registry)
        self._gap = Gauge(
            "tt:worst_decode_gap_seconds",
            "Longest time that running requests waited for a decode step.",
            multiprocess_mode="max",
            registry=registry,
        )
        self._running = _lane_gauge("tt:lane_running", "Requests that hold a row, by lane.", registry)
        self._waiting = _lane_gauge("tt:lane_waiting", "Requests that wait for a row, by lane.", registry)

    def step(
        self,
        phase: Phase,
        admitted: int = 0,
        preempted: int = 0,
        fell_back: bool = False,
        over_target: bool = False,
        gap_s: float = 0.0,
    ) -> None:
        """Count one step. ``gap_s``: how long decodes had waited when it was chosen."""
        self._steps[phase] += 1
        self._admitted += admitted
        self._preempted += preempted
        self._fallbacks += fell_back
        self._over_target += over_target
        self._worst_gap_s = max(self._worst_gap_s, gap_s)

    @property
    def due(self) -> bool:
        """Whether ``write`` has something to do."""
        return self._clock() - self._written_at >= FLUSH_S

    def write(self, lanes: Sequence[LaneCounts]) -> None:
        """Write out what was counted."""
        self._written_at = self._clock()
        for phase, count in self._steps.items():
            self._steps_total.labels(phase.value).inc(count)
        self._fallbacks_total.inc(self._fallbacks)
        self._over_target_total.inc(self._over_target)
        self._admitted_total.inc(self._admitted)
        self._preempted_total.inc(self._preempted)
        self._gap.set(self._worst_gap_s)
        for index, lane in enumerate(lanes):
            self._running.labels(str(index)).set(lane.running)
            self._waiting.labels(str(index)).set(lane.waiting)
        self._steps.clear()
        self._fallbacks = self._over_target = self._admitted = self._preempted = 0


class RouteMetrics:
    """Counts where steps were sampled, and what kept them off the device."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, registry: CollectorRegistry | None = None
    ) -> None:
        self._clock = clock
        self._written_at = clock()
        self._routes: Tally[tuple[SamplingPhase, Route]] = Tally()
        self._steps_total = Counter(
            "tt:sampled_steps", "Steps by where they were sampled.", ["phase", "where"], registry=registry
        )
        self._reasons_total = Counter(
            "tt:host_sampling_reasons",
            "Steps sampled on the host, by what kept them off the device: once for each reason of a step.",
            ["reason"],
            registry=registry,
        )

    def step(self, phase: SamplingPhase, route: Route) -> None:
        """Count one step, and write now and then."""
        self._routes[phase, route] += 1
        if self._clock() - self._written_at >= FLUSH_S:
            self.write()

    def write(self) -> None:
        """Write out what was counted."""
        self._written_at = self._clock()
        for (phase, route), count in self._routes.items():
            self._steps_total.labels(phase.value, "device" if route.on_device else "host").inc(count)
            for reason in {reason for _, reason in route.reasons}:
                self._reasons_total.labels(reason.label).inc(count)
        self._routes.clear()


def _lane_gauge(name: str, meaning: str, registry: CollectorRegistry | None) -> Gauge:
    return Gauge(name, meaning, ["lane"], multiprocess_mode="mostrecent", registry=registry)
