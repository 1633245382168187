"""Dispatch and combine against a dense MoE, over every transport."""

import os
from collections.abc import Iterator

import pytest
from elastic_ep import MemoryNetwork, Transport, place
from elastic_ep.testing.lane_conformance import SHAPE, LaneConformance


class TestOverMemory(LaneConformance):
    network = MemoryNetwork()

    @pytest.fixture(autouse=True)
    def _fresh_network(self) -> None:
        self.network = MemoryNetwork(seed=5, delay=1, repeat=0.3)

    def make(self, name: str) -> Transport:
        return self.network.end(name)

    def kill(self, transport: Transport) -> None:
        self.network.kill(transport.name)


class TestOverNixl(LaneConformance):
    @pytest.fixture(autouse=True)
    def _loopback(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        pytest.importorskip("nixl", reason="nixl is not installed: install elastic-ep[nixl] to run its tests")
        monkeypatch.setitem(os.environ, "UCX_TLS", "tcp,self")
        monkeypatch.setitem(os.environ, "UCX_NET_DEVICES", "lo")
        self.made: list[Transport] = []
        yield
        for transport in self.made:
            transport.close()

    def make(self, name: str) -> Transport:
        from elastic_ep.transport_nixl import NixlTransport

        self.made.append(NixlTransport(name))
        return self.made[-1]

    def kill(self, transport: Transport) -> None:
        self.made.remove(transport)
        transport.__dict__.clear()

    def test_what_is_made_ready_is_all_that_an_exchange_needs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Steps of all sizes make no request of NIXL's any more."""
        ranks = self.group((0, 1))
        self.adopt(ranks, place(SHAPE, (0, 1)))
        for rank in ranks.values():
            for other, peer in rank.peers.items():
                rank.lane.make_ready(other, peer)
        for transport in self.made:
            monkeypatch.setattr(transport.__dict__["_agent"], "initialize_xfer", None)
        for step in range(12):
            self.check(ranks, (0, 1), 1, step)
