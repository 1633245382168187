"""Expert-parallel groups that grow and shrink while they serve."""

from elastic_ep.errors import (
    DeadlineError,
    ElasticError,
    FencedError,
    LaneError,
    PeerLostError,
    PlanError,
    RunnerError,
    SizeError,
    TransportError,
    WireError,
)
from elastic_ep.placement import EMPTY, Placement, Shape, nobody
from elastic_ep.plan import Plan, place, rebalance, resize
from elastic_ep.routing import RoutingTables, tables
from elastic_ep.staging import Copy, DensePull, Reload, Stage, stages

__all__ = [
    "Copy",
    "DeadlineError",
    "DensePull",
    "EMPTY",
    "ElasticError",
    "FencedError",
    "LaneError",
    "PeerLostError",
    "Placement",
    "Plan",
    "PlanError",
    "Reload",
    "RoutingTables",
    "RunnerError",
    "Shape",
    "SizeError",
    "Stage",
    "TransportError",
    "WireError",
    "nobody",
    "place",
    "rebalance",
    "resize",
    "stages",
    "tables",
]
