"""Whether a step is sampled on the device, and with what."""

from collections.abc import Sequence

import attrs
from tt_registry import Capabilities
from tt_sampling import (
    DeviceCapabilities,
    DeviceLogprobs,
    Phase,
    Route,
    RowParams,
    SampleMode,
    TTSamplingParams,
    pack,
    route_rows,
    row_reasons,
)

from vllm_tt_plugin.adapter import DeviceSampling
from vllm_tt_plugin.batch import histories
from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.requests import RequestState, RequestTable


@attrs.define
class DeviceSampler:
    """Routes steps, and packs the parameters of those that the device samples."""

    device: DeviceCapabilities
    mode: SampleMode
    always_compat: bool
    custom_processors: bool = False
    """Whether the server was started with logits processors of the user's, which see every request."""
    _packed: TTSamplingParams | None = attrs.field(default=None, init=False)
    _packed_for: tuple[int, int] = attrs.field(default=(-1, -1), init=False)
    _penalised: bool = attrs.field(default=False, init=False)

    @classmethod
    def of(
        cls, config: TTConfig, capabilities: Capabilities, custom_processors: bool = False
    ) -> "DeviceSampler":
        """Logprobs and grammars go to the host: no adapter declares which of them it returns or takes. Every
        adapter takes seeds, which stand in the record that it receives."""
        device = DeviceCapabilities(
            can_sample=capabilities.supports_sample_on_device,
            max_top_k=capabilities.max_device_top_k,
            penalties=capabilities.supports_device_penalties,
            seeds=True,
            logprobs=DeviceLogprobs.NONE,
        )
        mode = SampleMode(config.sample_on_device_mode or "host")
        return cls(device, mode, config.always_compat_sampling, custom_processors)

    @property
    def may_sample(self) -> bool:
        """Whether any step can be sampled on the device."""
        return self.device.can_sample and self.mode is not SampleMode.HOST and not self.always_compat

    def route(self, states: Sequence[RequestState], phase: Phase) -> Route:
        """Where a step that samples ``states`` is sampled, and why not on the device."""
        for state in states:
            if phase.value not in state.blockers:
                needs = (
                    attrs.evolve(state.needs, stateful_processors=True)
                    if self.custom_processors
                    else state.needs
                )
                state.blockers[phase.value] = row_reasons(needs, self.device, phase)
        rows = ((state.request_id, state.blockers[phase.value]) for state in states)
        return route_rows(rows, self.device, self.mode, phase, self.always_compat)

    def for_prefill(self, states: Sequence[RequestState | None]) -> DeviceSampling:
        """Parameters of N rows; None for a chunk that is not its prompt's last."""
        return DeviceSampling(pack(_params(states), len(states)))

    def for_decode(self, requests: RequestTable, rows: int) -> DeviceSampling:
        """Parameters of ``rows`` rows, kept while the same requests hold them."""
        if self._packed is None or self._packed_for != (requests.changes, rows):
            self._packed = pack(_params(requests.by_row), rows)
            self._packed_for = (requests.changes, rows)
            self._penalised = any(s is not None and s.needs.params.penalised for s in requests.by_row)
        if not self._penalised:
            return DeviceSampling(self._packed)
        prompts, outputs = histories(requests.by_row, rows)
        return DeviceSampling(self._packed, prompts, outputs)


def _params(states: Sequence[RequestState | None]) -> list[RowParams | None]:
    return [None if state is None else state.needs.params for state in states]
