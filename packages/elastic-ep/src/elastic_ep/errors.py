"""What elastic_ep raises.

ElasticError
├── PlanError            a placement or a plan was asked for that cannot be
│   └── SizeError        the ranks asked for cannot hold the experts
├── WireError            bytes that are no message of this version
├── TransportError       a transfer or a connection failed
│   ├── PeerLostError    the peer is gone or was disconnected
│   └── DeadlineError    a wait ended at its deadline; names the ranks waited for
├── FencedError          a wait was ended from outside (a fence)
├── LaneError            a step does not fit the lane's fixed slots
├── RequestError         a client asked over HTTP for what cannot be
├── LaunchError          a process could not be started
├── PatienceError        times that do not fit each other
├── ServeError           a rank cannot go on serving
├── GroupError           the group did not do what it was asked for
│   ├── BusyError        something else is running; nothing changed
│   ├── OutdatedError    the plan starts from a placement that does not serve any more
│   └── UnfinishedError  it goes on, but whoever asked has waited long enough
└── RunnerError          a captured program met addresses it was not captured with
"""


class ElasticError(Exception):
    """Root of everything this package raises on purpose."""


class PlanError(ElasticError):
    """A placement or plan cannot be: the message gives what was asked and what would be possible."""


class SizeError(PlanError):
    """The ranks asked for cannot hold the experts; the message gives the numbers."""


class WireError(ElasticError):
    """Bytes that do not decode to a message: damaged, cut short, or of another version."""


class TransportError(ElasticError):
    """A transfer or a connection failed."""


class PeerLostError(TransportError):
    """The peer is gone, or was disconnected here."""


class DeadlineError(TransportError):
    """A wait reached its deadline."""


class FencedError(ElasticError):
    """A wait was ended from outside, because the group fences a rank off."""


class LaneError(ElasticError):
    """A step does not fit the lane's fixed slots."""


class RequestError(ElasticError):
    """What a client sent over HTTP cannot be; the message says what would be."""


class LaunchError(ElasticError):
    """A process could not be started."""


class PatienceError(ElasticError):
    """Times were given with which ranks would give up before a hung one is noticed."""


class ServeError(ElasticError):
    """A rank cannot go on serving, and ends."""


class GroupError(ElasticError):
    """The group did not do what it was asked for: the message says why, `Group.state` how it is now."""


class BusyError(GroupError):
    """Something else is running, or has not ended yet, so nothing was begun: the message says what, and what
    to do.

    ``since`` is when that was asked for, in seconds since 1970; None for what nobody asked for, such as
    going on without a rank that died. A server answers 409.
    """

    def __init__(self, message: str, since: float | None) -> None:
        super().__init__(message)
        self.since = since


class OutdatedError(GroupError):
    """The placement changed since the plan was made, so nothing was begun: plan again."""


class UnfinishedError(GroupError):
    """What was begun goes on, but has not ended in the time given; the message says what it waits for."""


class RunnerError(ElasticError):
    """A captured program met addresses that it was not captured with."""
