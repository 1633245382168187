"""How a server ends, unless the user says with ``--shutdown-timeout``: soon, and with everything delivered.

In vLLM 0.33 one number means two things. A front end waits ``shutdown_timeout`` seconds for the engine and
then kills it. The engine lets its requests run on if the number is not 0, with no deadline of its own: if one
takes longer, the engine dies with the mesh open, and that request's client may wait for ever. With 0 on both
sides the engine is killed before its last outputs are sent. So the front ends get a number and the engine
gets 0: it ends its requests at once, sends what they have, and closes the mesh while the front ends wait.

Ctrl-C comes to an engine twice: as SIGINT from the terminal, and as SIGTERM from its front end. vLLM's
handler may not be interrupted by itself, since it sets an event: the engine would hang on the event's lock,
and its clients with it. And an idle engine is through with the first signal when the second comes, which
kills it with the mesh open. So an engine heeds one signal, and leaves SIGINT to a front end that passes it on
at once. Several front ends end before their engine is told to, so that one goes by SIGINT itself.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FRONT_END_WAITS_S = 31
"""Time to close a large mesh; only a number that nobody gives by hand can be told from the user's own."""

_ENGINES_HANDLER = "vllm.v1.engine.core", "EngineCoreProc.run_engine_core.<locals>.signal_handler"
"""Module and name of what vLLM has a process of an engine's own do when it is told to end."""

Handler = Callable[[int, FrameType | None], object]


def let_front_ends_wait(config: "VllmConfig") -> None:
    """Give the engine time to end."""
    if config.shutdown_timeout == 0:
        config.shutdown_timeout = _FRONT_END_WAITS_S


def let_the_engine_end_at_once(config: "VllmConfig") -> None:
    """Called where the engine is, with a configuration that no front end shares."""
    if config.shutdown_timeout == _FRONT_END_WAITS_S:
        config.shutdown_timeout = 0
    handler = signal.getsignal(signal.SIGTERM)
    if callable(handler) and _name_of(handler) == _ENGINES_HANDLER:
        heed = first_only(handler)
        one_front_end = config.parallel_config._api_process_count == 1
        signal.signal(signal.SIGINT, signal.SIG_IGN if one_front_end else heed)
        signal.signal(signal.SIGTERM, heed)


def _name_of(handler: Handler) -> tuple[str, str]:
    """Module and name; a user's handler may be any callable, and have neither."""
    return getattr(handler, "__module__", ""), getattr(handler, "__qualname__", "")


def first_only(handler: Handler) -> Handler:
    """``handler``, for the first signal that comes."""
    heeded = False

    def heed(signum: int, frame: FrameType | None) -> None:
        nonlocal heeded
        if not heeded:
            heeded = True
            handler(signum, frame)

    return heed


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Whoever tells this process to end meanwhile is not heard: a mesh that is left half closed must be reset
    by hand. Nothing changes where signals do not arrive, which is on other threads than the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: it was not set from Python, and cannot be put back from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
