"""vLLM's logits processors, which keep state by row, on a batch whose rows are stable and may be sparse."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import torch
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    BatchUpdate,
    LogitsProcessor,
    LogitsProcessors,
    build_logitsprocs,
)

from vllm_tt_plugin.requests import RequestState, RequestTable

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_CPU = torch.device("cpu")


class RowProcessors:
    """All processors of a server, kept in step with who holds which row."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        custom = vllm_config.model_config.logits_processors or ()
        self._config = vllm_config
        self.by_row = build_logitsprocs(vllm_config, _CPU, False, False, custom)
        self._custom = [p for p in self.by_row.all if type(p) not in BUILTIN_LOGITS_PROCESSORS]
        self._followed: list[RequestState | None] = []
        self._followed_changes = 0

    @property
    def any_custom(self) -> bool:
        """Whether the user brought processors of their own."""
        return bool(self._custom)

    def follow(self, requests: RequestTable) -> None:
        """Tell every processor who left and who came since the last call, and that tokens were added."""
        update = None
        if requests.changes != self._followed_changes:
            update = difference(self._followed, requests.by_row)
            self._followed, self._followed_changes = requests.by_row, requests.changes
        for processor in self.by_row.all:
            processor.update_state(update)

    def for_some(self, states: Sequence[RequestState], requests: RequestTable) -> LogitsProcessors:
        """Processors for logits ``[N, V]`` of ``states``: vLLM's own afresh, the user's through a window."""
        processors: list[LogitsProcessor] = []
        if any(s.sampling.min_p or s.sampling.logit_bias or s.sampling.min_tokens for s in states):
            added = [(index, s.sampling, s.prompt, s.output) for index, s in enumerate(states)]
            update = BatchUpdate(batch_size=len(states), removed=(), added=added, moved=())
            for builtin in BUILTIN_LOGITS_PROCESSORS:
                processor = builtin(self._config, _CPU, False)
                processor.update_state(update)
                processors.append(processor)
        if self._custom:
            held = torch.tensor([state.row for state in states])
            processors += [_RowWindow(custom, held, len(requests.by_row)) for custom in self._custom]
        return LogitsProcessors(processors)


def difference(before: Sequence[RequestState | None], now: Sequence[RequestState | None]) -> BatchUpdate:
    """What vLLM's processors must hear when the rows' holders were ``before`` and are ``now``."""
    removed, added = [], []
    for row in range(max(len(before), len(now))):
        left = before[row] if row < len(before) else None
        came = now[row] if row < len(now) else None
        if left is came:
            continue
        if came is None:
            removed.append(row)
        else:
            added.append((row, came.sampling, came.prompt, came.output))
    # A row that changed hands is only added: vLLM's processors would forget its new owner again if it were
    # removed as well. Removed rows come highest first, as vLLM hands them over.
    return BatchUpdate(batch_size=len(now), removed=removed[::-1], added=added, moved=())


@attrs.define(slots=False)
class _RowWindow(LogitsProcessor):
    """A processor that speaks of rows, applied to logits ``[N, V]`` of some of them."""

    _inner: LogitsProcessor
    _held: torch.Tensor
    _rows: int

    def is_argmax_invariant(self) -> bool:
        return self._inner.is_argmax_invariant()

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """The inner processor is kept up to date by ``RowProcessors``."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        everyone = logits.new_zeros((self._rows, logits.shape[1]))
        everyone[self._held] = logits
        return self._inner.apply(everyone)[self._held]
