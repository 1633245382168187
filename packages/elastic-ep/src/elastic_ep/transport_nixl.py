"""Transfers between real processes with NIXL agents over UCX. The only module that imports `nixl`; install
extra ``nixl``.

Facts behind the settings, measured on CPU hosts: a progress thread spins at half a core and slows small
messages by orders of magnitude where cores are scarce, so it is off and every wait polls; without it the
default synchronisation is none at all, so the read-write lock is asked for, and a background thread may
connect while the serving thread transfers; connections are made by the first transfer, so `connect` makes
one.

A process's first agent takes 0.27 s of a core, nearly all of it for hooks by which UCX sees memory come and
go. ``UCX_MEM_EVENTS=n`` in a launcher's environment leaves them out, then it is 0.02 s: worth a try where no
other part of UCX counts on them, as on one host.
"""

import base64
import binascii
import functools
import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch

from elastic_ep.errors import PeerLostError, TransportError
from elastic_ep.transport import Flag, Op, Span, check_region, size_of
from elastic_ep.transport_nixl_peer import FLAGS, Peer, Region, Request

SCRATCH = "_scratch"
OPEN_FLAGS = 4096
"""Flags that may be under way, or kept to be raised again, at once."""


@attrs.define(eq=False)
class _Transfer:
    op: Op
    peer: Peer
    flag: Flag | None
    request: Request | None = None

    @property
    def ended(self) -> bool:
        return self.op.done or self.op.error is not None


class NixlTransport:
    """One end; see `elastic_ep.transport.Transport`.

    May be used from several threads. ``name`` must be unique to the incarnation, such as ``rank.uuid``: an
    agent name that is met again under other metadata is refused by NIXL.
    """

    def __init__(self, name: str) -> None:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        config = nixl_agent_config(
            enable_prog_thread=False, backends=["UCX"], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        )
        self.name = name
        self._agent = nixl_agent(name, config)
        self._lock = threading.RLock()
        self._sealed = False
        self._regions: dict[str, Region] = {}
        self._registered: list[Any] = []
        self._peers: dict[str, Peer] = {}
        self._open: list[_Transfer] = []
        self._tensors: list[torch.Tensor] = []
        self._flags = memoryview(bytearray(8 * OPEN_FLAGS)).cast("q")
        self._slots = list(range(OPEN_FLAGS))
        self.register(SCRATCH, torch.zeros(8, dtype=torch.int64))
        self.register(FLAGS, torch.frombuffer(self._flags, dtype=torch.int64))

    def register(self, region: str, tensor: torch.Tensor) -> None:
        if self._sealed or region in self._regions:
            raise TransportError(f"region {region} comes too late or twice; register once, before card()")
        check_region(region, tensor)
        self._registered.append(self._agent.register_memory(tensor))
        memory = "VRAM" if tensor.is_cuda else "DRAM"
        device = tensor.get_device() if tensor.is_cuda else 0
        self._regions[region] = Region(tensor.data_ptr(), size_of(tensor), device, memory)
        self._tensors.append(tensor)

    def card(self) -> bytes:
        self._sealed = True
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        regions = {region: attrs.astuple(at) for region, at in self._regions.items()}
        return json.dumps([self.name, metadata, regions]).encode()

    def connect(self, card: bytes) -> Op:
        try:
            peer, metadata, regions = json.loads(card)
            known = {region: Region(*at) for region, at in regions.items()}
            loaded = base64.b64decode(metadata)
        except (ValueError, TypeError, binascii.Error) as error:
            raise TransportError(f"{len(card)} bytes are no card: {error}") from error
        if peer in self._peers:
            raise TransportError(f"{self.name} is connected to {peer} already")
        try:
            self._agent.add_remote_agent(loaded)
        except Exception as error:
            raise TransportError(f"{self.name} could not add {peer}: {error}") from error
        with self._lock:
            self._peers[peer] = Peer(self._agent, peer, self._regions, known, self._slots)
            return self._begin("WRITE", peer, [Span(SCRATCH, 0, SCRATCH, 8, 8)], None)

    def disconnect(self, peer: str) -> None:
        with self._lock:
            gone = self._peers.pop(peer, None)
            if gone is None:
                return
            for transfer in self._open:
                if transfer.peer is gone:
                    self._fail(transfer, PeerLostError(f"{peer} was disconnected"))
            self._forget_ended()
            gone.remove()

    def write(self, peer: str, spans: Iterable[Span], flag: Flag | None = None) -> Op:
        with self._lock:
            return self._begin("WRITE", peer, spans, flag)

    def make_ready(self, peer: str, spans: Iterable[Span], flag: Flag | None = None) -> None:
        with self._lock:
            known, spans = self._peer(peer), tuple(spans)
            known.check(spans)
            try:
                if spans:
                    known.keep(known.write(spans))
                if flag is not None:
                    known.keep(known.flag(flag.region, flag.index))
            except Exception as error:
                raise _error(peer, error) from error

    def read(self, peer: str, spans: Iterable[Span]) -> Op:
        with self._lock:
            return self._begin("READ", peer, spans, None)

    def poll(self) -> None:
        with self._lock:
            self._agent.get_new_notifs()
            for transfer in self._open:
                self._look_after(transfer)
            self._forget_ended()

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        while self._registered:
            self._agent.deregister_memory(self._registered.pop())
        self._tensors = []

    def _begin(self, kind: str, name: str, spans: Iterable[Span], flag: Flag | None) -> Op:
        peer, spans = self._peer(name), tuple(spans)
        peer.check(spans)
        transfer = _Transfer(Op(name), peer, flag)
        if spans:
            self._post(transfer, lambda: peer.write(spans) if kind == "WRITE" else peer.read(spans))
        else:
            self._data_done(transfer)
        if not transfer.ended:
            self._open.append(transfer)
        return transfer.op

    def _peer(self, name: str) -> Peer:
        if name not in self._peers:
            raise PeerLostError(f"{self.name} is not connected to {name}")
        return self._peers[name]

    def _post(self, transfer: _Transfer, make: Callable[[], Request], value: int = 0) -> None:
        try:
            request = transfer.request = make()
            if request.slot is not None:
                self._flags[request.slot] = value
            state = self._agent.transfer(request.handle)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base
            self._fail(transfer, _error(transfer.op.peer, error))
        else:
            self._progress(transfer, state)

    def _look_after(self, transfer: _Transfer) -> None:
        assert transfer.request is not None
        try:
            state = self._agent.check_xfer_state(transfer.request.handle)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base
            self._fail(transfer, _error(transfer.op.peer, error))
        else:
            self._progress(transfer, state)

    def _progress(self, transfer: _Transfer, state: str) -> None:
        request = transfer.request
        if state == "ERR":
            self._fail(transfer, TransportError(f"a transfer to {transfer.op.peer} failed"))
        elif state == "DONE" and request is not None:
            transfer.request = None
            transfer.peer.keep(request)
            self._data_done(transfer)

    def _data_done(self, transfer: _Transfer) -> None:
        """The data is at the peer: raise the flag, if there is one to raise still."""
        flag, transfer.flag = transfer.flag, None
        if flag is None:
            transfer.op.done = True
        else:
            raised = functools.partial(transfer.peer.flag, flag.region, flag.index)
            self._post(transfer, raised, flag.value)

    def _fail(self, transfer: _Transfer, error: TransportError) -> None:
        transfer.op.error = error
        if transfer.request is not None:
            transfer.peer.fail(transfer.request)
            transfer.request = None

    def _forget_ended(self) -> None:
        self._open = [transfer for transfer in self._open if not transfer.ended]


def _error(peer: str, error: Exception) -> TransportError:
    """NIXL raises its own kinds; a lost peer is told by the kind's name."""
    if isinstance(error, TransportError):
        return error
    kind = type(error).__name__
    if kind in ("nixlRemoteDisconnectError", "nixlNotFoundError"):
        return PeerLostError(f"{peer} is gone: {error}")
    return TransportError(f"a transfer to {peer} failed: {kind}: {error}")
