"""Whether a step is sampled on the device, and with what."""

import logging
from collections.abc import Sequence

import attrs
from tt_registry import Capabilities
from tt_sampling import (
    DeviceCapabilities,
    DeviceLogprobs,
    Phase,
    Reason,
    Route,
    RowParams,
    SampleMode,
    pack,
    route_rows,
    row_reasons,
)

from vllm_tt_plugin.batch import history
from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.metrics import RouteMetrics
from vllm_tt_plugin.requests import RequestState, RequestTable
from vllm_tt_plugin.step_data import DeviceSampling

logger = logging.getLogger("vllm.tt_plugin")
RAW = "raw_logprobs"
"""The `logprobs_mode` of vLLM in which logprobs are the log-softmax of the model's own logits."""


@attrs.define
class DeviceSampler:
    """Routes steps, counts the routes, and packs the parameters of those that the device samples."""

    device: DeviceCapabilities
    mode: SampleMode
    always_compat: bool
    custom_processors: bool = False
    """Whether the server was started with logits processors of the user's, which see every request."""
    metrics: RouteMetrics = attrs.field(factory=RouteMetrics)
    _routes: dict[Phase, Route] = attrs.field(factory=dict, init=False)
    """The last route of each phase."""
    _held: list[RequestState] = attrs.field(factory=list, init=False)
    """Those that decode and may not end yet (`min_tokens`)."""
    _packed: DeviceSampling | None = attrs.field(default=None, init=False)
    """What the last decode was given, but for the tokens generated since."""
    _packed_for: tuple[int, int] = attrs.field(default=(-1, -1), init=False)

    @classmethod
    def of(
        cls,
        config: TTConfig,
        capabilities: Capabilities,
        custom_processors: bool = False,
        logprobs_mode: str = RAW,
    ) -> "DeviceSampler":
        """Grammars go to the host, and so do logprobs of another kind than raw ones, which are what devices
        return."""
        logprobs = capabilities.device_logprobs if logprobs_mode == RAW else DeviceLogprobs.NONE
        device = DeviceCapabilities(
            can_sample=capabilities.supports_sample_on_device,
            max_top_k=capabilities.max_device_top_k,
            penalties=capabilities.supports_device_penalties,
            seeds=capabilities.supports_device_seeds,
            logprobs=DeviceLogprobs(logprobs),
        )
        mode = SampleMode(config.sample_on_device_mode or "host")
        return cls(device, mode, config.always_compat_sampling, custom_processors)

    @property
    def may_sample(self) -> bool:
        """Whether any step can be sampled on the device."""
        return self.device.can_sample and self.mode is not SampleMode.HOST and not self.always_compat

    def samples_prefill(self, completed: Sequence[RequestState]) -> bool:
        """Whether the device samples a prefill that completes the prompts of ``completed``."""
        return self._take(self.route(completed, Phase.PREFILL), Phase.PREFILL, len(completed))

    def samples_decode(self, states: Sequence[RequestState], changed: bool) -> bool:
        """Whether the device samples a decode of ``states``. ``changed``: they, or their rows, are not those
        of the last decode."""
        route = self._routes.get(Phase.DECODE)
        if route is None or changed or not all(map(_is_held, self._held)):
            self._held = [state for state in states if _is_held(state)]
            return self._take(self.route(states, Phase.DECODE), Phase.DECODE, len(states))
        self.metrics.step(Phase.DECODE, route)
        return route.on_device

    def route(self, states: Sequence[RequestState], phase: Phase) -> Route:
        """Where a step that samples ``states`` is sampled, and why not on the device."""
        rows = ((state.request_id, self._blockers(state, phase)) for state in states)
        return route_rows(rows, self.device, self.mode, phase, self.always_compat)

    def _blockers(self, state: RequestState, phase: Phase) -> tuple[Reason, ...]:
        """Worked out once for each phase, and again when `min_tokens` is reached."""
        held = _is_held(state)
        key = f"{phase.value} held" if held else phase.value
        if key not in state.blockers:
            custom = state.needs.stateful_processors or self.custom_processors
            needs = attrs.evolve(state.needs, stateful_processors=custom, min_tokens=held)
            state.blockers[key] = row_reasons(needs, self.device, phase)
        return state.blockers[key]

    def _take(self, route: Route, phase: Phase, rows: int) -> bool:
        if rows:
            self.metrics.step(phase, route)
        if route != self._routes.get(phase):
            self._routes[phase] = route
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%d rows of a %s are sampled on the %s", rows, phase.value, _described(route))
        return route.on_device

    def for_prefill(self, states: Sequence[RequestState | None]) -> DeviceSampling:
        """Parameters of N rows; None for a chunk that is not its prompt's last."""
        return DeviceSampling(pack(_params(states), len(states)))

    def for_decode(self, requests: RequestTable, rows: int) -> DeviceSampling:
        """Parameters of ``rows`` rows, kept while the same requests hold them."""
        if self._packed is None or self._packed_for != (requests.changes, rows):
            params = pack(_params(requests.by_row), rows)
            penalised = any(s is not None and s.needs.params.penalised for s in requests.by_row)
            prompts = [[] if state is None else state.prompt for state in requests.by_row]
            self._packed = DeviceSampling(params, history(prompts, rows) if penalised else None)
            self._packed_for = (requests.changes, rows)
        if self._packed.prompt_tokens is None:
            return self._packed
        outputs = [[] if state is None else state.output for state in requests.by_row]
        return attrs.evolve(self._packed, output_tokens=history(outputs, rows))


def _params(states: Sequence[RequestState | None]) -> list[RowParams | None]:
    return [None if state is None else state.needs.params for state in states]


def _is_held(state: RequestState) -> bool:
    """Whether a request may not end yet."""
    return len(state.output) < state.sampling.min_tokens


def _described(route: Route) -> str:
    if route.on_device:
        return "device"
    return "host: " + "; ".join(f"{name or 'all'}: {reason.value}" for name, reason in route.reasons)
