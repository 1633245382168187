"""A lane over a transport against a dense MoE. Subclass `LaneConformance` in a test module and say how to
make and kill ends."""

import functools
import threading
import time
from collections.abc import Callable, Iterable

import torch

from elastic_ep.errors import DeadlineError, FencedError, LaneError, PeerLostError
from elastic_ep.lane import NO_NOTE, Lane, Note, Programs
from elastic_ep.lane_shape import NOTE, LaneShape
from elastic_ep.packing import pack, unpack
from elastic_ep.placement import EMPTY, Placement, Shape
from elastic_ep.plan import place, rebalance, resize
from elastic_ep.routing import RoutingTables, tables
from elastic_ep.transport import Op, Transport, wait_until

SHAPE = Shape(layers=1, experts=6, slots=4, max_ranks=5)
LANE = LaneShape(max_ranks=5, slots=4, tokens=11, top=2, hidden=8)
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

    @property
    def programs(self) -> Programs:
        static, tables = self.lane.static, self.tables
        return Programs(
            pack=lambda: pack(static, LANE, self.rank, tables.slots[0], tables.replicas[0]),
            experts=self.run,
            unpack=lambda: unpack(static, LANE),
        )

    def run(self) -> None:
        rows, slots = self.lane.static["in"], self.lane.static["in_head"][:, NOTE:]
        used = slots >= 0
        self.lane.static["results"][used] = torch.tanh(
            torch.einsum("nh,nhk->nk", rows[used], self.weights[slots[used]])
        )

    def exchange(
        self, batch: "Batch", epoch: int, step: int, seconds: float, note: Note, degraded: bool = False
    ) -> torch.Tensor:
        """One step of this rank with whoever its tables name: its output."""
        others = [rank for rank in self.tables.active.nonzero().flatten().tolist() if rank != self.rank]
        peers = {other: self.peers[other] for other in others}
        static, count = self.lane.static, len(batch.tokens)
        for name in ("tokens", "experts", "weights"):
            static[name][:count] = getattr(batch, name)
        static["count"].fill_(count)
        self.lane.exchange(epoch, step, peers, self.programs, seconds, self.fenced.is_set, note, degraded)
        return static["output"][:count].clone()


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
            note = (epoch, step, rank.rank, 0) if rank.rank == active[0] else NO_NOTE
            try:
                found[rank.rank] = rank.exchange(Batch(rank.rank, step), epoch, step, seconds, note)
            except Exception as error:  # noqa: BLE001 - told to whoever looks at what was found
                found[rank.rank] = error
            while len(found) < len(active):
                # As ranks do all their life: the transfers of others may need it.
                rank.transport.poll()
                time.sleep(0.0005)

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
            first = min(ids)
            assert ranks[rank].lane.notes() == ({first: (epoch, step, first, 0)} if rank != first else {})

    def adopt(self, ranks: dict[int, Rank], placement: Placement) -> None:
        for rank in placement.ranks:
            ranks[rank].adopt(placement, self.dense)

    def test_every_result_equals_the_dense_one_across_reconfigurations(self) -> None:
        ranks = self.group((0, 1, 3, 4))
        addresses = [[b.data_ptr() for b in rank.lane.static.values()] for rank in ranks.values()]
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
        assert addresses == [[b.data_ptr() for b in rank.lane.static.values()] for rank in ranks.values()]

    def test_peers_that_are_made_ready_hear_nothing_of_it(self) -> None:
        ranks = self.group((0, 1))
        before = [{name: t.clone() for name, t in rank.lane.static.items()} for rank in ranks.values()]
        for rank in ranks.values():
            for other, peer in rank.peers.items():
                rank.lane.make_ready(other, peer)
            rank.transport.poll()
        for rank, held in zip(ranks.values(), before, strict=True):
            assert all(torch.equal(tensor, held[name]) for name, tensor in rank.lane.static.items())
            assert rank.lane.overheard() == {}
        self.adopt(ranks, place(SHAPE, (0, 1)))
        self.check(ranks, (0, 1), 1, 0)

    def test_a_step_that_a_rank_missed_names_it_and_survivors_retry_it(self) -> None:
        ranks = self.group((0, 1, 2))
        placement = place(SHAPE, (0, 1, 2), min_replicas=2)
        self.adopt(ranks, placement)
        self.check(ranks, (0, 1, 2), 1, 0)
        found = self.step(ranks, (0, 2), 1, 1, seconds=0.3)
        assert all("ranks [1]" in str(error) for error in found.values() if isinstance(error, DeadlineError))
        assert [type(error) for error in found.values()] == [DeadlineError, DeadlineError]
        assert all(rank.lane.late == () for rank in ranks.values()), "nobody is waited for any more"
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

    def test_an_announcement_reaches_a_rank_that_takes_no_part(self) -> None:
        ranks = self.group((0, 1, 2))
        self.adopt(ranks, place(SHAPE, (0, 1)))
        joiner = ranks[2].lane
        assert joiner.overheard() == {}
        ranks[0].lane.announce(2, ranks[0].peers[2], 7, (4, 0, 0, 12))
        heard: dict[int, Note] = {}

        def arrived() -> bool:
            ranks[0].transport.poll()
            heard.update(joiner.overheard())
            return bool(heard)

        wait_until(ranks[2].transport, arrived, SECONDS, lambda: "rank 0")
        assert heard == {0: (4, 0, 0, 12)}
        assert joiner.overheard() == {}
        self.check(ranks, (0, 1), 1, 0)

    def test_an_expert_that_is_nowhere_is_named_or_made_up_for(self) -> None:
        ranks = self.group((0, 1))
        alone = place(SHAPE, (0, 1)).without({1})
        self.adopt(ranks, alone)
        expert = alone.missing()[0][1]
        batch = Batch(0, 1)
        batch.experts[0] = expert
        message = raised(lambda: ranks[0].exchange(batch, 1, 0, SECONDS, NO_NOTE))
        assert f"no rank holds experts [{expert}" in message, message
        lost = [expert for _, expert in alone.missing()]
        batch.weights[torch.isin(batch.experts, torch.tensor(lost))] = 0
        whole, left = Batch(0, 1).weights.sum(dim=1, keepdim=True), batch.weights.sum(dim=1, keepdim=True)
        expected = batch.dense(self.dense) * torch.where(left == 0, 0, whole / left)
        batch.weights = Batch(0, 1).weights
        output = ranks[0].exchange(batch, 2, 0, SECONDS, NO_NOTE, degraded=True)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


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
