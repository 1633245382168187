"""Dispatch and combine against a dense MoE, over every transport."""

import os
from collections.abc import Iterator

import pytest
from elastic_ep import MemoryNetwork, Transport
from elastic_ep.testing.lane_conformance import LaneConformance


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
