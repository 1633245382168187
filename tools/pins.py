"""Write the exact pins of the whole resolution into the root's pyproject.toml.

A lock file would name download hosts, so the resolution is kept as two lists between two marker lines:
`constraint-dependencies` holds every distribution, `build-constraint-dependencies` what builds run with
(the closure of the dependency group `build`).

    python tools/pins.py             keep what is pinned; pin what a changed dependency brought in
    python tools/pins.py --upgrade   drop the pins first, so that everything moves to the newest allowed
"""

import argparse
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
UV = ROOT / ".tools/bin/uv"
BEGIN = "# pins: begin (written by tools/pins.py)\n"
END = "# pins: end\n"

Lock = Mapping[str, Mapping[str, Any]]


def read_lock(path: Path) -> Lock:
    """The packages of a uv.lock by name. One resolution for one platform has each name once."""
    packages = tomllib.loads(path.read_text())["package"]
    by_name = {package["name"]: package for package in packages}
    if len(by_name) != len(packages):
        raise ValueError(f"{path} holds a name twice: pins can hold one version of each")
    return by_name


def closure(lock: Lock, names: Iterable[str]) -> set[str]:
    """`names` and everything that they depend on."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [dependency["name"] for dependency in lock[name].get("dependencies", ())]
    return found


def block(lock: Lock, root: str) -> str:
    """The text between the markers; members of the workspace have no registry and get no pin."""
    pins = {name: package["version"] for name, package in lock.items() if "registry" in package["source"]}
    build = closure(lock, [entry["name"] for entry in lock[root]["dev-dependencies"]["build"]])
    lists = {"constraint-dependencies": pins, "build-constraint-dependencies": build}
    return "".join(
        f"{key} = [\n" + "".join(f'    "{name}=={pins[name]}",\n' for name in sorted(names)) + "]\n"
        for key, names in lists.items()
    )


def replace(text: str, pins: str) -> str:
    """`text` with `pins` between the marker lines."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"no marker lines {BEGIN.strip()!r} ... {END.strip()!r} in pyproject.toml")
    return before + begin + pins + end + after


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--upgrade", action="store_true", help="move every pin to the newest version allowed")
    upgrade = parser.parse_args().upgrade
    project = ROOT / "pyproject.toml"
    old = project.read_text()
    try:
        if upgrade:
            project.write_text(replace(old, ""))
        subprocess.run([UV, "lock", *(["--upgrade"] if upgrade else [])], cwd=ROOT, check=True)
        new = replace(old, block(read_lock(ROOT / "uv.lock"), "tt-vllm-workspace"))
    except BaseException:
        project.write_text(old)
        raise
    project.write_text(new)
    print("pins unchanged" if new == old else "pins written: now run `make check` and `make test`")


if __name__ == "__main__":
    main()
