"""One process for each cluster, and the ttnn calls that each made."""

import json
from typing import Any

import attrs
import pytest
from tt_mock import MockClusters

from . import watched


@attrs.frozen
class Watched:
    """Mock clusters whose processes tell which ttnn calls of the project they made. No run is made twice."""

    clusters: MockClusters
    functions: set[str] = attrs.field(factory=set, init=False)
    made: set[str] = attrs.field(factory=set, init=False)
    _returned: dict[str, Any] = attrs.field(factory=dict, init=False)

    def run(self, cluster: str, function: str, *arguments: Any, **env: str) -> Any:
        """`function`: the name of one in a module of this folder, which is imported in the process only."""
        key = json.dumps([cluster, function, arguments, env])
        if key not in self._returned:
            told = self.clusters.run(cluster, watched.run, f"{__package__}.{function}", arguments, env=env)
            self.functions.update(told["functions"])
            self.made.update(told["made"])
            self._returned[key] = told["returned"]
        return self._returned[key]


@pytest.fixture(scope="session")
def mock(tt_mock: MockClusters) -> Watched:
    return Watched(tt_mock)
