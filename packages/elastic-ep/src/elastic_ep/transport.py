"""One-sided transfers between registered tensors of different processes, behind one small interface.

Implementations: `elastic_ep.transport_memory` (deterministic, for tests) and `elastic_ep.transport_nixl`.
All of them run `elastic_ep.testing.transport_conformance`.
"""

import time
from collections.abc import Callable, Iterable
from typing import Protocol

import attrs
import torch

from elastic_ep.errors import DeadlineError, FencedError, TransportError

SPINS, NAP, LONGEST_NAP = 2, 50e-6, 2e-3
"""A wait polls so often without a rest, then with so many seconds in between, and the more the longer it has
lasted: where there are more ranks than cores, one that polls takes the time of those it waits for."""


@attrs.frozen(cache_hash=True)
class Span:
    """``size`` bytes of region ``local`` here, against as many of region ``remote`` at the peer; offsets in
    bytes."""

    local: str
    local_offset: int
    remote: str
    remote_offset: int
    size: int


@attrs.frozen
class Flag:
    """An int64 to be raised at the peer, in element ``index`` of its int64 region, once the data is there."""

    region: str
    index: int
    value: int


@attrs.define(eq=False)
class Op:
    """A transfer under way: ``done`` when it is complete at both ends; ``error`` if it never will be.

    The memory it reads must stay as it is until then.
    """

    peer: str
    done: bool = False
    error: TransportError | None = None


class Transport(Protocol):
    """One rank's end. ``name`` is unique to this incarnation of the rank."""

    name: str

    def register(self, region: str, tensor: torch.Tensor) -> None:
        """Make a contiguous tensor reachable, once and for good. TransportError after `card` was given
        out."""

    def card(self) -> bytes:
        """What others need to connect to this end and to address its regions."""

    def connect(self, card: bytes) -> Op:
        """Connect to the end that gave out the card, named by the op's peer. Done when the connection is
        warm: a first transfer went through."""

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Its open transfers fail with PeerLostError; others go on."""

    def write(self, peer: str, spans: Iterable[Span], flag: Flag | None = None) -> Op:
        """Write to a peer and then, when all data is there, raise the flag."""

    def make_ready(self, peer: str, spans: Iterable[Span], flag: Flag | None = None) -> None:
        """Have the first `write` of just these spans, and of a flag in this place, take no longer than later
        ones. Sends nothing; the flag's value does not matter."""

    def read(self, peer: str, spans: Iterable[Span]) -> Op:
        """Read from a peer, which need not do anything but poll."""

    def poll(self) -> None:
        """Make progress, on own transfers and on those of peers. Never blocks."""

    def close(self) -> None:
        """Let go of all peers and regions."""


def wait(
    transport: Transport,
    ops: Iterable[Op],
    seconds: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> None:
    """Poll until all transfers are done.

    Raises the error of one that failed, FencedError when ``interrupted`` turns true, and after ``seconds``
    a DeadlineError that names the peers still waited for.
    """
    ops = list(ops)

    def finished() -> bool:
        for op in ops:
            if op.error is not None:
                raise op.error
        return all(op.done for op in ops)

    wait_until(
        transport, finished, seconds, lambda: sorted({op.peer for op in ops if not op.done}), interrupted
    )


def wait_until(
    transport: Transport,
    condition: Callable[[], bool],
    seconds: float,
    late: Callable[[], object],
    interrupted: Callable[[], bool] = lambda: False,
    nap: float = LONGEST_NAP,
) -> None:
    """Poll until a condition holds, at least every ``nap`` seconds. Raises FencedError and DeadlineError like
    `wait`; ``late`` says what is missing."""
    began, polls = time.monotonic(), 0
    while not condition():
        if interrupted():
            raise FencedError("the wait was interrupted by a fence")
        waited = time.monotonic() - began
        if waited > seconds:
            raise DeadlineError(f"after {seconds} s still waiting for {late()}")
        transport.poll()
        polls += 1
        time.sleep(0 if polls < SPINS else min(max(NAP, waited / 4), nap))


def check_region(region: str, tensor: torch.Tensor) -> None:
    """Raise TransportError unless the tensor can be registered."""
    if not tensor.is_contiguous() or tensor.numel() == 0:
        raise TransportError(
            f"region {region} must be a contiguous tensor with elements; got {tuple(tensor.shape)}"
        )


def check_spans(spans: Iterable[Span], local: dict[str, int], remote: dict[str, int]) -> list[Span]:
    """The spans as a list; TransportError unless each lies inside regions of these sizes in bytes."""
    spans = list(spans)
    for span in spans:
        for sizes, region, offset in (
            (local, span.local, span.local_offset),
            (remote, span.remote, span.remote_offset),
        ):
            if not 0 <= offset < offset + span.size <= sizes.get(region, 0):
                raise TransportError(f"{span} leaves region {region} of {sizes.get(region, 0)} bytes")
    return spans


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor."""
    return tensor.numel() * tensor.element_size()
