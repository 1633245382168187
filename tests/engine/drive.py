"""Drives an engine step by step: arrivals, aborts and cache resets between any two steps."""

from collections.abc import Sequence
from typing import Any

import attrs
from vllm import LLM, SamplingParams


@attrs.define
class Driver:
    """Requests by the names a test gives them, and the tokens that they have so far."""

    engine: LLM
    tokens: dict[str, list[int]] = attrs.field(factory=dict)
    finished: dict[str, str | None] = attrs.field(factory=dict)
    """Finish reason of each request that is over."""

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        images: Sequence[Any] = (),
    ) -> str:
        """Returns the name that the engine core uses."""
        self.tokens[name] = []
        prompt_of: Any = {"prompt_token_ids": list(prompt)}
        if images:
            prompt_of["multi_modal_data"] = {"image": list(images)}
        return self.engine.llm_engine.add_request(name, prompt_of, params, priority=priority)

    def abort(self, name: str) -> None:
        self.engine.llm_engine.abort_request([name])
        self.finished[name] = "abort"

    def reset_running(self) -> None:
        """Preempt all that run, between two steps."""
        assert self.engine.llm_engine.reset_prefix_cache(reset_running_requests=True)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            outputs: Any = self.engine.llm_engine.step()
            for output in outputs:
                completion = output.outputs[0]
                self.tokens[output.request_id] = list(completion.token_ids)
                if output.finished:
                    self.finished[output.request_id] = completion.finish_reason

    def drain(self, limit: int = 1_000) -> None:
        """Step until nothing is left, and once more, so that the last rows are given back."""
        for _ in range(limit):
            if not self.engine.llm_engine.has_unfinished_requests():
                self.step()
                return
            self.step()
        raise AssertionError(
            f"after {limit} steps these are not finished: {self.tokens.keys() - self.finished.keys()}"
        )
