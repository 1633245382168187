"""The same conformance tests with real agents, on loopback."""

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("nixl", reason="nixl is not installed: install elastic-ep[nixl] to run its tests")

from elastic_ep import Transport, TransportError
from elastic_ep.testing.transport_conformance import TransportConformance
from elastic_ep.transport_nixl import NixlTransport


@pytest.fixture(scope="module", autouse=True)
def _loopback_only() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in ("UCX_TLS", "UCX_NET_DEVICES")}
    os.environ.update(UCX_TLS="tcp,self", UCX_NET_DEVICES="lo")
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


class TestNixl(TransportConformance):
    """Cases 40 (next lives, and peers that are removed while transfers to them run) and 43 (waits) are among
    what holds for every transport."""

    @pytest.fixture(autouse=True)
    def _made(self) -> Iterator[None]:
        self.made: list[NixlTransport] = []
        yield
        for transport in self.made:
            transport.close()

    def make(self, name: str) -> Transport:
        self.made.append(NixlTransport(name))
        return self.made[-1]

    def kill(self, transport: Transport) -> None:
        """As its process would end: the agent and its sockets go, nobody is told."""
        assert isinstance(transport, NixlTransport)
        self.made.remove(transport)
        transport.__dict__.clear()

    def test_a_card_that_is_none_is_refused(self) -> None:
        with pytest.raises(TransportError, match="no card"):
            self.make("a").connect(b"[]")
