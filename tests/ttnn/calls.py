"""The ttnn calls that the project makes, as its sources show them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("examples/models/ttnn-llama/*.py")])


@attrs.frozen
class Uses:
    """What a piece of code does with ttnn: names below it, with their dots; "" is ttnn itself."""

    called: frozenset[str]
    mentioned: frozenset[str]
    """Called or not."""


def uses(tree: ast.AST) -> Uses:
    bound = dict(_bound(tree))
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = [
        (name, id(node) in called)
        for node in ast.walk(tree)
        if id(node) not in inner and (name := _below(node, bound)) is not None
    ]
    return Uses(frozenset(name for name, is_call in found if is_call), frozenset(name for name, _ in found))


def _bound(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Local names that imports give to ttnn and to what is below it."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    top, _, below = alias.name.partition(".")
                    if top == "ttnn":
                        yield (alias.asname, below) if alias.asname else (top, "")
            case ast.ImportFrom(module=str(module), names=names, level=0) if module.split(".")[0] == "ttnn":
                for alias in names:
                    yield alias.asname or alias.name, ".".join([*module.split(".")[1:], alias.name])


def _below(node: ast.AST, bound: dict[str, str]) -> str | None:
    match node:
        case ast.Name(id=name):
            return bound.get(name)
        case ast.Attribute(value=value, attr=attribute):
            whole = _below(value, bound)
            return None if whole is None else f"{whole}.{attribute}".lstrip(".")
    return None


def texts(tree: ast.AST) -> list[str]:
    """Code that a source holds as text, for another process."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import ttnn" in node.value:
            try:
                ast.parse(node.value)
            except SyntaxError:  # words about it
                continue
            found.append(node.value)
    return found


@cache
def by_file() -> dict[Path, Uses]:
    """Those files that use ttnn, the code in their texts included."""
    found = {}
    for path in FILES:
        text = path.read_text()
        if "ttnn" not in text:
            continue
        tree = ast.parse(text)
        parts = [uses(tree), *(uses(ast.parse(text)) for text in texts(tree))]
        called, mentioned = (
            frozenset().union(*sets)
            for sets in zip(*((part.called, part.mentioned) for part in parts), strict=True)
        )
        if mentioned:
            found[path] = Uses(called, mentioned)
    return found


def called() -> set[str]:
    return set().union(*(each.called for each in by_file().values())) - {""}


def mentioned() -> set[str]:
    return set().union(*(each.mentioned for each in by_file().values())) - {""}
