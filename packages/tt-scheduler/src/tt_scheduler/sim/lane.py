"""One lane: its queues, rows and blocks, and what of its work goes into a step."""

from collections import deque
from collections.abc import Sequence

import attrs

from tt_scheduler.chunks import cut, padded
from tt_scheduler.cursor import Admission
from tt_scheduler.lanes import LaneLoad
from tt_scheduler.rows import RowAccount
from tt_scheduler.sim.arrivals import Arrival


@attrs.frozen
class LaneShape:
    """What each lane can hold."""

    rows: int = attrs.field(validator=attrs.validators.ge(1))
    blocks: int = attrs.field(validator=attrs.validators.ge(1))
    block_size: int = attrs.field(default=64, validator=attrs.validators.ge(1))


@attrs.define(eq=False)
class SimRequest:
    """A request on its way through a lane."""

    name: str
    arrival: Arrival
    token_times: list[float] = attrs.field(factory=list)
    """When each token came out, in seconds."""
    preempted_after: list[int] = attrs.field(factory=list)
    """How many tokens were out each time that it was preempted."""
    computed: int = 0
    """Tokens in the cache."""
    admission: Admission = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.admission = Admission(self.arrival.prompt_tokens)

    @property
    def generated(self) -> int:
        return len(self.token_times)

    @property
    def to_prefill(self) -> int:
        """Tokens of the prompt, or of a replay, that are not computed yet."""
        return max(0, self.admission.known - self.computed)

    def preempt(self) -> None:
        self.preempted_after.append(self.generated)
        self.computed = 0
        self.admission = Admission(self.arrival.prompt_tokens + self.generated, self.generated)


@attrs.frozen
class Chunk:
    """Tokens of one request that a step prefills."""

    request: SimRequest
    tokens: int


@attrs.define
class Lane:
    """Requests wait in order of arrival. An admitted one gets a row and, at once, all blocks of its prompt,
    so that decodes between its chunks cannot take them. A decode that finds no block preempts the youngest.
    """

    shape: LaneShape
    waiting: deque[SimRequest] = attrs.field(factory=deque, init=False)
    running: list[SimRequest] = attrs.field(factory=list, init=False)
    free_blocks: int = attrs.field(init=False)
    _rows: RowAccount = attrs.field(init=False)
    _held: dict[str, int] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.free_blocks = self.shape.blocks
        self._rows = RowAccount(self.shape.rows)

    @property
    def load(self) -> LaneLoad:
        owed = sum(request.to_prefill for request in (*self.waiting, *self.running))
        return LaneLoad(
            queued_prompt_tokens=owed,
            running=len(self.running),
            free_blocks=self.free_blocks,
            total_blocks=self.shape.blocks,
            free_rows=self.free_rows,
            block_size=self.shape.block_size,
        )

    @property
    def free_rows(self) -> int:
        return self.shape.rows - len(self.running)

    @property
    def decoding(self) -> list[SimRequest]:
        return [request for request in self.running if not request.to_prefill]

    @property
    def chunking(self) -> list[SimRequest]:
        return [request for request in self.running if request.to_prefill]

    @property
    def admissible(self) -> int:
        """Waiting requests that rows and blocks are free for, in order."""
        blocks, count = self.free_blocks, 0
        for request in self.waiting:
            blocks -= self._blocks(request.admission.known + 1)
            if blocks < 0 or count == self.free_rows:
                break
            count += 1
        return count

    def prefill(self, budget: int, room: float, sizes: Sequence[int] = ()) -> list[Chunk]:
        """Take up to ``budget`` tokens, as padded to ``sizes`` up to ``room``: begun prompts first, then
        waiting ones, which are admitted here. The first that is cut is the last.
        """
        chunks: list[Chunk] = []
        for request in (*self.chunking, *list(self.waiting)[: self.admissible]):
            tokens = cut(request.to_prefill, budget, room, sizes)
            if not tokens:
                break
            budget -= tokens
            room -= padded(tokens, sizes)
            chunks.append(Chunk(request, tokens))
            if request not in self.running:
                self._admit(request)
            if tokens < request.to_prefill:
                break
        return chunks

    def decode(self) -> list[SimRequest]:
        """Those that get a token now, each with a block for it; the youngest make room if need be."""
        for request in self.decoding:
            while request in self.running and not self._hold(request, request.computed + 1):
                self._preempt(self.running[-1])
        return self.decoding

    def end_step(self, chunks: Sequence[Chunk], decodes: Sequence[SimRequest], now: float) -> None:
        """Move the cursors and hand out tokens at the end of a step; those that are done leave."""
        sampled = [chunk.request for chunk in chunks if chunk.tokens == chunk.request.to_prefill]
        for chunk in chunks:
            chunk.request.computed += chunk.tokens
        for request in decodes:
            request.computed += 1
        for request in (*sampled, *decodes):
            request.token_times.append(now)
            if request.generated >= request.arrival.output_tokens or self._full(request):
                self._leave(request)

    def _admit(self, request: SimRequest) -> None:
        self.waiting.remove(request)
        self._rows.take(request.name)
        self._hold(request, request.admission.known + 1)
        self.running.append(request)

    def _full(self, request: SimRequest) -> bool:
        return request.computed + 1 >= self.shape.blocks * self.shape.block_size

    def _hold(self, request: SimRequest, tokens: int) -> bool:
        """Give the request what it lacks to hold ``tokens``; False, and nothing given, if it is not free."""
        lacking = self._blocks(tokens) - self._held.get(request.name, 0)
        if lacking > self.free_blocks:
            return False
        if lacking > 0:
            self.free_blocks -= lacking
            self._held[request.name] = self._blocks(tokens)
        return True

    def _preempt(self, request: SimRequest) -> None:
        self._leave(request)
        request.preempt()
        self.waiting.appendleft(request)

    def _leave(self, request: SimRequest) -> None:
        self.running.remove(request)
        self._rows.release(request.name)
        self.free_blocks += self._held.pop(request.name)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.shape.block_size)
