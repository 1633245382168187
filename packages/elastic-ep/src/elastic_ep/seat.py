"""What the processes of a group are given at their start, and how they find the coordinator."""

import attrs

from elastic_ep.errors import PatienceError
from elastic_ep.links import Address
from elastic_ep.rendezvous import Meeting, Rendezvous
from elastic_ep.wire import Ballot

DIRECTOR = "director address"


@attrs.frozen
class Patience:
    """Seconds. ``lease``: how long a process may be silent before it is taken to hang; it speaks every
    ``beat``.

    ``prepare``: how long a stage may take to prepare. ``suspect``: how long a rank waits for another before
    it says so. ``stall``: how long the work between two waits, in a step or from one to the next, may take
    before its own rank takes it to hang and falls silent. ``give_up``: how long a rank waits at all, for a
    step and then for word of what became of it, before it ends, and for one peer while it prepares; so all
    loads and captures of one commit must take less, and each read of a joiner. ``leave``: how long a rank
    that has left may take to end and to close its device.
    """

    lease: float = 1.0
    beat: float = 0.1
    prepare: float = 120.0
    suspect: float = 0.5
    stall: float = 10.0
    give_up: float = 60.0
    leave: float = 10.0

    def __attrs_post_init__(self) -> None:
        """Those who wait for a rank that hangs wait for two times ``give_up``."""
        if not 0 < self.beat < self.lease:
            raise PatienceError(
                f"a beat each {self.beat} s for a lease of {self.lease} s: it must be more than 0 s and less "
                "than the lease, or all ranks lose theirs"
            )
        if not max(self.stall, self.give_up) + self.lease < 2 * self.give_up:
            raise PatienceError(
                f"give_up is {self.give_up} s: twice that must be more than a lease ({self.lease} s) and "
                f"give_up or stall ({self.stall} s), or ranks end before one that hangs is noticed"
            )


@attrs.frozen
class Seat:
    """A rank's process: who it is, where the others are found, the niceness at which it prepares to join, and
    how often, in seconds, it reports what it has counted of the experts' load (0: it counts nothing)."""

    rank: int
    ballot: Ballot
    meeting: Meeting
    patience: Patience
    niceness: int = 0
    counting: float = 0.0


def publish_director(rendezvous: Rendezvous, address: Address) -> None:
    rendezvous.publish(DIRECTOR, f"{address[0]}:{address[1]}".encode())


def find_director(rendezvous: Rendezvous) -> Address | None:
    """Where the coordinator listens, if there is one."""
    found = rendezvous.look(DIRECTOR)
    if found is None:
        return None
    host, _, port = found.decode().rpartition(":")
    return host, int(port)
