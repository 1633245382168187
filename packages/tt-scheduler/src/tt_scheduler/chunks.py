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
        chunk = length
        if padded(length, sizes) > budget:
            chunk = max((size for size in sizes or [budget] if size <= budget), default=0)
        if not chunk:
            break
        taken.append(chunk)
        budget -= padded(chunk, sizes)
        if chunk < length:
            break
    return taken
