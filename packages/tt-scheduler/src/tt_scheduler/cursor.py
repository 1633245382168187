"""Where a request stands in a step, from counts alone."""

import enum

from tt_scheduler.errors import CursorError


class Standing(enum.Enum):
    """What the scheduled tokens of one request are."""

    FIRST_CHUNK = "first chunk"
    LATER_CHUNK = "later chunk"
    REPLAY = "replay"
    DECODE = "decode"

    @property
    def is_prefill(self) -> bool:
        return self is not Standing.DECODE


def standing(
    computed: int, scheduled: int, known_at_admission: int, known: int, generated_at_admission: int
) -> Standing:
    """Say what ``scheduled`` tokens from position ``computed`` on are.

    ``known_at_admission`` is how many tokens (prompt and generated) the request had when it last got its row,
    ``generated_at_admission`` how many of those it had generated itself, ``known`` how many it has now.
    The cursor is compared with ``known_at_admission``: the prompt's length would run the rest of a replay as
    decode, and ``known`` would make every steady decode look like prefill.

    Raises ``CursorError`` if a chunk reaches beyond what was known at admission, if a decode has other than
    one token, or if more is to be computed than is known.
    """
    end = computed + scheduled
    if scheduled < 1 or computed < 0 or end > known or generated_at_admission > known_at_admission > known:
        raise CursorError(
            f"computed {computed} + scheduled {scheduled} does not fit {known} known tokens"
            f" ({known_at_admission} at admission, {generated_at_admission} of them generated)"
        )
    if computed >= known_at_admission:
        if scheduled != 1:
            raise CursorError(f"a decode computes one token, not {scheduled} (from position {computed})")
        return Standing.DECODE
    if end > known_at_admission:
        raise CursorError(
            f"a chunk of {scheduled} from {computed} reaches beyond the {known_at_admission} tokens to prefill"
        )
    if generated_at_admission:
        return Standing.REPLAY
    return Standing.LATER_CHUNK if computed else Standing.FIRST_CHUNK


def is_last_chunk(computed: int, scheduled: int, known_at_admission: int) -> bool:
    """Whether this chunk completes the prefill, so that a token is sampled after it."""
    return computed + scheduled >= known_at_admission
