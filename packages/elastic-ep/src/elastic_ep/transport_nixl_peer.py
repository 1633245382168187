"""Requests of a NIXL agent to one peer: to make one takes several times as long as to post it, so those that
write are kept and posted again."""

from typing import Any

import attrs

from elastic_ep.errors import TransportError
from elastic_ep.transport import Span, check_spans

FLAGS = "_flags"
"""The region of flags that are under way: each needs its own memory until it is done."""

KEPT = 128
"""Requests kept for each peer, the latest ones."""

Key = tuple[Span, ...] | tuple[str, int]
"""What a request writes: these spans, or the flag in this element of this region."""


@attrs.frozen
class Region:
    """Registered memory: address and size in bytes."""

    address: int
    size: int
    device: int
    memory: str


@attrs.define(eq=False)
class Request:
    """A transfer as NIXL knows it, to be posted one at a time. ``slot`` is the element of the flags' region
    where its value lies. Without a key it is used once."""

    key: Key | None
    handle: Any
    slot: int | None = None


class Peer:
    """A remote agent. ``slots`` are the free elements of the flags' region, which all peers share."""

    def __init__(
        self, agent: Any, name: str, here: dict[str, Region], there: dict[str, Region], slots: list[int]
    ) -> None:
        self.name = name
        self._agent = agent
        self._here = here
        self._there = there
        self._slots = slots
        self._idle: dict[Key, Request] = {}
        self._stuck: list[int] = []

    def check(self, spans: tuple[Span, ...]) -> None:
        """Raise TransportError if any leaves its region."""
        if spans not in self._idle:
            sizes = [{name: at.size for name, at in side.items()} for side in (self._here, self._there)]
            check_spans(spans, *sizes)

    def write(self, spans: tuple[Span, ...]) -> Request:
        """Raises what NIXL raises, as all that makes requests."""
        return self._idle.pop(spans, None) or Request(spans, self._of_spans("WRITE", spans))

    def read(self, spans: tuple[Span, ...]) -> Request:
        return Request(None, self._of_spans("READ", spans))

    def flag(self, region: str, index: int) -> Request:
        kept = self._idle.pop((region, index), None)
        if kept is not None:
            return kept
        if not self._slots:
            raise TransportError("too many flags are under way")
        slot = self._slots[-1]
        here, there = (self._here[FLAGS], slot * 8, 8), (self._there[region], index * 8, 8)
        made = Request((region, index), self._make("WRITE", [here], [there]), slot)
        self._slots.pop()
        return made

    def keep(self, request: Request) -> None:
        """It is done: keep it, and not too many."""
        if request.key is None or request.key in self._idle:
            self._release(request)
            return
        self._idle[request.key] = request
        if len(self._idle) > KEPT:
            self._release(self._idle.pop(next(iter(self._idle))))

    def fail(self, request: Request) -> None:
        """It failed, and may still read its memory until the peer is removed."""
        if request.slot is not None:
            self._stuck.append(request.slot)
            request.slot = None
        self._release(request)

    def remove(self) -> None:
        for request in self._idle.values():
            self._release(request)
        self._agent.remove_remote_agent(self.name)
        self._slots += self._stuck

    def _of_spans(self, kind: str, spans: tuple[Span, ...]) -> Any:
        here = [(self._here[span.local], span.local_offset, span.size) for span in spans]
        there = [(self._there[span.remote], span.remote_offset, span.size) for span in spans]
        return self._make(kind, here, there)

    def _make(self, kind: str, *sides: list[tuple[Region, int, int]]) -> Any:
        described = [
            self._agent.get_xfer_descs(
                [(region.address + offset, size, region.device) for region, offset, size in pieces],
                mem_type=pieces[0][0].memory,
            )
            for pieces in sides
        ]
        return self._agent.initialize_xfer(kind, *described, self.name)

    def _release(self, request: Request) -> None:
        if request.slot is not None:
            self._slots.append(request.slot)
        try:
            request.handle.release()
        except Exception:  # noqa: BLE001 - to abort a hanging transfer may raise; the agent frees it later
            return
