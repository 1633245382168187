"""Each member imports what it declares, and device packages only in the modules named after them.

import-linter holds who may know whom. It cannot say "only in modules named ttnn", and does not read the
dependencies that a member declares, so these rules are held here, on the syntax tree: imports inside
functions and under TYPE_CHECKING count too.
"""

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from wheels import UNDECLARED, Member, members

DEVICE_PACKAGES = ("ttnn", "nixl")
MEMBERS = members()
OWNERS = packages_distributions()


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of all absolute imports, import_module("name") included."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield module.partition(".")[0]


def sources(member: Member) -> dict[str, Path]:
    """The member's modules: dotted name to file."""
    source = member.folder / "src"
    return {".".join(path.relative_to(source).with_suffix("").parts): path for path in source.rglob("*.py")}


def distribution(text: str) -> str:
    """The name in a requirement, normalised: `mistral_common[image]>=1` is mistral-common."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", text, maxsplit=1)[0]).lower()


def packages(member: Member) -> set[str]:
    """Import names that the member provides."""
    return {path.name for path in (member.folder / "src").iterdir()}


def allowed(member: Member) -> set[str]:
    """Import names of the member and of all it declares; for the plugin, of vLLM and its needs too."""
    needs = {distribution(str(requirement)) for requirement in (*member.dependencies, *member.extras)}
    for extra in UNDECLARED.get(member.name, ()):
        needs |= {distribution(extra), *map(distribution, requires(distribution(extra)) or ())}
    installed = {name for name, owners in OWNERS.items() if needs & set(map(distribution, owners))}
    return installed.union(packages(member), *(packages(MEMBERS[name]) for name in member.declared(MEMBERS)))


@pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS)
def test_members_import_what_they_declare(member: Member) -> None:
    permitted = allowed(member) | set(sys.stdlib_module_names) | set(DEVICE_PACKAGES)
    strangers = {
        f"{module} imports {name}"
        for module, path in sources(member).items()
        for name in imported(ast.parse(path.read_text()))
        if name not in permitted
    }
    assert not strangers


@pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS)
def test_device_packages_stay_in_modules_named_after_them(member: Member) -> None:
    strangers = {
        f"{module} imports {name}"
        for module, path in sources(member).items()
        for name in imported(ast.parse(path.read_text()))
        for package in DEVICE_PACKAGES
        if name.startswith(package) and package not in module
    }
    assert not strangers


@pytest.mark.parametrize("name", ["tt-registry", "tt-scheduler"])
def test_registry_and_scheduler_need_attrs_alone(name: str) -> None:
    assert [requirement.name for requirement in MEMBERS[name].dependencies] == ["attrs"]


def test_every_form_of_import_is_seen() -> None:
    code = """
import a.b, c
from d.e import f
from . import own
def late():
    import g
    importlib.import_module("h.i")
    __import__("j")
"""
    assert list(imported(ast.parse(code))) == ["a", "c", "d", "g", "h", "j"]
