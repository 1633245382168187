"""Where an entry comes from, and what went wrong with one that could not be read."""

from typing import Literal

import attrs


@attrs.frozen
class BuiltinSource:
    """A family that ships in this package; `chosen_by` is such as `TT_LLAMA_TEXT_VER=llama2_70b`."""

    chosen_by: str | None = None
    kind: Literal["built-in"] = attrs.field(default="built-in", init=False)

    def __str__(self) -> str:
        return f"built-in, {self.chosen_by}" if self.chosen_by else "built-in"


@attrs.frozen
class BundleSource:
    """A folder with a `vllm_metadata.json`, found through `EXTRA_MODELS_DIR`."""

    path: str
    kind: Literal["bundle"] = attrs.field(default="bundle", init=False)

    def __str__(self) -> str:
        return f"bundle {self.path}"


@attrs.frozen
class EntryPointSource:
    """An entry point of the group `tt_registry.architectures` in an installed distribution."""

    name: str
    distribution: str
    kind: Literal["entry point"] = attrs.field(default="entry point", init=False)

    def __str__(self) -> str:
        return f"entry point {self.name!r} of distribution {self.distribution!r}"


@attrs.frozen
class CodeSource:
    """An `Entry` made in code, before a registry took it in."""

    kind: Literal["code"] = attrs.field(default="code", init=False)

    def __str__(self) -> str:
        return "an entry made in code"


Source = BuiltinSource | BundleSource | EntryPointSource | CodeSource


@attrs.frozen
class Problem:
    """A bundle or entry point that was left out. `architectures` are those it claims, as far as known."""

    source: Source
    message: str
    architectures: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.source}: {self.message}"
