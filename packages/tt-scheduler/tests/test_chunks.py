import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tt_scheduler import cut, padded

size_lists = st.sets(st.integers(1, 100), max_size=4).map(sorted)
tokens = st.integers(1, 300)


@given(tokens, tokens, st.integers(0, 400) | st.just(math.inf), size_lists)
def test_a_chunk_is_the_end_of_its_prompt_or_of_a_size(
    length: int, most: int, room: float, sizes: list[int]
) -> None:
    chunk = cut(length, most, room, sizes)
    assert 0 <= chunk <= min(length, most)
    assert padded(chunk, sizes) <= room
    if sizes and 0 < chunk < length:
        assert chunk in sizes or chunk == most < sizes[0]
    if room >= min(sizes or [1]):
        assert chunk


@given(tokens, size_lists)
def test_padding_adds_less_than_a_size(length: int, sizes: list[int]) -> None:
    whole = padded(length, sizes)
    assert whole >= length
    assert padded(whole, sizes) == whole
    assert not sizes or whole in sizes or whole % sizes[-1] == 0


@pytest.mark.parametrize(
    ("length", "most", "room", "chunk"),
    [
        (5000, 2048, math.inf, 1024),
        (600, 2048, math.inf, 600),
        (600, 2048, 1023, 512),  # 600 runs as 1024
        (600, 599, math.inf, 512),
        (600, 100, 2048, 100),
        (600, 100, 127, 0),
        (100, 2048, 127, 0),
        (100, 2048, 128, 100),
    ],
)
def test_cutting(length: int, most: int, room: float, chunk: int) -> None:
    assert cut(length, most, room, (128, 256, 512, 1024)) == chunk
