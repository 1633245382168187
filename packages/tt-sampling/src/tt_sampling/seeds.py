"""The random stream of a request: for each token a generator made from the request's seed and the position.

Nothing is carried from step to step, so a request draws the same whether it is alone or in a batch, in
whichever row or lane, resumed after preemption, on the device's route or the host's.
"""

import secrets

import torch

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, odd


def step_seed(seed: int, position: int) -> int:
    """The seed, 0 to 2**64 - 1, for the token at `position` of the request with `seed`.

    `seed` is any integer, taken modulo 2**64, so that all signed 64-bit seeds are told apart. `position`
    counts from the start of the prompt: the first token generated after n prompt tokens has position n.
    For one seed all positions give different values, and for one position all seeds do. PyTorch's CPU
    generator uses only the lowest 32 bits of a seed; the mixing makes those depend on every bit given.

    This is output number `position` of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", 2014) started from the mixed seed; unmixed, seed s + gamma would repeat the stream
    of s one position later.
    """
    return _mix(_mix(int(seed)) + (int(position) + 1) * _GAMMA)


def step_generator(seed: int, position: int) -> torch.Generator:
    """A fresh CPU generator for the token at `position` of the request with `seed`."""
    return torch.Generator().manual_seed(step_seed(seed, position))


def fresh_generator() -> torch.Generator:
    """A CPU generator for a row without a seed: from the operating system's randomness, since the engine
    seeds torch's global generator with the same number in every run."""
    return torch.Generator().manual_seed(secrets.randbits(64))


def _mix(value: int) -> int:
    """SplitMix64's finalizer, a bijection of 64-bit words (Stafford's variant 13 of MurmurHash3's)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
