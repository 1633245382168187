"""`python -m tt_mock.child CALL`: calls a function in this process, and keeps what it returns.

CALL is JSON: the `function` of a `module`, which is imported by its name, or where that is not found from
`file`; its `arguments`; folders to import from, `path`; the file that the returned value goes to, `result`.
"""

import importlib
import importlib.util
import json
import operator
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def imported(name: str, file: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{name}.".startswith(f"{missing.name}."):
            raise
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(
    *, module: str, file: str, function: str, arguments: Sequence[Any], path: Sequence[str], result: str
) -> None:
    sys.path += [folder for folder in path if folder not in sys.path]
    call = operator.attrgetter(function)(imported(module, file))
    Path(result).write_text(json.dumps(call(*arguments)))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
