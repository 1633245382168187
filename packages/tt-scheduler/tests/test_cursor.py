"""A request's life is played here token by token, and `Admission` must name each step from counts alone."""

from collections import deque
from collections.abc import Iterator, Sequence

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tt_scheduler import Admission, CursorError, Standing


@attrs.frozen
class Step:
    """What was computed in one step, and what the player knows it to be."""

    computed: int
    scheduled: int
    known: int
    standing: Standing
    samples: bool


def stay(tokens: list[str], hit: int, sizes: Sequence[int], decodes: int) -> Iterator[Step]:
    """Play one stay on a row: refill the cache beyond `hit` in chunks of `sizes`, then decode.

    `tokens` holds the kind of each known token and grows by each that is sampled.
    """
    missing = deque(range(hit, len(tokens)))
    replay, first = "generated" in tokens, True
    for size in sizes:
        chunk = [missing.popleft() for _ in range(min(size, len(missing)))]
        if not chunk:
            break
        fresh = Standing.FIRST_CHUNK if first else Standing.LATER_CHUNK
        standing = Standing.REPLAY if replay else fresh
        yield Step(chunk[0], len(chunk), len(tokens), standing, samples=not missing)
        first = False
    if missing:
        return
    tokens.append("generated")
    for _ in range(decodes):
        yield Step(len(tokens) - 1, 1, len(tokens), Standing.DECODE, samples=True)
        tokens.append("generated")


def check(admission: Admission, step: Step) -> None:
    assert admission.standing(step.computed, step.scheduled, step.known) is step.standing
    assert admission.completes(step.computed, step.scheduled) is step.samples


def chunkings(length: int) -> Iterator[list[int]]:
    """Every way to cut `length` tokens into chunks."""
    if not length:
        yield []
    for size in range(1, length + 1):
        for rest in chunkings(length - size):
            yield [size, *rest]


@pytest.mark.parametrize("prompt", [1, 2, 5])
@pytest.mark.parametrize("generated", [0, 1, 3])
def test_every_cursor_value_of_a_stay(prompt: int, generated: int) -> None:
    known = prompt + generated
    for hit in range(known):
        admission = Admission(known, generated, hit)
        for sizes in chunkings(known - hit):
            tokens = ["prompt"] * prompt + ["generated"] * generated
            steps = list(stay(tokens, hit, sizes, decodes=4))
            assert len(steps) == len(sizes) + 4
            for step in steps:
                check(admission, step)


@given(st.integers(1, 60), st.data())
def test_a_life_with_preemptions(prompt: int, data: st.DataObject) -> None:
    tokens = ["prompt"] * prompt
    for _ in range(data.draw(st.integers(1, 5), label="stays")):
        hit = data.draw(st.integers(0, len(tokens) - 1), label="prefix hit")
        admission = Admission(len(tokens), tokens.count("generated"), hit)
        sizes = data.draw(st.lists(st.integers(1, 20), max_size=8), label="chunks")
        for step in stay(tokens, hit, sizes, data.draw(st.integers(0, 5), label="decodes")):
            check(admission, step)


@pytest.mark.parametrize("counts", [(0,), (-1,), (3, 3), (3, 4), (3, -1), (3, 0, 3), (3, 0, -1)])
def test_an_admission_that_cannot_be(counts: tuple[int, ...]) -> None:
    with pytest.raises(CursorError, match="cannot be"):
        Admission(*counts)


@pytest.mark.parametrize(
    ("computed", "scheduled", "known", "says"),
    [
        (4, 0, 10, "do not follow"),
        (4, -1, 10, "do not follow"),
        (3, 2, 10, "do not follow"),  # the cache held 4 tokens
        (4, 2, 9, "do not follow"),  # fewer known than at admission
        (4, 7, 10, "do not follow"),  # more computed than known
        (10, 1, 10, "do not follow"),
        (4, 7, 11, "beyond the 10 tokens to prefill"),
        (9, 2, 11, "beyond the 10 tokens to prefill"),
        (10, 2, 12, "one token, not 2"),
    ],
)
def test_counts_that_contradict_one_another(computed: int, scheduled: int, known: int, says: str) -> None:
    with pytest.raises(CursorError, match=says):
        Admission(known=10, generated=2, cached=4).standing(computed, scheduled, known)
