"""Functions run in processes of their own, found by module name or by file."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tt_mock import ChildError
from tt_mock.processes import call


def told(*arguments: Any) -> Any:
    print("to be ignored")
    return arguments, os.environ["ASKED"], os.getpid()


def raises(word: str) -> None:
    print("said before")
    raise ValueError(f"no {word}")


def aborts() -> None:
    print("said before", flush=True)
    os.abort()


def leaves() -> None:
    sys.exit(0)


def gives_what_json_cannot_hold() -> object:
    return object()


def sleeps() -> None:
    time.sleep(600)


def run(function: Any, *arguments: Any, folder: Path, **options: Any) -> Any:
    return call(function, *arguments, env=os.environ | {"ASKED": "this"}, folder=folder, **options)


def test_arguments_and_result_pass_as_json(tmp_path: Path) -> None:
    arguments, asked, pid = run(told, 1, ("a", None), folder=tmp_path)
    assert (arguments, asked) == ([1, ["a", None]], "this")
    assert pid != os.getpid()


@pytest.mark.parametrize(
    ("function", "arguments", "says"),
    [
        (raises, ("word",), r"raises raised:\nsaid before\n(?s:.*)ValueError: no word"),
        (aborts, (), r"aborts ended its process by SIGABRT:\nsaid before\n"),
        (leaves, (), r"leaves ended its process with 0:"),
        (gives_what_json_cannot_hold, (), r"Object of type object is not JSON serializable"),
    ],
)
def test_a_failure_comes_with_the_output(function: Any, arguments: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ChildError, match=says):
        run(function, *arguments, folder=tmp_path)


def test_a_process_that_does_not_end_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match=r"sleeps took longer than 0\.1 s"):
        run(sleeps, folder=tmp_path, timeout_s=0.1)


def test_a_function_that_no_other_process_can_find_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="at the top of a module"):
        run(lambda: 1, folder=tmp_path)
