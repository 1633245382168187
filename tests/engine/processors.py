"""Logits processors such as users give on the command line."""

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor


class CountUp(LogitsProcessor):
    """Forces token ``start + n`` as the n-th token of a request that says ``{"count_from": start}``.

    It keeps, by row, the very list of generated tokens that vLLM hands over, and fails where that list is not
    the row's own or its rows are not kept in step.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[int, list[int]]] = {}

    @classmethod
    def validate_params(cls, params: Any) -> None:
        start = (params.extra_args or {}).get("count_from")
        if start is not None and not isinstance(start, int):
            raise ValueError(f"count_from is {start!r}, not a token")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _prompt, output in batch_update.added:
            self._rows.pop(row, None)
            if params.extra_args and "count_from" in params.extra_args:
                self._rows[row] = (params.extra_args["count_from"], output)
        assert not batch_update.moved, "rows stay where they are"

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (start, output) in self._rows.items():
            assert output == list(range(start, start + len(output))), f"row {row} holds {output}"
            forced = start + len(output)
            kept = logits[row, forced].item()
            logits[row] = float("-inf")
            logits[row, forced] = kept
        return logits
