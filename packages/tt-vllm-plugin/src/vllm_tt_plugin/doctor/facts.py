"""What the doctor looks at."""

from collections.abc import Mapping

import attrs

from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.errors import Problem
from vllm_tt_plugin.mesh_ttnn import Probe


@attrs.frozen
class Plugin:
    """An entry point of vLLM's, and the distribution that it came with."""

    name: str
    distribution: str


@attrs.frozen
class Model:
    """A registered architecture. ``found``: a file for its adapter's module is on the Python path."""

    architecture: str
    adapter_class: str
    source: str
    found: bool = True
    refused: str | None = None


@attrs.frozen
class Holder:
    """A process that has a file of the driver open."""

    pid: int
    command: str


@attrs.frozen(kw_only=True)
class Facts:
    """All of it, as plain data. Sizes are bytes."""

    versions: Mapping[str, str | None]
    """By distribution; None: not installed."""
    unmet: tuple[str, ...] = ()
    """What this package or ttnn declares and the environment does not hold."""
    ttnn_path: str | None
    """Where ``import ttnn`` would find it."""
    vllm_has_kernels: bool = False
    """Whether this vLLM was built for a device of its own."""
    environ: Mapping[str, str]
    """The variables that matter here, where they are set."""
    settings: TTConfig = attrs.field(factory=TTConfig)
    setting_problems: tuple[Problem, ...] = ()
    platform_plugins: tuple[Plugin, ...]
    general_plugins: tuple[Plugin, ...]
    other_platforms: Mapping[str, str] = attrs.field(factory=dict)
    """Platform classes that plugins other than ours give vLLM here, by plugin."""
    probe: Probe | None = None
    """None where ttnn was not asked: a host mesh is asked for, or it is not installed."""
    driver_files: tuple[str, ...] = ()
    holders: tuple[Holder, ...] = ()
    models: tuple[Model, ...] = ()
    model_problems: tuple[str, ...] = ()
    """Bundles and entry points that cannot be used, and settings that the registry refuses."""
    memory_available: int
