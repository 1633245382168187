"""Transfers between real processes with NIXL agents over UCX. The only module that imports `nixl`; install
extra ``nixl``.

Facts behind the settings, measured on CPU hosts: a progress thread spins at half a core and slows small
messages by orders of magnitude where cores are scarce, so it is off and every wait polls; without it the
default synchronisation is none at all, so the read-write lock is asked for, and a background thread may
connect while the serving thread transfers; connections are made by the first transfer, so `connect` makes
one.
"""

import base64
import binascii
import json
import threading
from collections.abc import Iterable
from typing import Any

import attrs
import torch

from elastic_ep.errors import PeerLostError, TransportError
from elastic_ep.transport import Flag, Op, Span, check_region, check_spans, size_of

SCRATCH = "_scratch"
FLAGS = "_flags"
OPEN_FLAGS = 1024
"""Flags that may be under way at once; each needs its own memory until it is done."""


@attrs.frozen
class _Region:
    address: int
    size: int
    device: int
    memory: str


@attrs.define(eq=False)
class _Transfer:
    op: Op
    handle: Any
    flag: Flag | None = None
    flag_slot: int | None = None


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
        self._regions: dict[str, _Region] = {}
        self._registered: list[Any] = []
        self._peers: dict[str, dict[str, _Region]] = {}
        self._open: list[_Transfer] = []
        self._tensors: list[torch.Tensor] = []
        self._flags = torch.zeros(OPEN_FLAGS, dtype=torch.int64)
        self._free_flags = list(range(OPEN_FLAGS))
        self._stuck_flags: list[tuple[str, int]] = []
        self.register(SCRATCH, torch.zeros(8, dtype=torch.int64))
        self.register(FLAGS, self._flags)

    def register(self, region: str, tensor: torch.Tensor) -> None:
        if self._sealed or region in self._regions:
            raise TransportError(f"region {region} comes too late or twice; register once, before card()")
        check_region(region, tensor)
        self._registered.append(self._agent.register_memory(tensor))
        memory = "VRAM" if tensor.is_cuda else "DRAM"
        device = tensor.get_device() if tensor.is_cuda else 0
        self._regions[region] = _Region(tensor.data_ptr(), size_of(tensor), device, memory)
        self._tensors.append(tensor)

    def card(self) -> bytes:
        self._sealed = True
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        regions = {region: attrs.astuple(at) for region, at in self._regions.items()}
        return json.dumps([self.name, metadata, regions]).encode()

    def connect(self, card: bytes) -> Op:
        try:
            peer, metadata, regions = json.loads(card)
            known = {region: _Region(*at) for region, at in regions.items()}
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
            self._peers[peer] = known
            return self._begin("WRITE", peer, [Span(SCRATCH, 0, SCRATCH, 8, 8)], None)

    def disconnect(self, peer: str) -> None:
        with self._lock:
            if self._peers.pop(peer, None) is None:
                return
            for transfer in [transfer for transfer in self._open if transfer.op.peer == peer]:
                self._fail(transfer, PeerLostError(f"{peer} was disconnected"))
            self._agent.remove_remote_agent(peer)
            self._free_flags += [slot for stuck, slot in self._stuck_flags if stuck == peer]
            self._stuck_flags = [(stuck, slot) for stuck, slot in self._stuck_flags if stuck != peer]

    def write(self, peer: str, spans: Iterable[Span], flag: Flag | None = None) -> Op:
        with self._lock:
            return self._begin("WRITE", peer, spans, flag)

    def read(self, peer: str, spans: Iterable[Span]) -> Op:
        with self._lock:
            return self._begin("READ", peer, spans, None)

    def poll(self) -> None:
        with self._lock:
            self._agent.get_new_notifs()
            for transfer in list(self._open):
                if transfer in self._open:
                    self._progress(transfer)

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered = []
        self._tensors = []

    def _begin(self, kind: str, peer: str, spans: Iterable[Span], flag: Flag | None) -> Op:
        if peer not in self._peers:
            raise PeerLostError(f"{self.name} is not connected to {peer}")
        remote = self._peers[peer]
        sizes = [{region: at.size for region, at in regions.items()} for regions in (self._regions, remote)]
        spans = check_spans(spans, *sizes)
        transfer = _Transfer(Op(peer), None, flag)
        here = [(self._regions[span.local], span.local_offset, span.size) for span in spans]
        there = [(remote[span.remote], span.remote_offset, span.size) for span in spans]
        self._open.append(transfer)
        if spans:
            self._post(transfer, kind, here, there)
        else:
            self._data_done(transfer)
        return transfer.op

    def _post(
        self,
        transfer: _Transfer,
        kind: str,
        here: list[tuple[_Region, int, int]],
        there: list[tuple[_Region, int, int]],
    ) -> None:
        try:
            transfer.handle = self._agent.initialize_xfer(
                kind, self._descriptors(here), self._descriptors(there), transfer.op.peer
            )
            self._agent.transfer(transfer.handle)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base
            self._fail(transfer, _error(transfer.op.peer, error))

    def _descriptors(self, pieces: list[tuple[_Region, int, int]]) -> Any:
        rows = [(region.address + offset, size, region.device) for region, offset, size in pieces]
        return self._agent.get_xfer_descs(rows, mem_type=pieces[0][0].memory)

    def _progress(self, transfer: _Transfer) -> None:
        try:
            state = self._agent.check_xfer_state(transfer.handle)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base
            self._fail(transfer, _error(transfer.op.peer, error))
            return
        if state == "ERR":
            self._fail(transfer, TransportError(f"a transfer to {transfer.op.peer} failed"))
        elif state == "DONE":
            transfer.handle.release()
            self._data_done(transfer)

    def _data_done(self, transfer: _Transfer) -> None:
        """The data is at the peer: raise the flag, if there is one to raise still."""
        flag, transfer.flag = transfer.flag, None
        if flag is None:
            transfer.op.done = True
            self._close(transfer)
            return
        if not self._free_flags:
            self._fail(transfer, TransportError(f"more than {OPEN_FLAGS} flags are under way"))
            return
        slot = self._free_flags.pop()
        self._flags[slot] = flag.value
        transfer.flag_slot = slot
        here = [(self._regions[FLAGS], slot * 8, 8)]
        self._post(transfer, "WRITE", here, [(self._peers[transfer.op.peer][flag.region], flag.index * 8, 8)])

    def _fail(self, transfer: _Transfer, error: TransportError) -> None:
        transfer.op.error = error
        self._close(transfer)
        if transfer.handle is not None:
            try:
                transfer.handle.release()
            except Exception:  # noqa: BLE001 - to abort a hanging transfer may raise; the agent frees it later
                return

    def _close(self, transfer: _Transfer) -> None:
        self._open.remove(transfer)
        if transfer.flag_slot is None:
            return
        if transfer.op.done:
            self._free_flags.append(transfer.flag_slot)
        else:
            # A transfer that failed may still read this memory, until its peer is removed.
            self._stuck_flags.append((transfer.op.peer, transfer.flag_slot))


def _error(peer: str, error: Exception) -> TransportError:
    """NIXL raises its own kinds; a lost peer is told by the kind's name."""
    kind = type(error).__name__
    if kind in ("nixlRemoteDisconnectError", "nixlNotFoundError"):
        return PeerLostError(f"{peer} is gone: {error}")
    return TransportError(f"a transfer to {peer} failed: {kind}: {error}")
