"""Build each member as a wheel, and run its own tests where nothing is installed but what it declares.

    python tools/wheels.py build         wheels into dist/
    python tools/wheels.py test [NAME…]  wheels, one environment for each member, its tests in it

The shared environment holds everything, so there an import that a member forgot to declare goes unseen. Here
it fails. Each environment holds the member's wheel, the wheels of the siblings that it declares, their
dependencies at the workspace's pins, pytest and Hypothesis; the tests run from a copy outside the tree.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
UV = ROOT / ".tools/bin/uv"
ENVIRONMENTS = ROOT / ".tools/wheels"
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")

# The plugin leaves vLLM out of its metadata on purpose: the published wheels are CUDA builds, and a user
# brings the build of the TT environment. So its tests get it beside the wheel.
UNDECLARED = {"tt-vllm-plugin": ("vllm==0.33.0",)}


@attrs.frozen
class Member:
    """One package of the workspace, as its pyproject.toml declares it."""

    name: str
    folder: Path
    version: str
    dependencies: tuple[Requirement, ...]
    extras: tuple[Requirement, ...] = ()
    """What the member's extras name, all together."""

    @classmethod
    def read(cls, folder: Path) -> "Member":
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        needs = tuple(map(Requirement, project["dependencies"]))
        extras = (
            Requirement(need) for group in project.get("optional-dependencies", {}).values() for need in group
        )
        return cls(project["name"], folder, project["version"], needs, tuple(extras))

    def declared(self, names: Mapping[str, object]) -> list[str]:
        """Those of `names` that the member depends on, directly."""
        return [requirement.name for requirement in self.dependencies if requirement.name in names]


def siblings(member: Member, everyone: Mapping[str, Member]) -> str:
    """The siblings that `member` is tested with, and whether its ranges allow older ones than those."""
    words = []
    for requirement in member.dependencies:
        if requirement.name in everyone:
            version = everyone[requirement.name].version
            floors = [
                Version(part.version) for part in requirement.specifier if part.operator in (">=", "==")
            ]
            note = "" if Version(version) in floors else f" (older ones in {requirement.specifier} untested)"
            words.append(f"{requirement.name} {version}{note}")
    return ", ".join(words) or "no sibling"


def members(root: Path = ROOT) -> dict[str, Member]:
    """The members of the workspace by name."""
    found = [Member.read(path.parent) for path in sorted(root.glob("packages/*/pyproject.toml"))]
    return {member.name: member for member in found}


def run(command: Sequence[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `command` in `folder`; its two outputs come back as one text."""
    return subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def uv(*arguments: str | Path) -> None:
    """Run uv in the workspace, whose [tool.uv] settings (pins, overrides, how vLLM is built) then hold."""
    done = run([UV, *arguments], ROOT)
    if done.returncode:
        sys.exit(f"uv {' '.join(map(str, arguments))} failed:\n{done.stdout}")


def build(all_members: Mapping[str, Member], out: Path) -> dict[str, Path]:
    """Build source distributions, and wheels from those, into `out`; the wheels by name of member."""
    shutil.rmtree(out, ignore_errors=True)
    for member in all_members.values():
        uv("build", "--out-dir", out, member.folder)
    return {name: next(out.glob(f"{name.replace('-', '_')}-*.whl")) for name in all_members}


def install(member: Member, wheels: Mapping[str, Path], environment: Path) -> Path:
    """Make `environment` hold exactly what `member` declares, test tools and nothing else; its python."""
    python = environment / "bin/python"
    if not python.exists():
        uv("venv", "--quiet", "--python", sys.executable, environment)
    own = [member.name, *member.declared(wheels)]
    again = [word for name in own for word in ("--reinstall-package", name)]
    named = [wheels[name] for name in own]
    extra = (*TEST_TOOLS, *UNDECLARED.get(member.name, ()))
    uv("pip", "install", "--quiet", "--exact", "--python", python, *again, *named, *extra)
    return python


def run_tests(member: Member, python: Path) -> subprocess.CompletedProcess[str]:
    """The member's tests, copied where neither the workspace's files nor its settings can be seen."""
    tests = member.folder / "tests"
    if not tests.is_dir():
        sys.exit(f"{member.name} has no tests: every member brings its own, in {tests}")
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(tests, Path(place, "tests"))
        options = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--timeout=300")
        return run([python, "-I", "-m", "pytest", *options, "tests"], Path(place))


def test(names: Sequence[str]) -> bool:
    """Test the named members, or all; print a line each, and the output of those that fail."""
    everyone = members()
    unknown = set(names) - set(everyone)
    if unknown:
        sys.exit(f"no member is called {', '.join(sorted(unknown))}; there are {', '.join(everyone)}")
    start = time.monotonic()
    wheels = build(everyone, ENVIRONMENTS / "dist")
    print(f"wheels: built {len(wheels)} in {time.monotonic() - start:.1f} s", flush=True)
    passed = True
    for member in [everyone[name] for name in names or everyone]:
        start = time.monotonic()
        python = install(member, wheels, ENVIRONMENTS / member.name)
        installed = time.monotonic()
        done = run_tests(member, python)
        ended = time.monotonic()
        closing = done.stdout.strip().splitlines()[-1].strip("= ")
        print(
            f"wheels: {member.name} {member.version} with {siblings(member, everyone)}: {closing}"
            f" (installed in {installed - start:.1f} s, tested in {ended - installed:.1f} s)",
            flush=True,
        )
        if done.returncode:
            print(done.stdout)
            passed = False
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("build", "test"))
    parser.add_argument("names", nargs="*", help="members to test; all without any")
    arguments = parser.parse_args()
    if arguments.action == "build":
        for wheel in build(members(), ROOT / "dist").values():
            print(wheel.relative_to(ROOT))
    elif not test(arguments.names):
        sys.exit(1)


if __name__ == "__main__":
    main()
