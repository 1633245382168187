"""A deterministic transport inside one process, which can be slow, repeat itself, freeze and lose peers on
demand."""

import random
from collections.abc import Iterable

import attrs
import torch

from elastic_ep.errors import PeerLostError, TransportError
from elastic_ep.transport import Flag, Op, Span, check_region, check_spans, size_of


@attrs.define(eq=False)
class _Transfer:
    op: Op
    source: "MemoryTransport"
    target: "MemoryTransport"
    spans: list[Span]
    reads: bool
    flag: Flag | None
    due: int


class MemoryNetwork:
    """Where memory transports meet.

    A transfer lands after up to ``delay`` polls of the end that began it, span by span in any order, its
    flag last. It fails with probability ``loss`` (a transport may fail, it may not lose silently). With
    probability ``repeat`` the flag of a write is raised once more later, unless this end has raised another
    one there in the meantime.
    """

    def __init__(self, seed: int = 0, delay: int = 0, loss: float = 0.0, repeat: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.delay = delay
        self.loss = loss
        self.repeat = repeat
        self.ends: dict[str, MemoryTransport] = {}
        self.frozen: set[str] = set()

    def end(self, name: str) -> "MemoryTransport":
        """A new end. Names are never used twice."""
        if name in self.ends:
            raise TransportError(f"the name {name} was used before; each incarnation needs its own")
        self.ends[name] = MemoryTransport(name, self)
        return self.ends[name]

    def freeze(self, name: str) -> None:
        """Nothing of this end moves until `thaw`, and transfers to it stay open."""
        self.frozen.add(name)

    def thaw(self, name: str) -> None:
        self.frozen.discard(name)

    def kill(self, name: str) -> None:
        """The end is gone in the middle of whatever it did; transfers to it fail."""
        self.ends[name].close()


class MemoryTransport:
    """One end of a `MemoryNetwork`; see `elastic_ep.transport.Transport`."""

    def __init__(self, name: str, network: MemoryNetwork) -> None:
        self.name = name
        self.network = network
        self.alive = True
        self.regions: dict[str, torch.Tensor] = {}
        self._sealed = False
        self._peers: dict[str, MemoryTransport] = {}
        self._open: list[_Transfer] = []
        self._latest: dict[tuple[str, str, int], int] = {}

    def register(self, region: str, tensor: torch.Tensor) -> None:
        if self._sealed or region in self.regions:
            raise TransportError(f"region {region} comes too late or twice; register once, before card()")
        check_region(region, tensor)
        self.regions[region] = tensor.view(-1).view(torch.uint8)

    def card(self) -> bytes:
        self._sealed = True
        return self.name.encode()

    def connect(self, card: bytes) -> Op:
        peer = self.network.ends[card.decode()]
        if peer.name in self._peers:
            raise TransportError(f"{self.name} is connected to {peer.name} already")
        self._peers[peer.name] = peer
        return self._begin(peer.name, [], False, None)

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)
        for transfer in [transfer for transfer in self._open if transfer.op.peer == peer]:
            self._fail(transfer, PeerLostError(f"{peer} was disconnected"))

    def write(self, peer: str, spans: Iterable[Span], flag: Flag | None = None) -> Op:
        return self._begin(peer, spans, False, flag)

    def make_ready(self, peer: str, spans: Iterable[Span], flag: Flag | None = None) -> None:
        self._check(self._peer(peer), spans)

    def read(self, peer: str, spans: Iterable[Span]) -> Op:
        return self._begin(peer, spans, True, None)

    def poll(self) -> None:
        if not self.alive or self.name in self.network.frozen:
            return
        for transfer in list(self._open):
            if transfer in self._open and transfer.target.name not in self.network.frozen:
                self._progress(transfer)

    def close(self) -> None:
        self.alive = False
        for peer in list(self._peers):
            self.disconnect(peer)
        self.regions = {}

    def _begin(self, peer: str, spans: Iterable[Span], reads: bool, flag: Flag | None) -> Op:
        target, op = self._peer(peer), Op(peer)
        spans = self._check(target, spans)
        self._open.append(_Transfer(op, self, target, spans, reads, flag, self._delay()))
        return op

    def _peer(self, name: str) -> "MemoryTransport":
        if name not in self._peers:
            raise PeerLostError(f"{self.name} is not connected to {name}")
        return self._peers[name]

    def _check(self, target: "MemoryTransport", spans: Iterable[Span]) -> list[Span]:
        """The regions of a peer that is gone are not known."""
        if not target.alive:
            return list(spans)
        here, there = (
            {name: size_of(region) for name, region in end.regions.items()} for end in (self, target)
        )
        return check_spans(spans, here, there)

    def _delay(self) -> int:
        return self.network.random.randint(0, self.network.delay)

    def _progress(self, transfer: _Transfer) -> None:
        if not transfer.target.alive:
            self._fail(transfer, PeerLostError(f"{transfer.op.peer} is gone"))
        elif transfer.due > 0:
            transfer.due -= 1
        elif transfer.spans:
            self._land(transfer, self.network.random.randrange(len(transfer.spans)))
        elif transfer.op.done:
            self._repeat(transfer)
        elif self.network.random.random() < self.network.loss:
            self._fail(transfer, TransportError(f"a transfer to {transfer.op.peer} failed"))
        else:
            self._finish(transfer)

    def _land(self, transfer: _Transfer, index: int) -> None:
        span = transfer.spans.pop(index)
        here = self.regions[span.local][span.local_offset : span.local_offset + span.size]
        there = transfer.target.regions[span.remote][span.remote_offset : span.remote_offset + span.size]
        if transfer.reads:
            here.copy_(there)
        else:
            there.copy_(here)

    def _finish(self, transfer: _Transfer) -> None:
        transfer.op.done = True
        self._open.remove(transfer)
        if transfer.flag is None:
            return
        flag = transfer.flag
        transfer.target.raise_flag(flag)
        self._latest[transfer.op.peer, flag.region, flag.index] = flag.value
        if self.network.random.random() < self.network.repeat:
            transfer.due = self._delay()
            self._open.append(transfer)

    def _repeat(self, transfer: _Transfer) -> None:
        flag = transfer.flag
        self._open.remove(transfer)
        if flag is not None and self._latest[transfer.op.peer, flag.region, flag.index] == flag.value:
            transfer.target.raise_flag(flag)

    def raise_flag(self, flag: Flag) -> None:
        """What the network does when a flag arrives here."""
        self.regions[flag.region].view(torch.int64)[flag.index] = flag.value

    def _fail(self, transfer: _Transfer, error: TransportError) -> None:
        if not transfer.op.done:
            transfer.op.error = error
        self._open.remove(transfer)
