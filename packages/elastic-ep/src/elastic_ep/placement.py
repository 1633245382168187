"""Where each logical expert lives: capacity is shape, membership is data.

A physical id is ``rank * slots + slot`` for every rank the group could ever have, so it stays the same while
ranks come and go. Rank ids are sparse: any rank may be absent, rank 0 too.
"""

from collections.abc import Iterable, Mapping

import attrs

from elastic_ep.errors import PlanError

EMPTY = -1
"""The entry of a physical slot that routes nothing."""


def _positive(instance: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    if value < 1:
        raise PlanError(f"{attribute.name} is {value}; it must be at least 1")


@attrs.frozen
class Shape:
    """What is fixed at start and never changes afterwards.

    ``slots`` counts the physical expert slots of one rank in one layer; ``max_ranks`` bounds rank ids and
    sizes every table.
    """

    layers: int = attrs.field(validator=_positive)
    experts: int = attrs.field(validator=_positive)
    slots: int = attrs.field(validator=_positive)
    max_ranks: int = attrs.field(validator=_positive)

    @property
    def physical(self) -> int:
        """Physical slots of one layer, over all ranks there could be."""
        return self.max_ranks * self.slots

    def rank_of(self, physical: int) -> int:
        return physical // self.slots


@attrs.frozen
class Placement:
    """Which logical expert each physical slot serves.

    ``table[layer][physical]`` is a logical expert or `EMPTY`. Slots of absent ranks are empty, and no rank
    holds an expert twice in one layer, so an expert has at most ``max_ranks`` replicas. Raises PlanError
    otherwise.
    """

    shape: Shape
    ranks: tuple[int, ...]
    table: tuple[tuple[int, ...], ...]

    def __attrs_post_init__(self) -> None:
        check_ranks(self.shape, self.ranks)
        sizes = {len(row) for row in self.table}
        if len(self.table) != self.shape.layers or sizes != {self.shape.physical}:
            raise PlanError(
                f"the table has {len(self.table)} layers of {sorted(sizes)} slots; "
                f"expected {self.shape.layers} layers of {self.shape.physical}"
            )
        for layer in range(self.shape.layers):
            for rank in range(self.shape.max_ranks):
                self._check_rank(layer, rank)

    def _check_rank(self, layer: int, rank: int) -> None:
        held = [expert for expert in self.row(layer, rank) if expert != EMPTY]
        if held and rank not in self.ranks:
            raise PlanError(f"layer {layer}: rank {rank} holds experts {held} but is not one of {self.ranks}")
        if len(set(held)) != len(held):
            raise PlanError(f"layer {layer}: rank {rank} holds an expert twice: {held}")
        if held and not 0 <= min(held) <= max(held) < self.shape.experts:
            last = self.shape.experts - 1
            raise PlanError(f"layer {layer}: rank {rank} holds {held}; experts are 0 to {last}")

    def row(self, layer: int, rank: int) -> tuple[int, ...]:
        """The slots of one rank in one layer: ``[slots]``."""
        start = rank * self.shape.slots
        return self.table[layer][start : start + self.shape.slots]

    def holders(self, layer: int) -> tuple[tuple[int, ...], ...]:
        """For each logical expert of the layer, its physical ids in ascending order."""
        found: list[list[int]] = [[] for _ in range(self.shape.experts)]
        for physical, expert in enumerate(self.table[layer]):
            if expert != EMPTY:
                found[expert].append(physical)
        return tuple(tuple(ids) for ids in found)

    def missing(self) -> tuple[tuple[int, int], ...]:
        """``(layer, expert)`` of every expert that no rank holds."""
        return tuple(
            (layer, expert)
            for layer in range(self.shape.layers)
            for expert, ids in enumerate(self.holders(layer))
            if not ids
        )

    def without(self, dead: Iterable[int]) -> "Placement":
        """The same placement after ranks are gone: surviving replicas stay, nothing moves."""
        gone = set(dead)
        kept = tuple(rank for rank in self.ranks if rank not in gone)
        slots = self.shape.slots
        table = tuple(
            tuple(EMPTY if physical // slots in gone else expert for physical, expert in enumerate(row))
            for row in self.table
        )
        return Placement(self.shape, kept, table)

    def evolve(self, ranks: Iterable[int], changes: Mapping[tuple[int, int], int]) -> "Placement":
        """This placement with other members and with the slots ``(layer, physical)`` set anew."""
        table = [list(row) for row in self.table]
        for (layer, physical), expert in changes.items():
            table[layer][physical] = expert
        return Placement(self.shape, tuple(sorted(ranks)), tuple(tuple(row) for row in table))


def nobody(shape: Shape) -> Placement:
    """The placement of a group without ranks."""
    return Placement(shape, (), ((EMPTY,) * shape.physical,) * shape.layers)


def check_ranks(shape: Shape, ranks: tuple[int, ...]) -> None:
    """Raise PlanError unless ``ranks`` are ascending, distinct and below ``max_ranks``."""
    if list(ranks) != sorted(set(ranks)):
        raise PlanError(f"ranks {ranks} must be ascending and distinct")
    if ranks and not 0 <= ranks[0] <= ranks[-1] < shape.max_ranks:
        raise PlanError(f"ranks {ranks} must lie between 0 and {shape.max_ranks - 1}")
