"""The adapter class behind the model that is served, and vLLM's knowledge of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from tt_registry import (
    Capabilities,
    Entry,
    Registry,
    RegistryError,
    UnknownArchitectureError,
)

from vllm_tt_plugin.errors import ConfigurationError, Problem


@attrs.frozen
class ServedModel:
    """An architecture's registry entry, its imported adapter class, and what the class declares."""

    entry: Entry
    adapter_class: type[Any]
    capabilities: Capabilities

    @property
    def folds_data_parallel(self) -> bool:
        """Whether the model runs the whole mesh as one program, so that data parallelism becomes lanes."""
        return self.capabilities.folds_dp_into_lanes or self.entry.whole_mesh.folds_dp_into_lanes

    @classmethod
    def find(cls, architectures: Sequence[str], environ: Mapping[str, str]) -> "ServedModel":
        """Resolve the first of a checkpoint's ``architectures`` that is registered, and import its class.

        Raises ``ConfigurationError``: unknown architecture (with the nearest known ones), a class that cannot
        be served, a bundle or class that does not import, capabilities of the wrong types.
        """
        try:
            registry = Registry.from_environ(environ)
            registry.install()
            entry = _resolve_any(registry, architectures)
            if entry.unsupported_reason is not None:
                found = f"{entry.registered_as} cannot be served: {entry.unsupported_reason.rstrip('.')}"
                raise ConfigurationError([Problem(found, "Choose another model")])
            adapter_class = entry.load()
            capabilities = entry.capabilities()
        except RegistryError as error:
            raise ConfigurationError([Problem(str(error))]) from error
        return cls(entry, adapter_class, capabilities)


def _resolve_any(registry: Registry, architectures: Sequence[str]) -> Entry:
    unknown: UnknownArchitectureError | None = None
    for architecture in architectures:
        try:
            return registry.resolve(architecture)
        except UnknownArchitectureError as error:
            unknown = unknown or error
    if unknown is None:
        raise ConfigurationError(
            [Problem("the checkpoint's config.json names no architecture", 'Add its "architectures" list')]
        )
    raise unknown


def register_with_vllm(environ: Mapping[str, str]) -> None:
    """Register every entry with vLLM's model registry: under its TT name, and under its plain name where vLLM
    does not know the architecture itself or the entry must win over vLLM's own class.

    Classes are given as ``module:class`` and imported only when the architecture is used.
    """
    from vllm import ModelRegistry

    registry = Registry.from_environ(environ)
    registry.install()
    known_to_vllm = ModelRegistry.get_supported_archs()
    for entry in registry.entries.values():
        ModelRegistry.register_model(entry.registered_as, entry.target)
        if entry.override_plain_name or entry.architecture not in known_to_vllm:
            ModelRegistry.register_model(entry.architecture, entry.target)
