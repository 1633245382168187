"""How prompts are cut into chunks of the sizes that a model was warmed up for."""

from collections.abc import Sequence


def padded(tokens: int, sizes: Sequence[int]) -> int:
    """The tokens that a device computes for a chunk: the smallest of the ascending ``sizes`` that holds it.

    Longer chunks run as multiples of the largest size. Without sizes nothing is padded.
    """
    if not sizes or not tokens:
        return tokens
    return next((size for size in sizes if size >= tokens), -(-tokens // sizes[-1]) * sizes[-1])


def cut(length: int, most: int, room: float, sizes: Sequence[int]) -> int:
    """The tokens of a prompt's next chunk, of ``length`` that are left to compute.

    At most ``most``, and as padded at most ``room``. What does not finish the prompt is one of the ascending
    ``sizes``, so that only the ends of prompts are padded; but a ``most`` below the smallest is taken as it
    is. 0 if there is no room. Without sizes, prompts are cut anywhere.
    """
    allowed = min(length, most)
    if not sizes:
        return int(min(allowed, room))
    if padded(allowed, sizes) <= room and (allowed == length or allowed < sizes[0]):
        return allowed
    return max((size for size in sizes if size <= min(allowed, room)), default=0)
