"""Runs the real ttnn on clusters that are only described. The pytest plugin gives the fixture `tt_mock`.

`tt_mock.ttnn_shadows`, which imports ttnn, has values for what mock devices compute. What is named here is
imported when it is first asked for: pytest loads the plugin, and so this module, in every run.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tt_mock.calls import Calls
    from tt_mock.clusters import CLUSTERS, Cluster
    from tt_mock.errors import ChildError, ClusterError, TraceError, TTMockError, ValuesError
    from tt_mock.mock import MockClusters
    from tt_mock.traces import Traced

_HOMES = {
    "CLUSTERS": "clusters",
    "Calls": "calls",
    "Cluster": "clusters",
    "MockClusters": "mock",
    "Traced": "traces",
}

__all__ = [
    "CLUSTERS",
    "Calls",
    "ChildError",
    "Cluster",
    "ClusterError",
    "MockClusters",
    "TTMockError",
    "TraceError",
    "Traced",
    "ValuesError",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
