import itertools
import subprocess
import sys
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from tt_sampling import fresh_generator, step_generator, step_seed

SEEDS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.integers(0, 2**20)


def test_the_stream_never_changes_between_versions() -> None:
    assert step_seed(0, 0) == 0xE220A8397B1DCDAF  # the first number of SplitMix64 started from 0
    assert step_seed(0, 1) == 0x6E789E6AA1B965F4  # and the second
    assert step_seed(-1, 7) == 0xC62E5652A694833F
    assert step_seed(42, 1000) == 0xD810B893B111893A


@given(SEEDS, POSITIONS)
def test_valid_for_torch_and_deterministic(seed: int, position: int) -> None:
    assert 0 <= step_seed(seed, position) < 2**64
    draws = [torch.rand(4, generator=step_generator(seed, position)) for _ in range(2)]
    assert torch.equal(*draws)


@given(SEEDS, SEEDS, POSITIONS, POSITIONS)
def test_a_seed_or_a_position_alone_tells_apart(a: int, b: int, p: int, q: int) -> None:
    assert (step_seed(a, p) == step_seed(b, p)) == (a == b)
    assert (step_seed(a, p) == step_seed(a, q)) == (p == q)


def test_integers_of_any_width_are_taken() -> None:
    assert 0 <= step_seed(10**40, 3) < 2**64
    assert step_seed(2**64 - 1, 3) == step_seed(-1, 3)


def test_array_elements_are_not_overflowed() -> None:
    five: Any = torch.tensor(5, dtype=torch.int32)
    assert step_seed(five, five) == step_seed(5, 5)


def test_neighbouring_seeds_share_no_steps() -> None:
    seeds = [step_seed(seed, position) for seed in range(200) for position in range(200)]
    assert len(set(seeds)) == len(seeds)


def test_the_32_bits_that_torch_uses_are_well_spread() -> None:
    """Each bit is set in half the seeds and flips in half of all steps to the next position or seed."""
    count = 4000
    grid = [[step_seed(seed, position) for position in range(2)] for seed in range(count)]
    for bit in range(32):
        ones = sum(row[0] >> bit & 1 for row in grid)
        along = sum((row[0] ^ row[1]) >> bit & 1 for row in grid)
        across = sum((a[0] ^ b[0]) >> bit & 1 for a, b in itertools.pairwise(grid))
        for seen in (ones, along, across):
            assert abs(seen - count / 2) < 5 * (count / 4) ** 0.5


def test_first_draws_over_positions_are_uniform_and_uncorrelated() -> None:
    draws = torch.stack([torch.rand(1, generator=step_generator(1, p)) for p in range(4000)]).flatten()
    bins = torch.histc(draws, 16, 0, 1)
    assert ((bins - 250) ** 2 / 250).sum() < 44.3  # chi-square, 15 degrees of freedom, p = 1e-4
    assert abs(torch.corrcoef(torch.stack([draws[:-1], draws[1:]]))[0, 1]) < 0.08


def test_fresh_generators_ignore_torchs_global_seed() -> None:
    torch.manual_seed(0)
    first = torch.rand(4, generator=fresh_generator())
    torch.manual_seed(0)
    assert not torch.equal(first, torch.rand(4, generator=fresh_generator()))


def test_equal_in_another_process_with_other_threads() -> None:
    code = (
        "import torch; from tt_sampling import step_generator; torch.set_num_threads(2);"
        "print(torch.empty(50_000).exponential_(generator=step_generator(9, 4)).double().sum().item())"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = torch.empty(50_000).exponential_(generator=step_generator(9, 4)).double().sum().item()
    assert float(there.stdout) == here
