"""Runs a function in a process with a mock cluster, and tells which ttnn calls of the project were made."""

import importlib
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tt_mock
from tt_mock import Calls

from .calls import FILES, called, mentioned

STAND_INS = (Path(tt_mock.__file__).parent, Path(__file__).with_name("counted.py"))
"""Where code makes each call that it is asked for."""


def run(function: str, arguments: Sequence[Any]) -> dict[str, Any]:
    """`functions` are those of ttnn that the project calls, or has in hand to be called by another."""
    import ttnn

    module, _, name = function.rpartition(".")
    in_hand = {use for use in mentioned() if _is_function(operator.attrgetter(use)(ttnn))}
    watch = Calls(ttnn, called() | in_hand, [*FILES, *STAND_INS])
    returned = getattr(importlib.import_module(module), name)(*arguments)
    return {"returned": returned, "functions": sorted(called() | in_hand), "made": sorted(watch.made)}


def _is_function(found: Any) -> bool:
    return callable(found) and not isinstance(found, type)
