"""The edge of the doctor: looks at the environment, the installation and the machine."""

import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
from packaging.requirements import Requirement
from tt_registry import BundleSource, Entry, Registry, RegistryError

from vllm_tt_plugin import mesh_ttnn
from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.doctor.children import bundle_findings, platforms_given
from vllm_tt_plugin.doctor.facts import Facts, Model, Plugin
from vllm_tt_plugin.doctor.installation import other_plugins
from vllm_tt_plugin.doctor.machine import driver_files, holders, memory_available
from vllm_tt_plugin.errors import ConfigurationError, Problem

DISTRIBUTIONS = ("tt-vllm-plugin", "vllm", "ttnn", "torch", "numpy", "transformers")
VARIABLES = (
    "MESH_DEVICE",
    "TT_VISIBLE_DEVICES",
    "EXTRA_MODELS_DIR",
    "TT_VLLM_BUILTIN_MODELS",
    "TT_LLAMA_TEXT_VER",
    "TT_QWEN3_TEXT_VER",
    "TT_QWEN35_TEXT_VER",
    "TT_METAL_HOME",
    "TT_METAL_MOCK_CLUSTER_DESC_PATH",
    "VLLM_PLUGINS",
    "VLLM_TARGET_DEVICE",
    "VLLM_USE_V2_MODEL_RUNNER",
)
DRIVER_FOLDER = Path("/dev/tenstorrent")


def gather(environ: Mapping[str, str], additional_config: Any = None) -> Facts:
    """Look at everything once; it takes as long as an import of ttnn. ``additional_config`` is vLLM's."""
    settings, setting_problems = _settings(additional_config)
    models, model_problems, bundles = registered(environ)
    ttnn = importlib.util.find_spec("ttnn")
    facts = Facts(
        versions={name: _version(name) for name in DISTRIBUTIONS},
        unmet=tuple(text for name in ("tt-vllm-plugin", "ttnn") for text in unmet(name)),
        ttnn_path=str(ttnn.origin) if ttnn else None,
        vllm_has_kernels=_has_kernels("vllm"),
        environ={name: environ[name] for name in VARIABLES if name in environ},
        settings=settings,
        setting_problems=setting_problems,
        platform_plugins=_plugins("vllm.platform_plugins"),
        general_plugins=_plugins("vllm.general_plugins"),
        driver_files=driver_files(DRIVER_FOLDER),
        holders=tuple(holders(DRIVER_FOLDER)),
        models=models,
        model_problems=model_problems,
        memory_available=memory_available(),
    )
    on_host = environ.get("MESH_DEVICE", "").strip().startswith("host")
    return _with_answers(facts, bundles, ask_ttnn=ttnn is not None and not on_host)


def _with_answers(facts: Facts, bundles: list[str], *, ask_ttnn: bool) -> Facts:
    """The questions that take seconds are asked at the same time."""
    with ThreadPoolExecutor() as pool:
        probe = pool.submit(mesh_ttnn.probe) if ask_ttnn else None
        findings = pool.submit(bundle_findings, bundles)
        others = pool.submit(platforms_given, [plugin.name for plugin in other_plugins(facts)])
        return attrs.evolve(
            facts,
            probe=probe.result() if probe else None,
            model_problems=(*facts.model_problems, *findings.result()),
            other_platforms=others.result(),
        )


def _settings(additional_config: Any) -> tuple[TTConfig, tuple[Problem, ...]]:
    try:
        return TTConfig.from_additional_config(additional_config), ()
    except ConfigurationError as error:
        return TTConfig(), error.problems


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def unmet(distribution: str) -> Iterator[str]:
    """Requirements that an installed distribution declares and the environment does not meet."""
    if _version(distribution) is None:
        return
    for text in importlib.metadata.requires(distribution) or ():
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        found = _version(wanted.name)
        if found is None or not wanted.specifier.contains(found, prereleases=True):
            there = f"{wanted.name} {found} is installed" if found else "it is not installed"
            yield f"{distribution} wants {wanted.name}{wanted.specifier}, and {there}"


def _has_kernels(distribution: str) -> bool:
    """Whether it came with compiled kernels, which no build for an empty target has."""
    if _version(distribution) is None:
        return False
    files = importlib.metadata.files(distribution) or ()
    return any(file.name.startswith("_C.") for file in files)


def _plugins(group: str) -> tuple[Plugin, ...]:
    return tuple(
        Plugin(point.name, point.dist.name if point.dist else "an unknown distribution")
        for point in importlib.metadata.entry_points(group=group)
    )


def registered(environ: Mapping[str, str]) -> tuple[tuple[Model, ...], tuple[str, ...], list[str]]:
    """The registry's entries, what it left out or refused, and the folders of its bundles."""
    try:
        registry = Registry.from_environ(environ)
    except RegistryError as error:
        return (), (str(error),), []
    models = tuple(_model(entry) for entry in registry.entries.values())
    sources = [entry.source for entry in registry.entries.values()]
    bundles = dict.fromkeys(source.path for source in sources if isinstance(source, BundleSource))
    return models, tuple(str(problem) for problem in registry.problems), list(bundles)


def _model(entry: Entry) -> Model:
    module = entry.target.partition(":")[0]
    found = isinstance(entry.source, BundleSource) or is_on_path(module)
    return Model(entry.architecture, entry.target, str(entry.source), found, entry.unsupported_reason)


def is_on_path(module: str) -> bool:
    """Whether there is a file for a dotted module name. Nothing is imported, unlike by ``find_spec``."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not rest:
        return spec is not None
    places = [Path(place, *rest) for place in spec.submodule_search_locations or ()]
    return any(place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() for place in places)
