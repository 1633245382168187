"""What this package raises.

    TTPluginError
    ├── ConfigurationError     everything that is wrong with a configuration, in one message
    ├── MeshError              a mesh could not be opened
    └── StepError              a step plan contradicts what the runner holds: a fault of this package

``ConfigurationError`` is a ``ValueError`` too, which vLLM expects of a configuration it cannot use. A request
that cannot be served is refused with vLLM's own ``VLLMValidationError``: only that becomes an HTTP 400.
"""

from collections.abc import Sequence

import attrs


@attrs.frozen
class Problem:
    """One thing that is wrong with a configuration: what was found, and what to do about it."""

    found: str
    fix: str = ""
    """Empty where ``found`` already says what to do."""

    def __str__(self) -> str:
        return f"{self.found}. {self.fix}" if self.fix else self.found


class TTPluginError(Exception):
    """Base of every error of this package."""


class ConfigurationError(TTPluginError, ValueError):
    """Nothing was started; ``problems`` lists all that must change."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        head = "The Tenstorrent plugin cannot serve this configuration:"
        super().__init__("\n".join([head, *lines]))


class MeshError(TTPluginError):
    """The mesh of devices could not be opened."""


class StepError(TTPluginError):
    """Scheduler and runner disagree about a step. Please report it with the message."""
