"""The tensor programs around an exchange, over static tensors: fit to be captured once and replayed while
ranks come and go.

Shapes never depend on who is there or on how many tokens there are. What is not sent, because it is padding
or because no rank holds its expert, goes to a dump: one more slot than there are ranks, which nobody reads.
"""

import torch

from elastic_ep.lane_shape import NOTE, LaneShape
from elastic_ep.runner import Static


def static_tensors(shape: LaneShape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the programs and the lane share.

    Given to each exchange: ``tokens`` ``[T, hidden]``, ``experts`` and ``weights`` ``[T, top]`` (logical
    experts, and what each counts), ``count`` (how many tokens there are; the rest is padding, whose experts
    may be -1) and ``turn``. It gives ``output`` ``[T, hidden]``. Between them lie ``in``
    ``[ranks + 1, rows, hidden]`` with ``in_head`` (a note of 4, then the slot of each row or -1), which the
    experts read, and ``results``, which they write.
    """
    ranks, rows, tokens = shape.max_ranks + 1, shape.rows, shape.tokens
    whole = torch.int64
    return {
        "tokens": torch.zeros((tokens, shape.hidden), dtype=dtype),
        "experts": torch.zeros((tokens, shape.top), dtype=whole),
        "weights": torch.zeros((tokens, shape.top), dtype=dtype),
        "count": torch.zeros(1, dtype=whole),
        "turn": torch.zeros(1, dtype=whole),
        "homes": torch.full((tokens, shape.top), -1, dtype=whole),
        "targets": torch.full((tokens, shape.top), shape.max_ranks, dtype=whole),
        "rows": torch.zeros((tokens, shape.top), dtype=whole),
        "ordinal": torch.arange(tokens * shape.top).view(tokens, shape.top),
        "ranks": torch.arange(ranks),
        "out": torch.zeros((ranks, rows, shape.hidden), dtype=dtype),
        "out_head": torch.full((ranks, NOTE + rows), -1, dtype=whole),
        "in": torch.zeros((ranks, rows, shape.hidden), dtype=dtype),
        "in_head": torch.full((ranks, NOTE + rows), -1, dtype=whole),
        "results": torch.zeros((ranks, rows, shape.hidden), dtype=dtype),
        "back": torch.zeros((ranks, rows, shape.hidden), dtype=dtype),
        "output": torch.zeros((tokens, shape.hidden), dtype=dtype),
    }


def pack(static: Static, shape: LaneShape, rank: int, slots: torch.Tensor, replicas: torch.Tensor) -> None:
    """Sort tokens into the slots of the ranks that hold their experts.

    ``slots`` ``[experts, ranks]`` and ``replicas`` ``[experts]`` are one layer's routing tables. Replicas
    are taken in turn.
    """
    ordinal, homes, targets, rows = (static[name] for name in ("ordinal", "homes", "targets", "rows"))
    experts = static["experts"]
    column = (ordinal + (static["turn"] + rank)) % replicas[experts].clamp(min=1)
    homes.copy_(torch.where(ordinal < static["count"] * shape.top, slots[experts, column], -1))
    # No home is -1, whose rank is then the last: the dump.
    targets.copy_(homes.div(shape.slots, rounding_mode="floor") % (shape.max_ranks + 1))
    flat = targets.view(-1, 1)
    rows.copy_((flat == static["ranks"]).cumsum(0).gather(1, flat).view_as(rows) - 1)
    static["out"][targets, rows] = static["tokens"][:, None, :].expand(-1, shape.top, -1)
    head = static["out_head"][:, NOTE:]
    head.fill_(-1)
    head[targets, rows] = homes % shape.slots
    static["in"][rank].copy_(static["out"][rank])
    static["in_head"][rank, NOTE:].copy_(head[rank])


def count(static: Static, load: torch.Tensor) -> None:
    """Add to one layer's ``load`` ``[experts]`` how often each expert is routed to."""
    experts = static["experts"]
    there = static["ordinal"] < static["count"] * experts.shape[1]
    load.scatter_add_(0, experts.flatten().clamp(min=0), there.flatten().to(load.dtype))


def unpack(static: Static, shape: LaneShape) -> None:
    """For each token the weighted sum over its experts.

    Experts that no rank holds count nothing, and the weights of a token's others make up for them.
    """
    weights, targets = static["weights"], static["targets"]
    lost = targets == shape.max_ranks
    held = torch.where(lost, 0, weights)
    sums = held.sum(dim=1, keepdim=True)
    scaled = held / torch.where(sums == 0, 1, sums) * weights.sum(dim=1, keepdim=True)
    effective = torch.where(lost.any(dim=1, keepdim=True), scaled, weights)
    parts = static["back"][targets, static["rows"]]
    static["output"].copy_(torch.bmm(effective[:, None], parts)[:, 0])
