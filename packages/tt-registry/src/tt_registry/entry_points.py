"""Entries that other distributions provide through the entry point group `tt_registry.architectures`."""

import importlib.metadata
from collections.abc import Iterable

import attrs

from tt_registry.entry import Entry
from tt_registry.errors import InvalidEntryError
from tt_registry.sources import EntryPointSource, Problem

GROUP = "tt_registry.architectures"


def entry_point_entries() -> tuple[tuple[Entry, ...], tuple[Problem, ...]]:
    """Load the group. An entry point that fails is reported as a problem and hinders no other."""
    entries: list[Entry] = []
    problems: list[Problem] = []
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name):
        source = EntryPointSource(point.name, point.dist.name if point.dist else "unknown")
        try:
            provided = _entries(point.load())
        except Exception as error:  # noqa: BLE001 - what a stranger's code raises becomes a problem
            message = (
                f"{point.value} failed: {type(error).__name__}: {error}. Fix or uninstall the distribution."
            )
            problems.append(Problem(source, message))
        else:
            entries += [attrs.evolve(entry, source=source) for entry in provided]
    return tuple(entries), tuple(problems)


def _entries(provided: object) -> tuple[Entry, ...]:
    if callable(provided):
        provided = provided()
    if isinstance(provided, Entry):
        return (provided,)
    entries = tuple(provided) if isinstance(provided, Iterable) else (provided,)
    for entry in entries:
        if not isinstance(entry, Entry):
            raise InvalidEntryError(
                "entry point", entry, "an Entry, an iterable of Entry, or a callable giving them"
            )
    return entries
