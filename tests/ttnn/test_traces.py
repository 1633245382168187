"""TT traces behind elastic-ep's interface of graph runners, on a mock N150. `trace_checks` says what of it is
not executed."""

from .conftest import Watched


def outcomes(mock: Watched) -> dict[str, str]:
    found: dict[str, str] = mock.run("n150", "trace_checks.outcomes")
    return found


def test_a_trace_is_captured_once_and_replayed_on_what_its_tensors_hold(mock: Watched) -> None:
    found = outcomes(mock)
    assert len(found) == 6
    failed = {name: how for name, how in found.items() if how}
    assert not failed, "\n".join(failed.values())
