"""The doctor's findings as text and as JSON."""

import json
from collections.abc import Iterator, Sequence

import attrs

from vllm_tt_plugin.doctor.facts import Facts
from vllm_tt_plugin.doctor.finding import Finding


def serves(findings: Sequence[Finding]) -> bool:
    """Whether a server would start."""
    return all(finding.level != "problem" for finding in findings)


def as_text(findings: Sequence[Finding]) -> str:
    """A verdict, then every finding under its area, with its fix below it."""
    return "\n".join([_verdict(findings), *_lines(findings)])


def _verdict(findings: Sequence[Finding]) -> str:
    levels = [finding.level for finding in findings]
    counts = [
        f"{levels.count(level)} {level}{'s' if levels.count(level) > 1 else ''}"
        for level in ("problem", "warning")
        if level in levels
    ]
    verdict = "A server would start here" if serves(findings) else "A server would not start here"
    return f"{verdict}{': ' if counts else ''}{' and '.join(counts)}."


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    for area in dict.fromkeys(finding.area for finding in findings):
        yield f"\n{area}"
        for finding in findings:
            if finding.area == area:
                yield f"  {finding.level:<9}{finding.found}"
                if finding.fix:
                    yield f"  {'':<9}-> {finding.fix}"


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """One object: ``serves``, ``findings``, and the ``facts`` that they were drawn from."""
    return json.dumps(
        {
            "serves": serves(findings),
            "findings": [attrs.asdict(finding) for finding in findings],
            "facts": attrs.asdict(facts),
        },
        indent=2,
    )
