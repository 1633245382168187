"""What every transport must do. Subclass `TransportConformance` in a test module and say how to make and
kill ends."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from elastic_ep.errors import DeadlineError, FencedError, PeerLostError, TransportError
from elastic_ep.transport import Flag, Span, Transport, wait

SECONDS = 20.0


class End:
    """A transport with three regions: ``data`` and ``more`` of 4 KiB, and ``flags`` of 8 int64."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.data = torch.zeros(4096, dtype=torch.uint8)
        self.more = torch.zeros(1024, dtype=torch.float32)
        self.flags = torch.zeros(8, dtype=torch.int64)
        transport.register("data", self.data)
        transport.register("more", self.more)
        transport.register("flags", self.flags)


def raises(kind: type[Exception], call: Callable[[], Any]) -> str:
    """The message of the error that the call raises."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


class TransportConformance:
    """The tests. ``make`` gives an unused transport for a name; ``kill`` ends one as a crash would."""

    def make(self, name: str) -> Transport:
        raise NotImplementedError

    def kill(self, transport: Transport) -> None:
        raise NotImplementedError

    def ends(self, *names: str) -> list[End]:
        return [End(self.make(name)) for name in names]

    def connect(self, here: End, there: End) -> str:
        op = here.transport.connect(there.transport.card())
        self.wait(here, op, there)
        return op.peer

    def wait(self, here: End, op: Any, *others: End) -> None:
        """Wait at one end while the others poll too, as ranks do."""

        def poll_others() -> bool:
            for other in others:
                other.transport.poll()
            return False

        wait(here.transport, [op], SECONDS, poll_others)

    def test_a_write_lands_exactly_where_it_shall(self) -> None:
        a, b = self.ends("a", "b")
        a.data.copy_(torch.arange(4096) % 251)
        peer = self.connect(a, b)
        self.wait(a, a.transport.write(peer, [Span("data", 100, "data", 200, 50)]), b)
        expected = torch.zeros_like(b.data)
        expected[200:250] = a.data[100:150]
        assert torch.equal(b.data, expected)
        assert not b.more.any()

    def test_a_read_needs_nothing_but_polls_from_the_peer(self) -> None:
        a, b = self.ends("a", "b")
        b.more.copy_(torch.arange(1024))
        peer = self.connect(a, b)
        spans = [Span("more", 0, "more", 400, 40), Span("more", 40, "more", 0, 40)]
        self.wait(a, a.transport.read(peer, spans), b)
        assert torch.equal(a.more[:20], torch.cat([b.more[100:110], b.more[:10]]))
        assert not a.more[20:].any()

    def test_a_flag_is_raised_after_its_data(self) -> None:
        a, b = self.ends("a", "b")
        peer = self.connect(a, b)
        for value in range(1, 30):
            a.data.fill_(value)
            a.more.fill_(value)
            spans = [Span("data", 0, "data", 0, 4096), Span("more", 0, "more", 0, 4096)]
            op = a.transport.write(peer, spans, Flag("flags", 3, value))

            def done_or_flagged(value: int = value) -> bool:
                b.transport.poll()
                if b.flags[3] == value:
                    assert bool((b.data == value).all()), "the flag overtook its data"
                    assert bool((b.more == value).all()), "the flag overtook its data"
                return False

            wait(a.transport, [op], SECONDS, done_or_flagged)
            assert b.flags.tolist() == [0, 0, 0, value, 0, 0, 0, 0]

    def test_many_different_writes_land_as_well_when_they_come_again(self) -> None:
        a, b = self.ends("a", "b")
        peer = self.connect(a, b)
        for value, size in enumerate([*range(1, 200), *range(1, 200)], start=1):
            a.data[:size] = value % 251
            op = a.transport.write(
                peer, [Span("data", 0, "data", 8 * size, size)], Flag("flags", value % 8, value)
            )
            self.wait(a, op, b)
            assert bool((b.data[8 * size : 9 * size] == value % 251).all())
            assert b.flags[value % 8] == value

    def test_what_is_made_ready_is_not_sent_and_what_is_wrong_is_refused(self) -> None:
        a, b = self.ends("a", "b")
        a.data.fill_(1)
        peer = self.connect(a, b)
        spans, outside = [Span("data", 0, "data", 0, 4096)], [Span("data", 0, "data", 1, 4096)]
        for flag in (None, Flag("flags", 3, 5)):
            a.transport.make_ready(peer, spans, flag)
        a.transport.make_ready(peer, [], Flag("flags", 4, 5))
        assert "leaves region" in raises(TransportError, lambda: a.transport.make_ready(peer, outside))
        raises(PeerLostError, lambda: a.transport.make_ready("nobody", spans))
        a.transport.poll()
        b.transport.poll()
        assert not b.data.any()
        assert not b.flags.any()
        self.wait(a, a.transport.write(peer, spans, Flag("flags", 3, 7)), b)
        assert bool((b.data == 1).all())
        assert b.flags.tolist() == [0, 0, 0, 7, 0, 0, 0, 0]

    def test_both_ways_at_once(self) -> None:
        a, b = self.ends("a", "b")
        to_b, to_a = self.connect(a, b), self.connect(b, a)
        a.data.fill_(1)
        b.data.fill_(2)
        ops = [
            a.transport.write(to_b, [Span("data", 0, "data", 2048, 2048)]),
            b.transport.write(to_a, [Span("data", 0, "data", 2048, 2048)]),
        ]
        self.wait(a, ops[0], b)
        self.wait(b, ops[1], a)
        corners = [int(value) for value in (a.data[0], a.data[-1], b.data[0], b.data[-1])]
        assert corners == [1, 2, 2, 1]

    def test_spans_outside_a_region_are_refused_at_once(self) -> None:
        a, b = self.ends("a", "b")
        peer = self.connect(a, b)
        for span in (
            Span("data", 0, "data", 4000, 100),
            Span("data", 4000, "data", 0, 100),
            Span("data", -1, "data", 0, 10),
            Span("data", 0, "none", 0, 10),
            Span("data", 0, "data", 0, 0),
        ):
            write = functools.partial(a.transport.write, peer, [span])
            assert "leaves region" in raises(TransportError, write)

    def test_regions_are_registered_once_and_before_the_card(self) -> None:
        (a,) = self.ends("a")
        raises(TransportError, lambda: a.transport.register("data", torch.zeros(8)))
        a.transport.card()
        raises(TransportError, lambda: a.transport.register("late", torch.zeros(8)))
        other = self.make("strided")
        raises(TransportError, lambda: other.register("strided", torch.zeros(8, 8)[:, ::2]))

    def test_a_disconnected_peer_takes_no_transfer_and_others_do(self) -> None:
        a, b, c = self.ends("a", "b", "c")
        to_b, to_c = self.connect(a, b), self.connect(a, c)
        running = a.transport.write(to_b, [Span("data", 0, "data", 0, 4096)])
        a.transport.disconnect(to_b)
        assert running.done or isinstance(running.error, PeerLostError), "it is left running"
        raises(PeerLostError, lambda: a.transport.write(to_b, [Span("data", 0, "data", 0, 8)]))
        self.wait(a, a.transport.write(to_c, [Span("data", 0, "data", 0, 8)]), c)
        again = self.connect(a, b)
        self.wait(a, a.transport.write(again, [Span("data", 0, "data", 0, 8)]), b)

    def test_transfers_to_a_dead_peer_fail_and_its_next_life_connects(self) -> None:
        """A next life has a name of its own, so no card of the former is met."""
        a, b, c = self.ends("a", "b", "c")
        to_b, to_c = self.connect(a, b), self.connect(a, c)
        self.kill(b.transport)
        raises(
            PeerLostError,
            lambda: self.wait(a, a.transport.write(to_b, [Span("data", 0, "data", 0, 4096)]), c),
        )
        a.transport.disconnect(to_b)
        self.wait(a, a.transport.write(to_c, [Span("data", 0, "data", 0, 8)]), c)
        (reborn,) = self.ends("b, second life")
        self.wait(a, a.transport.write(self.connect(a, reborn), [Span("data", 0, "data", 0, 8)]), reborn)

    def test_waits_end_at_a_deadline_that_names_the_peer_or_at_a_fence(self) -> None:
        a, b = self.ends("a", "b")
        peer = self.connect(a, b)
        op = a.transport.write(peer, [Span("data", 0, "data", 0, 8)])
        self.wait(a, op, b)
        never = type(op)(peer)
        assert peer in raises(DeadlineError, lambda: wait(a.transport, [never], 0.01))
        raises(FencedError, lambda: wait(a.transport, [never], SECONDS, lambda: True))
