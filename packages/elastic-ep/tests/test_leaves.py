"""Whether a member is to leave: with a stage that it is not in, until that is given up; a fence leaves it
open."""

import attrs
import pytest
from elastic_ep import (
    COORDINATOR,
    Abort,
    Boundary,
    Commit,
    CommitAt,
    Fence,
    Heard,
    Hello,
    Member,
    MemberPhase,
    Message,
    Placement,
    Prepare,
    PrepareEnded,
    Resume,
    Shape,
    act,
    join,
    place,
)
from elastic_ep.staging import Stage

SHAPE = Shape(layers=1, experts=2, slots=2, max_ranks=3)
ALL, FEWER = place(SHAPE, (0, 1, 2)), place(SHAPE, (0, 1))


def after(member: Member, *messages: Message) -> Member:
    for message in messages:
        member, _ = act(member, Heard(message))
    return member


@pytest.fixture
def leaver() -> Member:
    """Rank 2, which serves with 0 and 1 in epoch 1 and has prepared to leave in epoch 2."""
    joined = join(Hello(1, 0, 2, "model", b"card"))
    serving = attrs.evolve(joined, phase=MemberPhase.ACTIVE, placement=ALL, serving=1, step=5, applied=4)
    assert joined.leaves is False
    assert serving.leaves is False
    preparing = after(serving, Prepare(2, 0, COORDINATOR, Stage(FEWER), ()))
    assert preparing.leaves is True
    prepared, _ = act(preparing, PrepareEnded(preparing.ballot))
    assert prepared.phase == MemberPhase.PREPARED
    assert prepared.leaves is True
    return prepared


def test_it_stays_if_that_is_given_up(leaver: Member) -> None:
    assert after(leaver, Abort(2, 0, COORDINATOR, "cancelled")).leaves is False


def test_it_has_left_once_it_has_switched(leaver: Member) -> None:
    armed = after(leaver, Commit(2, 0, COORDINATOR), CommitAt(2, 0, 0, 5))
    assert armed.leaves is True
    switched, _ = act(armed, Boundary())
    assert (switched.phase, switched.serves, switched.leaves) == (MemberPhase.COMMITTED, False, True)


@pytest.mark.parametrize(("goes_on_with", "leaves"), [(ALL, False), (FEWER, True)])
def test_a_fence_leaves_it_open(leaver: Member, goes_on_with: Placement, leaves: bool) -> None:
    """The commit that it interrupted may be given up, or gone through with."""
    armed = after(leaver, Commit(2, 0, COORDINATOR), CommitAt(2, 0, 0, 5))
    fenced = after(armed, Fence(3, 0, COORDINATOR, ()))
    assert fenced.phase == MemberPhase.STOPPED
    assert fenced.leaves is None
    assert after(fenced, Resume(3, 0, COORDINATOR, goes_on_with, 5, True)).leaves is leaves
