"""How prompts are cut into chunks of the sizes that a model was warmed up for."""

from collections.abc import Iterable, Sequence


def padded(tokens: int, sizes: Sequence[int]) -> int:
    """The tokens that a device computes for a chunk: the smallest of the ascending ``sizes`` that holds it.

    Longer chunks run as multiples of the largest size. Without sizes nothing is padded.
    """
    if not sizes:
        return tokens
    return next((size for size in sizes if size >= tokens), -(-tokens // sizes[-1]) * sizes[-1])


def pack(lengths: Iterable[int], budget: int, sizes: Sequence[int]) -> list[int]:
    """The tokens to take of each prompt, in order, so that all chunks, as padded, fit into ``budget``.

    A prompt that does not fit whole gives a chunk of the largest size that does, and is the last to give
    any; so only the ends of prompts are padded. Prompts that give nothing are left off the end.
    """
    taken = []
    for length in lengths:
        whole = padded(length, sizes) <= budget
        chunk = length if whole else max((size for size in sizes if size <= min(budget, length)), default=0)
        if not sizes and not whole:
            chunk = budget
        if chunk:
            taken.append(chunk)
            budget -= padded(chunk, sizes)
        if not whole or not budget:
            break
    return taken
