"""A rank's process, from its start to its end."""

import contextlib
import signal
import sys
from collections.abc import Callable

from elastic_ep.errors import ElasticError
from elastic_ep.niceness import at_niceness
from elastic_ep.rank import Rank
from elastic_ep.runner import Runner
from elastic_ep.seat import Seat
from elastic_ep.service import Service
from elastic_ep.transport import Transport

SWITCH_INTERVAL = 0.0005
"""Seconds after which a thread lets others run: word of a fence must not wait for the serving one."""


def run_rank(
    seat: Seat,
    build: Callable[[int], Service],
    make_transport: Callable[[str], Transport],
    make_runner: Callable[[], Runner],
) -> None:
    """Serve as this rank until it leaves. ``build`` makes the model of a rank; transports get a name that no
    other process ever has.

    A device is closed then, or at a SIGTERM: so a group ends that has some. One that raises does not wait for
    its device, since others wait for the end of its process.
    """

    def make() -> Rank:
        return Rank(seat, build(seat.rank), make_transport, make_runner)

    sys.setswitchinterval(SWITCH_INTERVAL)
    rank = at_niceness(seat.niceness, make)
    if rank.service.device is None:
        rank.serve()
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        rank.serve()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except SystemExit:
        with contextlib.suppress(ElasticError):
            rank.close()
    rank.service.device.close()


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit
