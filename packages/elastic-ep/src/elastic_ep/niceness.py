"""Priorities of threads: a joiner gets only time that nobody else wants."""

import os
import threading
from collections.abc import Callable

LOWEST = 19
"""The highest niceness: the lowest priority."""


def at_niceness[T](niceness: int, make: Callable[[], T]) -> T:
    """What ``make`` gives, made in a thread of this niceness: no thread may take back its own.

    At 19 it gets only time that nobody else wants. Any less leaves it its turn when others wake: measured
    where ranks fill two cores but for a sixth, one that computes took a quarter of their throughput at
    niceness 19 alone, and a twentieth this way. So on a host without any time left it may never end.
    """
    made: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            be_nice(niceness)
            made.append(make())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever asked
            raised.append(error)

    thread = threading.Thread(target=run, name="make")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return made[0]


def be_nice(niceness: int) -> None:
    """This thread alone, not its process; at 0 it stays as it is."""
    if niceness:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    if niceness == LOWEST:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
