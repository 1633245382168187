"""Imports bundle modules under names of their own, so that two bundles may ship modules of the same name.

`adapter.py` of a bundle becomes `tt_bundles.<bundle id>.adapter`. Its modules run with an `__import__` that
looks into their own folder first: `import helper` finds the bundle's `helper.py`, also later inside a
function, and nothing of a bundle ever stands in `sys.modules` under its plain name. The id depends on the
folder's path alone, so every process that installs the bundle knows its classes by the same names.
"""

import builtins
import hashlib
import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

NAMESPACE = "tt_bundles"


def bundle_package(folder: Path) -> str:
    """The package that the modules of `folder` live in, such as `tt_bundles.torch_llama_1f0c92aa`."""
    path = folder.resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return f"{NAMESPACE}.{re.sub(r'\W', '_', path.name)}_{digest}"


def package_of(fullname: str) -> str:
    """The bundle package of a module's full name: its first two parts."""
    return ".".join(fullname.split(".", 2)[:2])


class BundleFinder(MetaPathFinder):
    """Serves the modules of some bundle folders while it is installed in `sys.meta_path`."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self.folders: Mapping[str, Path] = {bundle_package(folder): folder.resolve() for folder in folders}
        self._scoped = {package: _scoped_builtins(package, path) for package, path in self.folders.items()}

    def install(self) -> None:
        """Make the modules importable in this process; again is harmless."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Undo `install`, and forget the modules that no other installed finder serves."""
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        others = [finder for finder in sys.meta_path if isinstance(finder, BundleFinder)]
        kept = {package for finder in others for package in finder.folders}
        for name in [name for name in list(sys.modules) if package_of(name) in self.folders.keys() - kept]:
            del sys.modules[name]
        if not others:
            sys.modules.pop(NAMESPACE, None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == NAMESPACE:
            return ModuleSpec(NAMESPACE, None, is_package=True)
        package = package_of(fullname)
        if package not in self.folders:
            return None
        if fullname == package:
            return self._package_spec(package)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = BundleLoader(spec.loader.name, spec.loader.path, self._scoped[package])
        return spec

    def _package_spec(self, package: str) -> ModuleSpec | None:
        folder = self.folders[package]
        init = folder / "__init__.py"
        if init.is_file():
            loader = BundleLoader(package, str(init), self._scoped[package])
            return importlib.util.spec_from_file_location(
                package, init, loader=loader, submodule_search_locations=[str(folder)]
            )
        spec = ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


class BundleLoader(SourceFileLoader):
    """Runs a module with builtins whose `__import__` knows the bundle."""

    def __init__(self, fullname: str, path: str, scoped: Mapping[str, Any]) -> None:
        super().__init__(fullname, path)
        self._scoped = scoped

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._scoped
        super().exec_module(module)


def _scoped_builtins(package: str, folder: Path) -> dict[str, Any]:
    """Python's builtins with an `__import__` that looks into the bundle first.

    Modules and packages of the bundle win over anything installed. A folder without `__init__.py` gives way
    to an installed package of its name, as a namespace package would: a bundle's `models/` of data must not
    hide TT-Metal's `models`.
    """
    modules = {module.name for module in pkgutil.iter_modules([str(folder)])}
    folders = {child.name for child in folder.iterdir() if child.is_dir()} - modules

    def scoped_import(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or not (top in modules or (top in folders and not _is_installed(top))):
            return builtins.__import__(name, globals, locals, fromlist, level)
        inside = f"{package}.{name}"
        if fromlist:
            return builtins.__import__(inside, globals, locals, fromlist, 0)
        importlib.import_module(inside)
        return sys.modules[f"{package}.{top}"]

    return {**vars(builtins), "__import__": scoped_import}


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        return name in sys.modules
