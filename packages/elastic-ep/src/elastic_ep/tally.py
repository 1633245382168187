"""The balancer at work in the coordinator's process: what ranks count comes in, plans come out."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from elastic_ep.balancer import Balancer, Look, look
from elastic_ep.control import Coordinator, Phase
from elastic_ep.plan import Plan
from elastic_ep.wire import Counted


class Tally:
    """How often experts were routed to since the last look, over all ranks.

    Plans are made in a thread: leases go on meanwhile.
    """

    def __init__(self, balancer: Balancer, state: Coordinator, now: float) -> None:
        self._balancer = balancer
        self._look = Look(state.placement)
        self._due = now + balancer.every
        self._counted: dict[int, torch.Tensor] = {}
        shape = state.placement.shape
        self._load = torch.zeros((shape.layers, shape.experts), dtype=torch.int64)
        self._thread = ThreadPoolExecutor(1, "balance")
        self._looking: Future[tuple[Look, Plan | None]] | None = None

    @property
    def looking(self) -> bool:
        """Whether a look is under way, or what came of it was not asked for yet."""
        return self._looking is not None

    def hear(self, message: Counted) -> None:
        """A rank's counts rise; where one is lower, they have started anew."""
        counts = torch.frombuffer(bytearray(message.counts), dtype=torch.int64).view_as(self._load)
        more = counts - self._counted.get(message.sender, torch.zeros_like(counts))
        self._load += counts if bool((more < 0).any()) else more
        self._counted[message.sender] = counts

    def plan(self, state: Coordinator, now: float) -> Plan | None:
        """A pass to begin now, if there is one. Asked often; looks when it is time to, and nothing else
        runs."""
        if self._looking is not None:
            return self._take(self._looking) if self._looking.done() else None
        if now < self._due or state.phase != Phase.STABLE or not state.runs:
            return None
        load = self._load.tolist()
        self._load.zero_()
        self._due = now + self._balancer.every
        self._counted = {rank: self._counted[rank] for rank in state.placement.ranks if rank in self._counted}
        self._looking = self._thread.submit(look, self._balancer, self._look, state.placement, load)
        return None

    def _take(self, looked: Future[tuple[Look, Plan | None]]) -> Plan | None:
        self._looking = None
        self._look, plan = looked.result()
        return plan
