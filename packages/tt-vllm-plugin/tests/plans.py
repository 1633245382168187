"""Writes step plans by hand, in either of vLLM's wire forms, and keeps what must be true of each request."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from tt_scheduler import Phase, RowAccount
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm_tt_plugin.plan import StepPlan

BLOCK = 4


@attrs.define(eq=False)
class Told:
    """What the scheduler's side knows of one request."""

    name: str
    prompt: list[int]
    sampling: SamplingParams
    images: Sequence[tuple[int, int, int]] = ()
    """Start, end and value of each."""
    output: list[int] = attrs.field(factory=list)
    blocks: tuple[list[int], ...] = ()
    """By KV cache group."""
    computed: int = 0
    row: int | None = None
    seen: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def delta(self) -> int:
        """What its images come to."""
        return sum(value for _, _, value in self.images)

    @property
    def missing(self) -> int:
        """Tokens to prefill; 1 for a request that decodes."""
        return len(self.tokens) - self.computed


@attrs.define
class Planner:
    """Rows, blocks and wire forms, with no policy of its own."""

    capacity: int
    num_blocks: int
    v2: bool = False
    groups: int = 1
    """KV cache groups that share the blocks. Nothing falls out of a window here."""
    rows: RowAccount = attrs.field(init=False)
    free_blocks: list[int] = attrs.field(init=False)
    finished: set[str] = attrs.field(factory=set, init=False)
    preempted: set[str] = attrs.field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        self.rows = RowAccount(self.capacity)
        # Block 0 is vLLM's null block. The highest goes out first, so that rows and blocks differ.
        self.free_blocks = list(range(1, self.num_blocks))

    def finish(self, request: Told) -> None:
        self.finished.add(request.name)
        self._release(request)

    def preempt(self, request: Told) -> None:
        self.preempted.add(request.name)
        self._release(request)
        request.computed = 0

    def _release(self, request: Told) -> None:
        for blocks in request.blocks:
            self.free_blocks += blocks
        request.blocks = ()
        self.rows.release(request.name)
        request.row = None

    def step(self, phase: Phase, work: Sequence[tuple[Told, int]], hit: int = 0) -> StepPlan:
        """A plan that computes so many tokens of each request; whoever has no row starts at `hit`."""
        new: list[NewRequestData] = []
        cached = CachedRequestData.make_empty()
        rows: dict[str, int] = {}
        for request, count in work:
            starts = request.row is None
            if starts:
                request.computed = hit
                request.row = rows[request.name] = self.rows.take(request.name)
            end = request.computed + count
            fresh = self._allocate(request, -(-end // BLOCK))
            if starts and (self.v2 or not request.seen):
                new.append(self._as_new(request))
            else:
                if starts:
                    cached.resumed_req_ids.add(request.name)
                cached.req_ids.append(request.name)
                cached.new_block_ids.append(fresh if fresh[0] or starts else None)
                cached.num_computed_tokens.append(request.computed)
                cached.num_output_tokens.append(len(request.output))
            request.seen = True
        plan = StepPlan.of(self._output(new, cached, work), phase, rows)
        for request, count in work:
            request.computed += count
        return plan

    def _allocate(self, request: Told, wanted: int) -> tuple[list[int], ...]:
        request.blocks = request.blocks or tuple([] for _ in range(self.groups))
        fresh = tuple([self.free_blocks.pop() for _ in range(wanted - len(held))] for held in request.blocks)
        for held, new in zip(request.blocks, fresh, strict=True):
            held += new
        return fresh

    def _as_new(self, request: Told) -> NewRequestData:
        return NewRequestData(
            req_id=request.name,
            prompt_token_ids=request.prompt,
            mm_features=[image_feature(*image) for image in request.images],
            sampling_params=request.sampling,
            pooling_params=None,
            block_ids=tuple(list(blocks) for blocks in request.blocks),
            num_computed_tokens=request.computed,
            lora_request=None,
            prefill_token_ids=request.tokens if self.v2 else None,
        )

    def _output(
        self, new: list[NewRequestData], cached: CachedRequestData, work: Sequence[tuple[Told, int]]
    ) -> SchedulerOutput:
        finished, self.finished = self.finished, set()
        preempted, self.preempted = self.preempted, set()
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={request.name: count for request, count in work},
            total_num_scheduled_tokens=sum(count for _, count in work),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
            preempted_req_ids=preempted,
        )


def image_feature(start: int, end: int, value: int, **changes: Any) -> MultiModalFeatureSpec:
    """What vLLM's processing gives for an image: here its pixels are one number."""
    field = MultiModalSharedField(batch_size=1)
    data = {
        "pixel_values": MultiModalFieldElem(torch.tensor([value]), field),
        "image_grid_thw": MultiModalFieldElem(torch.tensor([1, 2, 2]), field),
    }
    place = PlaceholderRange(start, end - start)
    plain = MultiModalFeatureSpec(MultiModalKwargsItem(data), "image", str(value), place)
    return dataclasses.replace(plain, **changes)


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=1000, **options)
