"""Finds bundle folders and reads their `vllm_metadata.json`, without importing anything of them."""

import json
import os
import re
from pathlib import Path

import attrs

from tt_registry.entry import Entry, plain_name
from tt_registry.errors import SettingError
from tt_registry.importing import bundle_package
from tt_registry.sources import BundleSource, Problem

METADATA = "vllm_metadata.json"
VARIABLE = "EXTRA_MODELS_DIR"


class _MalformedError(Exception):
    pass


@attrs.frozen
class Bundle:
    """One bundle folder: its entries, or the problem that keeps it out."""

    folder: Path
    entries: tuple[Entry, ...] = ()
    problem: Problem | None = None


def bundle_folders(directory: Path) -> tuple[Path, ...]:
    """`directory` itself if it holds a `vllm_metadata.json`, else its direct subfolders that do, by name."""
    if os.path.isfile(directory / METADATA):
        return (directory,)
    return tuple(sorted(child for child in directory.iterdir() if os.path.isfile(child / METADATA)))


def find_bundles(directory: str) -> tuple[tuple[Bundle, ...], tuple[Problem, ...]]:
    """Read all bundles of the value of `EXTRA_MODELS_DIR`; raises `SettingError` if it is no folder."""
    path = Path(directory).expanduser()
    if not path.is_dir():
        raise SettingError(VARIABLE, directory, "an existing folder: a bundle, or a folder of bundles")
    bundles = tuple(read_bundle(folder) for folder in bundle_folders(path))
    problems = tuple(bundle.problem for bundle in bundles if bundle.problem)
    if not bundles:
        message = f"{VARIABLE} names it, but neither it nor a direct subfolder holds a {METADATA}"
        problems = (Problem(BundleSource(str(path)), message),)
    return bundles, problems


def read_bundle(folder: Path) -> Bundle:
    """Read one bundle; whatever is wrong with it becomes its `problem`."""
    source = BundleSource(str(folder))
    architectures: tuple[str, ...] = ()
    try:
        metadata = _load(folder / METADATA)
        architectures = _architectures(metadata.get("arch"))
        module, class_name = _main_class(metadata.get("main_class"), folder)
    except _MalformedError as malformed:
        return Bundle(folder, problem=Problem(source, str(malformed), architectures))
    target = f"{bundle_package(folder)}.{module}:{class_name}"
    return Bundle(folder, tuple(Entry(name, target, source=source) for name in architectures))


def _load(path: Path) -> dict[str, object]:
    try:
        metadata = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise _MalformedError(f"{METADATA} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise _MalformedError(f"{METADATA} is not JSON: {error}") from error
    if not isinstance(metadata, dict):
        raise _MalformedError(
            f"{METADATA} holds a {type(metadata).__name__}; expected an object with arch and main_class"
        )
    return metadata


def _architectures(arch: object) -> tuple[str, ...]:
    names = [plain_name(n) for n in (arch if isinstance(arch, list) else [arch]) if isinstance(n, str)]
    given = len(arch) if isinstance(arch, list) else 1
    if not names or len(names) < given or not all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in names):
        raise _MalformedError(
            f"arch is {arch!r}; expected a class name such as LlamaForCausalLM, or a list of them"
        )
    return tuple(dict.fromkeys(names))


def _main_class(main_class: object, folder: Path) -> tuple[str, str]:
    found = isinstance(main_class, str) and re.fullmatch(r"(\w+(?:\.\w+)*)[:.]([A-Za-z_]\w*)", main_class)
    if not found:
        raise _MalformedError(
            f"main_class is {main_class!r}; expected module:Class, such as adapter:LlamaForCausalLM"
        )
    module, class_name = found.groups()
    file = folder.joinpath(*module.split("."))
    if not (file.with_suffix(".py").is_file() or (file / "__init__.py").is_file()):
        raise _MalformedError(
            f"main_class names module {module!r}, but there is no {module.replace('.', '/')}.py"
        )
    return module, class_name
