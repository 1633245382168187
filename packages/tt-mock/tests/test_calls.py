"""Calls are seen by their target and their place. A watch lasts as long as its process does."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tt_mock.processes import call

WATCHED = """
import json, math, shutil

def go(json):
    "hex is not called"
    json.dumps(*[1], **{"indent": 2})  # in Python, with arguments unpacked
    give(math.sqrt)
    return [math.gcd(*[4, 6])]

def give(function):
    return function(4.0)

class Later:
    def go(self):
        return shutil.which("no such")
"""


def made(folder: str, places: list[str]) -> list[str]:
    """Which of five functions are called, where `places` count."""
    import json
    import math
    import shutil

    from tt_mock import Calls

    package: Any = SimpleNamespace(json=json, math=math, shutil=shutil)
    names = ["json.dumps", "json.loads", "math.sqrt", "math.gcd", "math.exp", "shutil.which"]
    calls = Calls(package, names, [Path(folder, place) for place in places])
    sys.path.insert(0, folder)
    import other  # type: ignore[import-not-found]
    import watched  # type: ignore[import-not-found]

    watched.go(json)
    watched.Later().go()
    other.go()
    json.loads("1")
    return sorted(calls.made)


def watch_for_what_is_not_there() -> None:
    import json

    from tt_mock import Calls

    Calls(json, ["dumps", "dump_all"], [])


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (["watched.py"], ["json.dumps", "math.gcd", "math.sqrt", "shutil.which"]),
        (["other.py"], ["math.exp"]),
        (["."], ["json.dumps", "math.exp", "math.gcd", "math.sqrt", "shutil.which"]),
        ([], []),
    ],
)
def test_calls_count_by_their_place(places: list[str], expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "watched.py").write_text(WATCHED)
    (tmp_path / "other.py").write_text("import math\ndef go():\n    return math.exp(1)\n")
    assert call(made, str(tmp_path), places, env=os.environ, folder=tmp_path) == expected


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="AttributeError: module 'json' has no attribute 'dump_all'"):
        call(watch_for_what_is_not_there, env=os.environ, folder=tmp_path)
