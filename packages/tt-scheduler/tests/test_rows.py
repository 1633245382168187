import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tt_scheduler import RowAccount, RowError

CAPACITY = 5
requests = st.sampled_from([f"r{number}" for number in range(8)])


class RowsAgainstADictionary(RuleBasedStateMachine):
    """An account that decides, a copy that follows by `claim`, and a plain dictionary: all agree."""

    def __init__(self) -> None:
        super().__init__()
        self.account = RowAccount(CAPACITY)
        self.copy = RowAccount(CAPACITY)
        self.model: dict[str, int] = {}

    def free(self) -> list[int]:
        return sorted(set(range(CAPACITY)) - set(self.model.values()))

    @rule(request=requests)
    def take(self, request: str) -> None:
        if request in self.model or not self.free():
            with pytest.raises(RowError):
                self.account.take(request)
            return
        row = self.account.take(request)
        assert row == self.free()[0]
        self.copy.claim(request, row)
        self.model[request] = row

    @rule(request=requests)
    def release(self, request: str) -> None:
        row = self.model.pop(request, None)
        assert self.account.release(request) == row
        assert self.account.release(request) is None
        assert self.copy.release(request) == row

    @precondition(lambda self: self.model)
    @rule(data=st.data(), stranger=requests)
    def claim_a_held_row(self, data: st.DataObject, stranger: str) -> None:
        held = data.draw(st.sampled_from(sorted(self.model.values())))
        with pytest.raises(RowError):
            self.copy.claim(stranger, held)

    @precondition(lambda self: self.model and self.free())
    @rule(data=st.data())
    def claim_a_second_row(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.model)))
        row = data.draw(st.sampled_from(self.free()))
        with pytest.raises(RowError, match="already, yet was given"):
            self.copy.claim(request, row)

    @rule(row=st.sampled_from([-1, CAPACITY]))
    def claim_outside(self, row: int) -> None:
        with pytest.raises(RowError, match=r"not free \(capacity 5\)"):
            self.copy.claim("stranger", row)

    @rule(data=st.data(), request=requests)
    def claim_any_free_row(self, data: st.DataObject, request: str) -> None:
        """Not only the lowest: the next `take` must still find the lowest of those left."""
        if request in self.model or not self.free():
            return
        row = data.draw(st.sampled_from(self.free()))
        self.account.claim(request, row)
        self.copy.claim(request, row)
        self.model[request] = row

    @invariant()
    def all_agree(self) -> None:
        assert dict(self.account.owned) == dict(self.copy.owned) == self.model
        assert len(set(self.model.values())) == len(self.model)


TestRowsAgainstADictionary = RowsAgainstADictionary.TestCase


def test_the_view_of_owners_is_read_only_and_live() -> None:
    account = RowAccount(2)
    owned = account.owned
    account.take("a")
    assert owned == {"a": 0}
    with pytest.raises(TypeError):
        owned["b"] = 1  # type: ignore[index]


def test_messages_say_who_holds_what() -> None:
    account = RowAccount(1)
    account.take("a")
    with pytest.raises(RowError, match="'a' holds row 0 already; release it first"):
        account.take("a")
    with pytest.raises(RowError, match="no row is free for 'b': all 1 are held"):
        account.take("b")


def test_a_capacity_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        RowAccount(0)
