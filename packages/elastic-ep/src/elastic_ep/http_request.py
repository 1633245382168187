"""What a client asks of a group over HTTP, and which ranks that means."""

import json

import attrs

from elastic_ep.control import Coordinator
from elastic_ep.errors import PlanError, RequestError

DRAIN_TIMEOUT = 120
"""Seconds, as vLLM has it."""

LONGEST = 86400
"""Seconds that a client may wait."""

KNOWN = ("new_data_parallel_size", "ranks", "drain_timeout", "wait")


@attrs.frozen
class Wanted:
    """The ranks, or how many; how long to wait for the end, if at all."""

    goal: tuple[int, ...] | int
    seconds: int
    wait: bool

    def target(self, state: Coordinator) -> tuple[int, ...]:
        """The ranks: of a size, the highest leave and the lowest free ones join. Raises PlanError if there
        cannot be so many."""
        if isinstance(self.goal, tuple):
            return self.goal
        size, serving, most = self.goal, state.placement.ranks, state.placement.shape.max_ranks
        if size > most:
            raise PlanError(
                f"new_data_parallel_size {size} is too large: the group was made for {most} ranks"
            )
        free = sorted(set(range(most)) - set(serving), key=lambda rank: (rank in state.gone, rank))
        return tuple(sorted((*serving[:size], *free[: max(0, size - len(serving))])))


def read(body: bytes) -> Wanted:
    """Of a request to scale. Raises RequestError."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(f"the body is no JSON object but {fields!r:.80}")
    unknown = sorted(set(fields) - set(KNOWN))
    if unknown:
        raise RequestError(f"{unknown} are not known; there are {list(KNOWN)}")
    goal = _goal(fields.get("ranks"), fields.get("new_data_parallel_size"))
    seconds, wait = fields.get("drain_timeout", DRAIN_TIMEOUT), fields.get("wait", True)
    if type(seconds) is not int or not 0 < seconds <= LONGEST:
        raise RequestError(
            f"drain_timeout must be a positive integer of at most {LONGEST}, not {seconds!r:.80}"
        )
    if type(wait) is not bool:
        raise RequestError(f"wait must be true or false, not {wait!r:.80}")
    return Wanted(goal, seconds, wait)


def _goal(ranks: object, size: object) -> tuple[int, ...] | int:
    if (size is None) == (ranks is None):
        raise RequestError("either new_data_parallel_size is required, or ranks")
    if ranks is None:
        if type(size) is not int or size <= 0:
            raise RequestError(f"new_data_parallel_size must be a positive integer, not {size!r:.80}")
        return size
    if not isinstance(ranks, list) or not ranks or not all(type(rank) is int for rank in ranks):
        raise RequestError(f"ranks must be a list of integers, not {ranks!r:.80}")
    return tuple(ranks)
