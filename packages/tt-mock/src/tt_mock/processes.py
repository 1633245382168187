"""Functions that run in a process of their own.

ttnn reads its cluster once for each process, and some of its calls end the process of a mock cluster.
"""

import inspect
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tt_mock.errors import ChildError

LAST = 6000
"""Characters of the output that a failure shows, its last."""


def call(
    function: Callable[..., Any],
    *arguments: Any,
    env: Mapping[str, str],
    folder: Path,
    timeout_s: float = 600,
) -> Any:
    """What `function(*arguments)` returns in a new process with the variables `env`, started in `folder`.

    Arguments and result pass as JSON, so a tuple comes as a list. The function stands at the top of its
    module, which is imported there by its name or else from its file, with this process's sys.path.
    Raises ChildError, with the output, when it raises, ends the process or takes longer than `timeout_s`.
    """
    name, module = function.__qualname__, inspect.getmodule(function)
    if module is None or "<" in name:
        raise ChildError(f"{name} cannot be found by another process: define it at the top of a module")
    with tempfile.TemporaryDirectory() as place:
        result = Path(place, "result.json")
        what = {
            "module": module.__name__,
            "file": inspect.getfile(function),
            "function": name,
            "arguments": arguments,
            "path": sys.path,
            "result": str(result),
        }
        try:
            run = subprocess.run(
                [sys.executable, "-m", "tt_mock.child", json.dumps(what)],
                env=env,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise ChildError(f"{name} took longer than {timeout_s} s:\n{_last(late.stdout)}") from None
        if run.returncode or not result.exists():
            raise ChildError(f"{name} {_ended(run.returncode)}:\n{_last(run.stdout)}")
        return json.loads(result.read_text())


def _last(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")[-LAST:]


def _ended(code: int) -> str:
    if code < 0:
        return f"ended its process by {signal.Signals(-code).name}"
    return "raised" if code == 1 else f"ended its process with {code}"
