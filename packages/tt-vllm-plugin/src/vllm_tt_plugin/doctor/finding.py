"""What the doctor says."""

from typing import Literal

import attrs

from vllm_tt_plugin.errors import Problem


@attrs.frozen
class Finding:
    """One thing that was looked at.

    ``problem``: a server would not start; ``warning``: it may not do what was meant.
    """

    area: Literal["versions", "plugins", "devices", "mesh", "memory", "models"]
    level: Literal["ok", "warning", "problem"]
    found: str
    fix: str = ""

    @classmethod
    def of(cls, area: "Literal['devices', 'mesh', 'models']", problem: Problem) -> "Finding":
        """A refusal that a server would start with."""
        return cls(area, "problem", problem.found, problem.fix)
