"""Classes of checks, and how a test tells what came of each."""

import ast
import traceback
from pathlib import Path
from typing import Any

import pytest


def names_in(file: str) -> list[str]:
    """The checks in a file of this folder, read and not imported: it imports ttnn."""
    tree = ast.parse(Path(__file__).with_name(file).read_text())
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    ]


def outcomes(checks: type, *given: Any) -> dict[str, str]:
    """Of each check, on an object of its own: how it failed, or nothing."""
    found = {}
    for name in [name for name in dir(checks) if name.startswith("check_")]:
        try:
            getattr(checks(*given), name)()
            found[name] = ""
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 (told to the test, which fails)
            found[name] = traceback.format_exc()
    return found
