"""The registry: which adapter class serves which architecture."""

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import attrs

from tt_registry.bundles import VARIABLE, find_bundles
from tt_registry.entry import Entry, plain_name
from tt_registry.entry_points import entry_point_entries
from tt_registry.errors import (
    DuplicateArchitectureError,
    MalformedBundleError,
    SettingError,
    UnknownArchitectureError,
)
from tt_registry.families import builtin_entries
from tt_registry.importing import BundleFinder
from tt_registry.sources import Problem

BUILTIN_SWITCH = "TT_VLLM_BUILTIN_MODELS"


@attrs.frozen(eq=False)
class Registry:
    """Entries by plain architecture, and the problems of what was left out.

    An architecture that a malformed bundle claims has no entry, even where a built-in would serve it: the
    user asked for the bundle, and is told what is wrong with it.
    """

    entries: Mapping[str, Entry]
    problems: tuple[Problem, ...]
    _finder: BundleFinder

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], *, entry_points: bool = True) -> "Registry":
        """Gather built-in families, bundles and entry points.

        Reads TT_VLLM_BUILTIN_MODELS (0 or 1), TT_LLAMA_TEXT_VER, TT_QWEN3_TEXT_VER, TT_QWEN35_TEXT_VER and
        EXTRA_MODELS_DIR (one folder: a bundle, or a folder of bundles); empty counts as unset. What users
        provide replaces built-ins. Raises `SettingError` and `DuplicateArchitectureError`.
        """
        switch = environ.get(BUILTIN_SWITCH) or "1"
        if switch not in ("0", "1"):
            raise SettingError(BUILTIN_SWITCH, switch, "0 or 1")
        builtin = builtin_entries(environ) if switch == "1" else ()
        extra = environ.get(VARIABLE)
        bundles, problems = find_bundles(extra) if extra else ((), ())
        third_party, failures = entry_point_entries() if entry_points else ((), ())
        problems += failures
        provided = [entry for bundle in bundles for entry in bundle.entries]
        entries = merged(builtin, [*provided, *third_party])
        for problem in problems:
            for architecture in problem.architectures:
                entries.pop(architecture, None)
        finder = BundleFinder(bundle.folder for bundle in bundles)
        return cls(MappingProxyType(dict(sorted(entries.items()))), problems, finder)

    def resolve(self, architecture: str) -> Entry:
        """The entry of a plain or `TT`-prefixed name.

        Raises `MalformedBundleError` where a bundle that cannot be read claims it, otherwise
        `UnknownArchitectureError` with the nearest names.
        """
        plain = plain_name(architecture)
        if plain in self.entries:
            return self.entries[plain]
        for problem in self.problems:
            if plain in problem.architectures:
                raise MalformedBundleError(plain, problem)
        raise UnknownArchitectureError(architecture, self._nearest(plain), self.problems)

    def install(self) -> None:
        """Make the bundles' modules importable in this process; needed once in each, harmless again."""
        self._finder.install()

    def uninstall(self) -> None:
        """Undo `install`: bundle modules are forgotten, unless another installed registry serves them."""
        self._finder.uninstall()

    def _nearest(self, plain: str) -> list[str]:
        by_lower = {name.lower(): name for name in self.entries}
        return [by_lower[m] for m in difflib.get_close_matches(plain.lower(), by_lower, n=3, cutoff=0.5)]


def merged(builtin: Iterable[Entry], provided: Iterable[Entry]) -> dict[str, Entry]:
    """Entries by architecture; what users provide wins, and two of theirs for one name raise."""
    builtin_by_name = {entry.architecture: entry for entry in builtin}
    provided_by_name: dict[str, Entry] = {}
    for entry in provided:
        earlier = provided_by_name.get(entry.architecture)
        if earlier is not None:
            raise DuplicateArchitectureError(entry.architecture, earlier.source, entry.source)
        replaced = builtin_by_name.get(entry.architecture)
        replaces = replaced.target if replaced else None
        provided_by_name[entry.architecture] = attrs.evolve(entry, replaces=replaces)
    return {**builtin_by_name, **provided_by_name}
