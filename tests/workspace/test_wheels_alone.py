"""The wheel stage finds what the shared environment hides: an import of a sibling that is not declared."""

from pathlib import Path

import pytest
from wheels import Member, build, install, members, run_tests

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "borrower"
version = "0.1.0"
dependencies = {dependencies}

[tool.hatch.build.targets.wheel]
packages = ["src/borrower"]
"""


def borrower(folder: Path, dependencies: list[str]) -> Member:
    """A member that imports tt_registry, whatever it declares."""
    package = folder / "src/borrower"
    package.mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "pyproject.toml").write_text(PROJECT.format(dependencies=dependencies))
    (package / "__init__.py").write_text("import tt_registry\n")
    (folder / "tests/test_import.py").write_text("def test_import():\n    import borrower\n")
    return Member.read(folder)


@pytest.mark.parametrize(
    ("dependencies", "closing"),
    [(["tt-registry>=0.1"], "1 passed"), ([], "No module named 'tt_registry'")],
    ids=["declared", "undeclared"],
)
def test_a_sibling_is_there_only_if_declared(tmp_path: Path, dependencies: list[str], closing: str) -> None:
    member = borrower(tmp_path / "borrower", dependencies)
    wheels = build({"tt-registry": members()["tt-registry"], "borrower": member}, tmp_path / "dist")
    done = run_tests(member, install(member, wheels, tmp_path / "environment"))
    assert closing in done.stdout
    assert (done.returncode == 0) == bool(dependencies)
