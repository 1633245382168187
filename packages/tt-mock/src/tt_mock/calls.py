"""Which functions of a package were called, and from where: nothing is replaced, the interpreter tells."""

import operator
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_TOOL = 4
"""One of the identities that sys.monitoring leaves to anyone."""


class Calls:
    """Watches functions of `package` for the rest of the process.

    `names` are attributes of the package, with dots: `experimental.nlp_concat_heads`. Calls count that are
    made by code in `places`, files or folders, that is imported afterwards; and when they are made, whatever
    comes of them. Raises AttributeError for a name that the package lacks, ValueError where another watches.
    """

    def __init__(self, package: ModuleType, names: Collection[str], places: Collection[Path]) -> None:
        self._functions = {name: operator.attrgetter(name)(package) for name in names}
        self._names: dict[int, list[str]] = {}
        self._places = tuple(f"{place}/" if place.is_dir() else str(place) for place in places)
        self.made: set[str] = set()
        """Of the names, those called so far."""
        events = sys.monitoring.events
        sys.monitoring.use_tool_id(_TOOL, __name__)
        sys.monitoring.register_callback(_TOOL, events.CALL, self._called)
        sys.monitoring.register_callback(_TOOL, events.PY_START, self._started)
        for name, function in self._functions.items():
            code = getattr(function, "__code__", None)
            self._names.setdefault(id(code or function), []).append(name)
            if code:  # CPython 3.12 tells of no call of a Python function with * or **
                sys.monitoring.set_local_events(_TOOL, code, events.PY_START)
        sys.addaudithook(self._audited)

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "exec":  # of a module that is imported, or of text
            return
        (code,) = arguments
        if self._counts(code):
            for each in _with_inner(code):
                sys.monitoring.set_local_events(_TOOL, each, sys.monitoring.events.CALL)

    def _counts(self, code: CodeType) -> bool:
        return code.co_filename.startswith(self._places)

    def _called(self, code: CodeType, place: int, function: Any, first: Any) -> None:
        self.made.update(self._names.get(id(function), ()))

    def _started(self, code: CodeType, place: int) -> None:
        if self._counts(sys._getframe(2).f_code):
            self.made.update(self._names[id(code)])


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
