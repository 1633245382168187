"""Which TT-Metal adapter class serves which model architecture."""

from tt_registry.capabilities import Capabilities
from tt_registry.check import Finding, Report, check_adapter, check_bundle
from tt_registry.entry import Entry, LaneRule, WholeMesh
from tt_registry.errors import (
    AdapterImportError,
    BundleImportError,
    CapabilityError,
    DuplicateArchitectureError,
    InvalidEntryError,
    MalformedBundleError,
    RegistryError,
    SettingError,
    UnknownArchitectureError,
)
from tt_registry.registry import Registry
from tt_registry.sources import BuiltinSource, BundleSource, CodeSource, EntryPointSource, Problem, Source

__all__ = [
    "AdapterImportError",
    "BuiltinSource",
    "BundleImportError",
    "BundleSource",
    "Capabilities",
    "CapabilityError",
    "CodeSource",
    "DuplicateArchitectureError",
    "Entry",
    "EntryPointSource",
    "Finding",
    "InvalidEntryError",
    "LaneRule",
    "MalformedBundleError",
    "Problem",
    "Registry",
    "RegistryError",
    "Report",
    "SettingError",
    "Source",
    "UnknownArchitectureError",
    "WholeMesh",
    "check_adapter",
    "check_bundle",
]
