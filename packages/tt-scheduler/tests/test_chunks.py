import pytest
from hypothesis import given
from hypothesis import strategies as st
from tt_scheduler import pack, padded

size_lists = st.sets(st.integers(1, 100), max_size=4).map(sorted)
lengths = st.lists(st.integers(1, 300), max_size=10)


@given(lengths, st.integers(0, 400), size_lists)
def test_packed_chunks_fit_as_padded(prompts: list[int], budget: int, sizes: list[int]) -> None:
    taken = pack(prompts, budget, sizes)
    assert sum(padded(tokens, sizes) for tokens in taken) <= budget
    assert all(0 < tokens <= length for tokens, length in zip(taken, prompts, strict=False))
    assert taken[:-1] == prompts[: len(taken[:-1])], "only the last prompt is cut"
    cut = [tokens for tokens, length in zip(taken, prompts, strict=False) if tokens < length]
    assert not sizes or set(cut) <= set(sizes), "only the end of a prompt is padded"
    if prompts and budget >= min(sizes or [1]):
        assert taken


@given(st.integers(1, 1000), size_lists)
def test_padding_adds_less_than_a_size(tokens: int, sizes: list[int]) -> None:
    length = padded(tokens, sizes)
    assert length >= tokens
    assert padded(length, sizes) == length
    assert not sizes or length in sizes or length % sizes[-1] == 0


@pytest.mark.parametrize(
    ("prompts", "budget", "taken"),
    [
        ([5000], 1024, [1024]),
        ([600, 600], 1024, [600]),  # 600 runs as 1024
        ([500, 600], 1024, [500, 512]),
        ([100, 100, 5000], 512, [100, 100, 256]),
        ([5000], 100, []),
        ([100, 5000], 200, [100]),
        ([], 1024, []),
    ],
)
def test_packing(prompts: list[int], budget: int, taken: list[int]) -> None:
    assert pack(prompts, budget, (128, 256, 512, 1024)) == taken
