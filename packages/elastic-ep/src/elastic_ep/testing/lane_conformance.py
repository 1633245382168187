"""A lane over a transport against a dense MoE. Subclass `LaneConformance` in a test module and say how to
make and kill ends."""

import functools
import threading
from collections.abc import Callable, Iterable

import torch

from elastic_ep.errors import DeadlineError, FencedError, LaneError, PeerLostError
from elastic_ep.lane import Lane, LaneShape
from elastic_ep.placement import EMPTY, Placement, Shape
from elastic_ep.plan import place, rebalance, resize
from elastic_ep.routing import RoutingTables, tables
from elastic_ep.transport import Op, Transport, wait_until

SHAPE = Shape(layers=1, experts=6, slots=4, max_ranks=5)
LANE = LaneShape(max_ranks=5, slots=4, tokens=7, top=2, hidden=8)
SECONDS = 20.0


class Rank:
    """One rank: a lane, its tables, and the weights in its slots."""

    def __init__(self, transport: Transport, rank: int) -> None:
        self.rank = rank
        self.transport = transport
        self.lane = Lane(transport, rank, LANE, torch.float64)
        self.tables = RoutingTables(SHAPE)
        self.weights = torch.zeros((SHAPE.slots, LANE.hidden, LANE.hidden), dtype=torch.float64)
        self.peers: dict[int, str] = {}
        self.fenced = threading.Event()

    def adopt(self, placement: Placement, dense: torch.Tensor) -> None:
        for slot, expert in enumerate(placement.row(0, self.rank)):
            if expert != EMPTY:
                self.weights[slot] = dense[expert]
        self.tables.write(tables(placement))

    def run(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.einsum("nh,nhk->nk", rows, self.weights[slots]))


class Batch:
    """What one rank brings to a step."""

    def __init__(self, rank: int, step: int) -> None:
        random = torch.Generator().manual_seed(1000 * rank + step)
        count = (rank + step) % (LANE.tokens + 1)
        self.tokens = torch.randn((count, LANE.hidden), generator=random, dtype=torch.float64)
        ranked = torch.rand((count, SHAPE.experts), generator=random).argsort(dim=1)
        self.experts = ranked[:, : LANE.top]
        self.weights = torch.rand((count, LANE.top), generator=random, dtype=torch.float64)

    def dense(self, weights: torch.Tensor) -> torch.Tensor:
        every = torch.tanh(torch.einsum("nh,ehk->nek", self.tokens, weights))
        chosen = every.gather(1, self.experts[:, :, None].expand(-1, -1, LANE.hidden))
        return (chosen * self.weights[:, :, None]).sum(dim=1)


class LaneConformance:
    """The tests. ``make`` gives an unused transport for a name; ``kill`` ends one as a crash would."""

    def make(self, name: str) -> Transport:
        raise NotImplementedError

    def kill(self, transport: Transport) -> None:
        raise NotImplementedError

    def group(self, ids: Iterable[int]) -> dict[int, Rank]:
        self.dense = torch.randn(
            (SHAPE.experts, LANE.hidden, LANE.hidden),
            generator=torch.Generator().manual_seed(1),
            dtype=torch.float64,
        )
        ranks = {rank: Rank(self.make(f"rank {rank}"), rank) for rank in ids}
        for here in ranks.values():
            for there in ranks.values():
                if here is not there:
                    op = here.transport.connect(there.transport.card())
                    here.peers[there.rank] = op.peer
                    wait_until(
                        here.transport, functools.partial(warm, op, there.transport), SECONDS, lambda: ""
                    )
        return ranks

    def step(
        self, ranks: dict[int, Rank], ids: Iterable[int], epoch: int, step: int, seconds: float = SECONDS
    ) -> dict[int, torch.Tensor | Exception]:
        """One step of these ranks, each in its own thread: its output, or what it raised."""
        active = sorted(ids)
        found: dict[int, torch.Tensor | Exception] = {}

        def serve(rank: Rank) -> None:
            batch = Batch(rank.rank, step)
            peers = {
                other: rank.peers[other]
                for other in rank.tables.active.nonzero().flatten().tolist()
                if other != rank.rank
            }
            try:
                found[rank.rank] = rank.lane.exchange(
                    epoch,
                    step,
                    peers,
                    rank.tables,
                    0,
                    batch.tokens,
                    batch.experts,
                    batch.weights,
                    rank.run,
                    seconds,
                    rank.fenced.is_set,
                )
            except (DeadlineError, FencedError, PeerLostError) as error:
                found[rank.rank] = error

        threads = [threading.Thread(target=serve, args=(ranks[rank],)) for rank in active]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def check(self, ranks: dict[int, Rank], ids: Iterable[int], epoch: int, step: int) -> None:
        ids = list(ids)
        for rank, output in self.step(ranks, ids, epoch, step).items():
            if isinstance(output, Exception):
                raise output
            torch.testing.assert_close(output, Batch(rank, step).dense(self.dense), rtol=1e-12, atol=1e-12)

    def adopt(self, ranks: dict[int, Rank], placement: Placement) -> None:
        for rank in placement.ranks:
            ranks[rank].adopt(placement, self.dense)

    def test_every_result_equals_the_dense_one_across_reconfigurations(self) -> None:
        ranks = self.group((0, 1, 3, 4))
        addresses = [[b.data_ptr() for b in rank.lane.buffers().values()] for rank in ranks.values()]
        placement = place(SHAPE, (0, 3))
        placements = [placement]
        for target in ((0, 1, 3), (0, 1, 3, 4), (1, 3, 4), (1, 4)):
            placement = resize(placement, target).after
            placements.append(placement)
        placements.append(rebalance(placement, [[9.0, 1, 1, 1, 1, 9.0]]).after)
        step = 0
        for epoch, placement in enumerate(placements):
            self.adopt(ranks, placement)
            for _ in range(2):
                self.check(ranks, placement.ranks, epoch, step)
                step += 1
        assert addresses == [[b.data_ptr() for b in rank.lane.buffers().values()] for rank in ranks.values()]

    def test_a_step_that_a_rank_missed_names_it_and_survivors_retry_it(self) -> None:
        ranks = self.group((0, 1, 2))
        placement = place(SHAPE, (0, 1, 2), min_replicas=2)
        self.adopt(ranks, placement)
        self.check(ranks, (0, 1, 2), 1, 0)
        found = self.step(ranks, (0, 2), 1, 1, seconds=0.3)
        assert all("ranks [1]" in str(error) for error in found.values() if isinstance(error, DeadlineError))
        assert [type(error) for error in found.values()] == [DeadlineError, DeadlineError]
        survivors = placement.without({1})
        self.adopt(ranks, survivors)
        for step in (1, 2):
            self.check(ranks, (0, 2), 2, step)
        self.step(ranks, (1,), 1, 1, seconds=0.1)
        self.check(ranks, (0, 2), 2, 3)

    def test_a_fence_ends_a_wait(self) -> None:
        ranks = self.group((0, 2))
        self.adopt(ranks, place(SHAPE, (0, 2)))
        timer = threading.Timer(0.05, ranks[0].fenced.set)
        timer.start()
        found = self.step(ranks, (0,), 1, 0)
        assert isinstance(found[0], FencedError)
        ranks[0].fenced.clear()
        self.check(ranks, (0, 2), 2, 0)

    def test_a_rank_that_dies_is_left_behind(self) -> None:
        ranks = self.group((0, 1, 2))
        placement = place(SHAPE, (0, 1, 2), min_replicas=2)
        self.adopt(ranks, placement)
        self.check(ranks, (0, 1, 2), 1, 0)
        self.kill(ranks[2].transport)
        found = self.step(ranks, (0, 1), 1, 1, seconds=0.5)
        assert {type(error) for error in found.values()} <= {DeadlineError, PeerLostError}
        for rank in (0, 1):
            ranks[rank].transport.disconnect(ranks[rank].peers.pop(2))
        self.adopt(ranks, placement.without({2}))
        self.check(ranks, (0, 1), 2, 1)

    def test_what_does_not_fit_is_refused(self) -> None:
        ranks = self.group((0, 1))
        placement = place(SHAPE, (0, 1))
        self.adopt(ranks, placement.without({1}))
        expert = placement.without({1}).missing()[0][1]
        lane, board = ranks[0].lane, ranks[0].tables
        for rows, experts, why in (
            (1, [[expert, expert]], f"no rank holds experts [{expert}]"),
            (LANE.tokens + 1, [[0, 1]] * (LANE.tokens + 1), "at most 7 tokens"),
            (1, [[0, 1, 2]], "expected"),
        ):
            tokens, chosen = torch.zeros((rows, LANE.hidden), dtype=torch.float64), torch.tensor(experts)

            def exchange(tokens: torch.Tensor = tokens, chosen: torch.Tensor = chosen) -> torch.Tensor:
                return lane.exchange(
                    1, 0, {}, board, 0, tokens, chosen, chosen.double(), ranks[0].run, SECONDS
                )

            message = raised(exchange)
            assert why in message, message


def warm(op: Op, peer: Transport) -> bool:
    """Whether a connection is warm, with the peer polling meanwhile."""
    peer.poll()
    return op.done


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except LaneError as error:
        return str(error)
    raise AssertionError("LaneError was not raised")
