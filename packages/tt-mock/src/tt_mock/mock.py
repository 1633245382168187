"""What tests are given: environments and processes for mock clusters, in one folder."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from tt_mock.overlay import environment
from tt_mock.processes import call

NOTHING: Mapping[str, str] = MappingProxyType({})


@attrs.frozen
class MockClusters:
    """Kernels that one process built serve the next, so one of these is best shared by all tests."""

    folder: Path
    """Where ttnn writes: kernels that are stubs, and logs."""
    tools: Path
    """Where an assembler for RISC-V is unpacked if there is none on PATH."""
    start: Path
    """Where processes start."""

    def environment(self, cluster: str) -> dict[str, str]:
        """This process's variables, and those with which another opens `cluster`, a name of CLUSTERS.

        Raises ClusterError for another name, and where ttnn or an assembler is missing.
        """
        return environment(cluster, self.folder, self.tools, os.environ)

    def run(
        self,
        cluster: str,
        function: Callable[..., Any],
        *arguments: Any,
        env: Mapping[str, str] = NOTHING,
        timeout_s: float = 600,
    ) -> Any:
        """What `function(*arguments)` returns in a new process that has `cluster` for its hardware.

        Arguments and result pass as JSON; `function` is found by its module and name, and imports ttnn
        itself. `env`: more variables. Raises ChildError with the process's output when it fails.
        """
        variables = {**self.environment(cluster), **env}
        return call(function, *arguments, env=variables, folder=self.start, timeout_s=timeout_s)
