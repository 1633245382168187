"""The command line: what would be registered and from where, and whether a bundle fits the contract."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from tt_registry.bundles import bundle_folders
from tt_registry.check import Report, check_bundle
from tt_registry.entry import Entry, LaneRule
from tt_registry.errors import RegistryError
from tt_registry.registry import Registry


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run `python -m tt_registry ARGUMENTS`; gives the exit code: 1 on any finding or configuration error."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "check":
            return _check(Path(options.path).expanduser())
        return _list(Registry.from_environ(environ), as_json=options.json)
    except RegistryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tt_registry",
        description="List which adapter class would serve which architecture, and where each comes from.",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    check = parser.add_subparsers(dest="command").add_parser(
        "check", help="check a bundle, or every bundle of a folder, against the adapter contract"
    )
    check.add_argument("path", metavar="PATH", help="a folder with a vllm_metadata.json, or a folder of such")
    return parser


def _list(registry: Registry, *, as_json: bool) -> int:
    entries = tuple(registry.entries.values())
    if as_json:
        documents = [{"registered_as": entry.registered_as, **attrs.asdict(entry)} for entry in entries]
        problems = [attrs.asdict(problem) for problem in registry.problems]
        print(json.dumps({"entries": documents, "problems": problems}, indent=2, default=_lane_rule_text))
        return 0
    rows = [(entry.architecture, entry.target, str(entry.source)) for entry in entries]
    widths = [max(map(len, column)) for column in zip(*rows, _HEADINGS, strict=True)]
    for row, entry in zip((_HEADINGS, *rows), (None, *entries), strict=True):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if entry is not None:
            print("".join(f"    {remark}\n" for remark in _remarks(entry)), end="")
    print(f"\n{len(entries)} architectures; each also answers to its name with TT in front.")
    for problem in registry.problems:
        print(f"left out: {problem}")
    return 0


_HEADINGS = ("ARCHITECTURE", "ADAPTER CLASS", "FROM")


def _remarks(entry: Entry) -> list[str]:
    remarks = []
    if entry.unsupported_reason:
        remarks.append(f"refused when served: {entry.unsupported_reason}")
    if entry.override_plain_name:
        remarks.append("takes the place of vLLM's own class of that name")
    if entry.replaces:
        remarks.append(f"in place of the built-in {entry.replaces}")
    if entry.whole_mesh.folds_dp_into_lanes:
        remarks.append(
            f"one program on the whole mesh; data parallel becomes lanes: {entry.whole_mesh.lanes.value}"
        )
    return remarks


def _lane_rule_text(value: object) -> str:
    assert isinstance(value, LaneRule)
    return value.value


def _check(path: Path) -> int:
    folders = bundle_folders(path) if path.is_dir() else ()
    reports = [check_bundle(folder) for folder in folders or (path,)]
    for report in reports:
        _print_report(report)
    return 1 if any(report.findings for report in reports) else 0


def _print_report(report: Report) -> None:
    names = ", ".join(entry.architecture for entry in report.entries)
    print(f"{report.path}{f' ({names})' if names else ''}")
    for finding in report.findings:
        print(f"  {finding}")
    count = len(report.findings)
    print(f"  {count} finding{'s' if count > 1 else ''}" if count else "  fits the adapter contract")
