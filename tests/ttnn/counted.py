"""The real ttnn's calls, counted on their way."""

from typing import Any

import ttnn


class Counted:
    """Stands before two functions, and makes each call that it is asked for."""

    def __init__(self) -> None:
        self.fabrics: list[dict[str, Any]] = []
        self.closed = 0
        self._set_fabric, self._close = ttnn.set_fabric_config, ttnn.close_mesh_device
        ttnn.set_fabric_config, ttnn.close_mesh_device = self.set_fabric, self.close

    def set_fabric(self, config: Any, **others: Any) -> None:
        self.fabrics.append({"config": config.name} | {name: value.name for name, value in others.items()})
        self._set_fabric(config, **others)

    def close(self, mesh: Any) -> None:
        self.closed += 1
        self._close(mesh)
