"""How a server ends, unless the user says with ``--shutdown-timeout``: soon, and with everything delivered.

In vLLM 0.33 one number means two things. A front end waits ``shutdown_timeout`` seconds for the engine and
then kills it. The engine lets its requests run on if the number is not 0, with no deadline of its own: if one
takes longer, the engine dies with the mesh open, and that request's client may wait for ever. With 0 on both
sides the engine is killed before its last outputs are sent. So the front ends get a number and the engine
gets 0: it ends its requests at once, sends what they have, and closes the mesh while the front ends wait.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FRONT_END_WAITS_S = 31
"""Time to close a large mesh; only a number that nobody gives by hand can be told from the user's own."""


def let_front_ends_wait(config: "VllmConfig") -> None:
    """Give the engine time to end."""
    if config.shutdown_timeout == 0:
        config.shutdown_timeout = _FRONT_END_WAITS_S


def let_the_engine_end_at_once(config: "VllmConfig") -> None:
    """Called with the configuration of the engine's own process, which no front end shares."""
    if config.shutdown_timeout == _FRONT_END_WAITS_S:
        config.shutdown_timeout = 0
