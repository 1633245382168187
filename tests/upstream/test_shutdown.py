"""What ending a server leans on in vLLM. Each test says what breaks with it."""

import functools
import signal
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import core
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.engine.utils import SignalCallback
from vllm_tt_plugin.shutdown import let_the_engine_end_at_once

from .conftest import MakeConfig
from .vllm_parts import make_scheduler


@pytest.mark.parametrize(("timeout", "aborted"), [(0, True), (5, False)])
def test_an_engine_ends_its_requests_at_once_only_with_a_timeout_of_0(timeout: int, aborted: bool) -> None:
    """If not: Ctrl-C waits for every request, or cuts off what an explicit --shutdown-timeout would drain."""
    ended: list[Any] = []
    scheduler = SimpleNamespace(
        get_num_unfinished_requests=lambda: 1, finish_requests=lambda names, _: ended.append(names)
    )
    engine: Any = SimpleNamespace(
        shutdown_state=EngineShutdownState.REQUESTED,
        vllm_config=SimpleNamespace(shutdown_timeout=timeout),
        scheduler=scheduler,
        has_work=lambda: True,
        _send_abort_outputs=lambda _: None,
    )
    assert EngineCoreProc._handle_shutdown(engine)
    assert bool(ended) is aborted


def test_the_engines_configuration_is_its_schedulers_and_is_set_up_again(make_config: MakeConfig) -> None:
    """vLLM runs `__post_init__` in the engine once more after the scheduler exists. If that brought the
    timeout back, the engine would drain without a deadline and be killed with the mesh open."""
    config = make_config()
    assert config.shutdown_timeout > 0
    scheduler = make_scheduler(config, kind=config.scheduler_config.get_scheduler_cls())
    assert scheduler.vllm_config is config
    assert config.shutdown_timeout == 0
    config.__post_init__()
    assert config.shutdown_timeout == 0


def test_a_timeout_that_the_user_gives_is_kept(make_config: MakeConfig) -> None:
    config = make_config(shutdown_timeout=5)
    make_scheduler(config, kind=config.scheduler_config.get_scheduler_cls())
    assert config.shutdown_timeout == 5


@pytest.fixture
def engines_handler() -> Iterator[FunctionType]:
    """What vLLM has the process of an engine do on SIGINT and SIGTERM, in place for both."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    codes = [c for c in EngineCoreProc.run_engine_core.__code__.co_consts if isinstance(c, CodeType)]
    code = next(code for code in codes if code.co_name == "signal_handler")
    cells = tuple(CellType() for _ in code.co_freevars)
    handler = FunctionType(code, vars(core), closure=cells)
    for number in before:
        signal.signal(number, handler)
    yield handler
    for number, old in before.items():
        signal.signal(number, old)


@pytest.mark.parametrize("front_ends", [1, 4])
def test_an_engine_heeds_one_signal(
    front_ends: int, engines_handler: FunctionType, make_config: MakeConfig
) -> None:
    """If the handler has another name, an engine takes two signals and may hang between them. One front end
    passes Ctrl-C on at once; several end first."""
    config = make_config()
    config.parallel_config._api_process_count = front_ends
    assert signal.getsignal(signal.SIGTERM) is engines_handler
    let_the_engine_end_at_once(config)
    heeds = signal.getsignal(signal.SIGTERM)
    assert heeds not in (engines_handler, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is (signal.SIG_IGN if front_ends == 1 else heeds)


def test_an_engine_in_a_users_process_leaves_its_signals_alone(
    engines_handler: FunctionType, make_config: MakeConfig
) -> None:
    own = functools.partial(print, "ends")  # without a name
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, own)
    let_the_engine_end_at_once(make_config())
    assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is own


def test_vllms_handler_may_not_be_interrupted_by_itself() -> None:
    """It sets this event. Should the event become one that can be set while it is being set, `first_only` has
    become needless."""
    callback: Any = SignalCallback(lambda: None)
    try:
        with callback._event._cond:  # as in the middle of `set`
            assert not callback._event._cond.acquire(blocking=False)
    finally:
        callback.stop()
