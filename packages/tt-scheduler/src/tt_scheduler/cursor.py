"""Where a request stands in a step, from counts alone."""

import enum

import attrs

from tt_scheduler.errors import CursorError


class Standing(enum.Enum):
    """What the scheduled tokens of one request are."""

    FIRST_CHUNK = "first chunk"
    LATER_CHUNK = "later chunk"
    REPLAY = "replay"
    DECODE = "decode"


@attrs.frozen
class Admission:
    """What a request had when it last got its row: on arrival, or on coming back after a preemption.

    ``known`` counts prompt and generated tokens, ``generated`` those of them that the request had generated
    itself, ``cached`` those whose keys and values a prefix cache already held.
    """

    known: int
    generated: int = 0
    cached: int = 0

    def __attrs_post_init__(self) -> None:
        if not (0 <= self.generated < self.known and 0 <= self.cached < self.known):
            raise CursorError(
                f"{self} cannot be: a request comes with a prompt and computes at least one token of it"
            )

    def standing(self, computed: int, scheduled: int, known: int) -> Standing:
        """Say what the ``scheduled`` tokens from position ``computed`` on are, ``known`` being known by now.

        The cursor is compared with what was known at admission: the prompt's length would run the rest of a
        replay as decode, and ``known`` would make every steady decode look like prefill.

        Raises ``CursorError`` if a chunk reaches beyond what was known at admission, a decode has other than
        one token, or the range leaves ``cached .. known``.
        """
        end = computed + scheduled
        if scheduled < 1 or computed < self.cached or end > known or known < self.known:
            raise CursorError(f"tokens {computed}..{end} of {known} known do not follow {self}")
        if computed >= self.known:
            if scheduled != 1:
                raise CursorError(f"a decode computes one token, not {scheduled} (from position {computed})")
            return Standing.DECODE
        if end > self.known:
            raise CursorError(f"a chunk {computed}..{end} reaches beyond the {self.known} tokens to prefill")
        if self.generated:
            return Standing.REPLAY
        return Standing.LATER_CHUNK if computed > self.cached else Standing.FIRST_CHUNK

    def completes(self, computed: int, scheduled: int) -> bool:
        """Whether a token is sampled after these tokens: true from the last chunk on."""
        return computed + scheduled >= self.known
