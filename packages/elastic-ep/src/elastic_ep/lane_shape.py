"""How large a lane is: fixed for the life of a group."""

import attrs

NOTE = 4
"""Values of the note that travels with every dispatch."""


@attrs.frozen
class LaneShape:
    """Capacity: a rank brings up to ``tokens`` of ``hidden`` values, each for ``top`` experts."""

    max_ranks: int
    slots: int
    tokens: int
    top: int
    hidden: int

    @property
    def rows(self) -> int:
        """Rows of one slot: all of a rank's tokens may go to one rank, for each of their experts."""
        return self.tokens * self.top
