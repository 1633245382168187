"""House rules that a machine can hold: what each member ships, and what no committed text may say."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from wheels import ROOT, Member, members

MEMBERS = members()
each_member = pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS)

REGISTRIES = (
    r"pypi\.org|pythonhosted\.org|huggingface\.co/[^ ]*resolve|anaconda\.(org|com)|download\.pytorch\.org"
)
MACHINE_PATHS = r"(^|[^\w.])/(work|root|home|Users)/"
LOCK_FILES = re.compile(r"(^|/)(uv\.lock|poetry\.lock|Pipfile\.lock|package-lock\.json|pylock.*\.toml)$")


def tracked() -> list[str]:
    """The files that git would commit: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


def lines_with(pattern: str) -> list[str]:
    found = []
    for name in tracked():
        if ROOT / name == Path(__file__):
            continue
        text = (ROOT / name).read_text(errors="ignore")
        rows = enumerate(text.splitlines(), 1)
        found += [f"{name}:{number}: {row.strip()}" for number, row in rows if re.search(pattern, row)]
    return found


@each_member
def test_member_ships_what_a_reader_expects(member: Member) -> None:
    package = next(path.parent for path in (member.folder / "src").glob("*/__init__.py"))
    expected = [
        member.folder / "README.md",
        member.folder / "CHANGELOG.md",
        member.folder / "LICENSE",
        member.folder / "tests/test_public_names.py",
        package / "py.typed",
    ]
    assert [path for path in expected if not path.is_file()] == []


@each_member
def test_changelog_opens_with_the_version(member: Member) -> None:
    headings = re.findall(
        r"^#+ .*?(\d+\.\d+\.\d+)", (member.folder / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert headings[:1] == [member.version]


@each_member
def test_metadata_is_complete(member: Member) -> None:
    project = tomllib.loads((member.folder / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.12"
    assert {"readme", "license-files", "classifiers", "keywords", "description"} <= project.keys()


@each_member
def test_license_is_the_same_everywhere(member: Member) -> None:
    assert (member.folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_no_text_names_a_registry() -> None:
    assert lines_with(REGISTRIES) == []


def test_no_text_names_a_path_of_one_machine() -> None:
    assert lines_with(MACHINE_PATHS) == []


def test_no_lock_file_is_committed() -> None:
    assert [name for name in tracked() if LOCK_FILES.search(name)] == []
