"""The tables that a captured program reads: fixed in size and address, written in place when the group
changes."""

import torch

from elastic_ep.placement import EMPTY, Placement, Shape


class RoutingTables:
    """From logical experts to physical slots, on one device.

    ``slots`` is ``[layers, experts, max_ranks]`` int32: the physical ids of each expert's replicas in
    ascending order, padded with -1. An expert has at most one replica on a rank, so ``max_ranks`` columns
    always suffice. ``replicas`` is ``[layers, experts]`` int32: how many there are, 0 where an expert is
    lost. ``active`` is ``[max_ranks]`` bool: who takes part.
    """

    def __init__(self, shape: Shape, device: torch.device | str = "cpu") -> None:
        self.shape = shape
        self.slots = torch.full(
            (shape.layers, shape.experts, shape.max_ranks), EMPTY, dtype=torch.int32, device=device
        )
        self.replicas = torch.zeros((shape.layers, shape.experts), dtype=torch.int32, device=device)
        self.active = torch.zeros(shape.max_ranks, dtype=torch.bool, device=device)

    def write(self, tables: "RoutingTables") -> None:
        """Take over the contents of other tables, in place: three copies, which is all that a commit does."""
        self.slots.copy_(tables.slots)
        self.replicas.copy_(tables.replicas)
        self.active.copy_(tables.active)


def tables(placement: Placement, device: torch.device | str = "cpu") -> RoutingTables:
    """The tables of a placement; made while preparing, so that the commit only copies."""
    shape = placement.shape
    made = RoutingTables(shape, device)
    holders = [placement.holders(layer) for layer in range(shape.layers)]
    width = shape.max_ranks
    padded = [[(*ids, *[EMPTY] * (width - len(ids))) for ids in layer] for layer in holders]
    made.slots.copy_(torch.tensor(padded, dtype=torch.int32))
    made.replicas.copy_(torch.tensor([[len(ids) for ids in layer] for layer in holders], dtype=torch.int32))
    made.active[list(placement.ranks)] = True
    return made
