"""One architecture and the adapter class that serves it."""

import enum
import importlib
import re
import traceback
from pathlib import Path
from typing import Any

import attrs

from tt_registry.capabilities import Capabilities
from tt_registry.errors import AdapterImportError, BundleImportError, InvalidEntryError
from tt_registry.importing import NAMESPACE, package_of
from tt_registry.sources import BundleSource, CodeSource, Source

PREFIX = "TT"


def plain_name(architecture: str) -> str:
    """`TTLlamaForCausalLM` and `LlamaForCausalLM` both give `LlamaForCausalLM`."""
    return architecture.removeprefix(PREFIX)


class LaneRule(enum.Enum):
    """How many lanes a model that runs the whole mesh as one program can have."""

    ANY = "any number of lanes"
    MULTIPLE_OF_SECOND_SIDE = "a multiple of the mesh's second side"
    AS_MANY_AS_CHIPS = "as many lanes as chips"

    def allows(self, lanes: int, mesh_shape: tuple[int, int]) -> bool:
        match self:
            case LaneRule.MULTIPLE_OF_SECOND_SIDE:
                return lanes % mesh_shape[1] == 0
            case LaneRule.AS_MANY_AS_CHIPS:
                return lanes == mesh_shape[0] * mesh_shape[1]
        return True


@attrs.frozen
class WholeMesh:
    """Whether `--data_parallel_size N` becomes N in-process lanes of one program, and which N it takes."""

    folds_dp_into_lanes: bool = False
    lanes: LaneRule = LaneRule.ANY


def _plain_if_str(architecture: Any) -> Any:
    return plain_name(architecture) if isinstance(architecture, str) else architecture


def _has_form(pattern: str, expected: str) -> Any:
    def check(_: object, attribute: "attrs.Attribute[str]", value: object) -> None:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise InvalidEntryError(attribute.name, value, expected)

    return check


@attrs.frozen
class Entry:
    """One architecture and the class that serves it.

    `architecture` is the plain name; a leading `TT` is taken off. `target` is `module:Class`, importable once
    the registry that holds the entry was installed. `capability_defaults` stand in for what the class
    leaves undeclared. `override_plain_name`: vLLM's own class under the plain name must give way too.
    `unsupported_reason`: registered, but serving it is to be refused with this reason. `replaces` is the
    target of the built-in that this entry takes the place of. Raises `InvalidEntryError` on malformed names.
    """

    architecture: str = attrs.field(
        converter=_plain_if_str, validator=_has_form(r"[A-Za-z_]\w*", "a class name such as LlamaForCausalLM")
    )
    target: str = attrs.field(validator=_has_form(r"\w+(\.\w+)*:[A-Za-z_]\w*", "module:Class"))
    source: Source = attrs.field(default=CodeSource(), kw_only=True)
    whole_mesh: WholeMesh = attrs.field(default=WholeMesh(), kw_only=True)
    capability_defaults: Capabilities = attrs.field(default=Capabilities(), kw_only=True)
    override_plain_name: bool = attrs.field(default=False, kw_only=True)
    unsupported_reason: str | None = attrs.field(default=None, kw_only=True)
    replaces: str | None = attrs.field(default=None, kw_only=True)

    @property
    def registered_as(self) -> str:
        return PREFIX + self.architecture

    def load(self) -> type:
        """Import the class. Raises `AdapterImportError`, of a bundle `BundleImportError`, with its cause."""
        error = BundleImportError if isinstance(self.source, BundleSource) else AdapterImportError
        module_name, _, class_name = self.target.partition(":")
        try:
            module = importlib.import_module(module_name)
        except Exception as cause:
            advice = _advice(self.source, module_name, cause)
            raise error(self.target, self.source, _describe(cause), advice) from cause
        adapter = getattr(module, class_name, None)
        if not isinstance(adapter, type):
            advice = "Name a class that the module defines"
            raise error(self.target, self.source, f"the module has no class {class_name}", advice)
        return adapter

    def capabilities(self) -> Capabilities:
        """What the class declares, over what is known here. Raises as `load` does, and `CapabilityError`."""
        defaults = self.capability_defaults
        if self.whole_mesh.folds_dp_into_lanes:
            defaults = attrs.evolve(defaults, folds_dp_into_lanes=True)
        return Capabilities.from_class(self.load(), defaults)


def _advice(source: Source, module_name: str, cause: Exception) -> str:
    if not isinstance(source, BundleSource):
        return "Install what holds it, or put TT-Metal's root folder on PYTHONPATH"
    if isinstance(cause, ModuleNotFoundError) and cause.name in (NAMESPACE, package_of(module_name)):
        return "Call registry.install() in this process first"
    return f"`python -m tt_registry check {source.path}` says what else is wrong with it"


def _describe(cause: Exception) -> str:
    machinery = ("<", str(Path(__file__).parent), str(Path(importlib.__file__).parent))
    frames = [f for f in traceback.extract_tb(cause.__traceback__) if not f.filename.startswith(machinery)]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(cause).__name__}: {cause}{place}"
