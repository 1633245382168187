"""Programs compiled by torch.compile: captured once, replayed on the same memory. In a process of its own,
since the compiler takes long to import and stays."""

import pytest
import torch
from elastic_ep import RunnerError
from elastic_ep.runner import Static
from elastic_ep.runner_compiled import CompiledRunner


def double(static: Static) -> None:
    static["x"].copy_(2 * static["x"] + static["y"])


def test_compiled_once_and_replayed_on_what_the_tensors_hold_now() -> None:
    static = {"x": torch.ones(3), "y": torch.ones(3)}
    runners = [CompiledRunner() for _ in range(9)]
    for runner in runners:
        runner.capture(double, static)
    static["x"].fill_(1)
    runners[0].replay()
    static["y"].fill_(10)
    runners[8].replay()
    assert static["x"].tolist() == [16.0] * 3
    assert runners[0].fingerprint().captures == 1
    static["x"] = torch.ones(3)
    with pytest.raises(RunnerError, match=r"x from .* write contents in place"):
        runners[0].check()
    runners[0].capture(double, static)
    runners[0].check()
    assert runners[0].fingerprint().captures == 2
