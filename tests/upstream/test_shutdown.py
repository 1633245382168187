"""What ending a server leans on in vLLM. Each test says what breaks with it."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

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
