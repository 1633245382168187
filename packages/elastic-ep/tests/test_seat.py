"""Times have to fit each other."""

import pytest
from elastic_ep import Patience, PatienceError
from hypothesis import given
from hypothesis import strategies as st

seconds = st.floats(0.01, 1000)


@given(lease=seconds, stall=seconds, give_up=seconds)
def test_a_rank_that_hangs_is_noticed_before_others_give_up_or_it_is_said(
    lease: float, stall: float, give_up: float
) -> None:
    """In a step it is silent after ``stall``, in a commit after ``give_up``."""
    in_time = max(stall, give_up) + lease < 2 * give_up
    try:
        Patience(lease=lease, beat=lease / 2, stall=stall, give_up=give_up)
    except PatienceError:
        assert not in_time
    else:
        assert in_time


def test_the_message_gives_the_times() -> None:
    with pytest.raises(PatienceError, match=r"give_up is 60.0 s: .* a lease \(120 s\)"):
        Patience(lease=120)
    for beat in (0, 1.0):
        with pytest.raises(PatienceError, match=rf"a beat each {beat} s for a lease of 1.0 s"):
            Patience(beat=beat)
