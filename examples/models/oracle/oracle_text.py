"""The oracle's language: each next token is a function of all tokens before it, and of their places."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PRIME = 2**31 - 1
BASE = 48_271
LONGEST = 4_096
SPREAD = 8.0  # of the logits: wide enough that a draw is no coin toss, narrow enough that it is a draw

Ints = npt.NDArray[np.int64]
_POWERS: Ints = np.array([pow(BASE, position, PRIME) for position in range(LONGEST)])


def context_hash(tokens: Sequence[int] | Ints) -> int:
    """A number that changes with any token and its place."""
    values: Ints = (np.asarray(tokens) + 1) * _POWERS[: len(tokens)] % PRIME
    return int(values.sum() % PRIME)


def logits_of(value: int, vocab: int) -> Tensor:
    """float32 `[vocab]` for a context hash."""
    ids = np.arange(1, vocab + 1)
    noise = (value + ids * 7_919) % PRIME * (ids * ids + BASE) % PRIME
    return torch.from_numpy((noise / PRIME * SPREAD).astype(np.float32))


def continuation(prompt: Sequence[int], count: int, vocab: int) -> list[int]:
    """The greedy tokens that follow `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(context_hash(tokens), vocab).argmax()))
    return tokens[len(prompt) :]
