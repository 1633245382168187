"""TT traces behind the runner interface, through the real ttnn on a mock N150. `trace_checks` says what of it
is not executed."""

from tt_mock import MockClusters


def outcomes() -> dict[str, str]:
    """In the process with the mock cluster: this one shall not import ttnn."""
    from . import trace_checks

    return trace_checks.outcomes()


def test_a_trace_is_captured_once_and_replayed_on_what_its_tensors_hold(tt_mock: MockClusters) -> None:
    found = tt_mock.run("n150", outcomes)
    assert len(found) == 5
    failed = {name: how for name, how in found.items() if how}
    assert not failed, "\n".join(failed.values())
