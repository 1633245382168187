"""The form that all benchmarks share: what they print, what they keep, and how a comparison is made."""

import itertools
import json
from pathlib import Path

import pytest
from _form import Comparison, Figure, interleave, main

FIGURES = [
    Figure("step_ms", 0.08, at_most=0.1),
    Figure("rate_per_s", 90.0, at_least=100.0, note="32 requests"),
    Figure("peak_mib", 512.0),
]


def test_interleave_takes_turns() -> None:
    ticks = itertools.count(1)
    comparison = interleave(lambda: next(ticks), lambda: next(ticks), rounds=3)
    assert comparison == Comparison(a=(1, 3, 5), b=(2, 4, 6))


def test_interleave_refuses_no_rounds() -> None:
    with pytest.raises(ValueError, match="rounds is 0"):
        interleave(float, float, rounds=0)


def test_ratio_is_of_medians_and_spread_of_rounds() -> None:
    comparison = Comparison((3.0, 1.0, 100.0), (1.0, 2.0, 2.0))
    assert comparison.ratio == 1.5
    assert comparison.spread == (0.5, 50.0)
    assert comparison.figure("over_ratio", at_most=1.0).note == "0.5 to 50 in 3 rounds"


@pytest.mark.parametrize(
    ("figure", "holds"),
    [
        (Figure("x", 1.0, at_most=1.0), True),
        (Figure("x", 1.1, at_most=1.0), False),
        (Figure("x", 0.9, at_least=1.0), False),
        (Figure("x", 2.0, at_least=1.0, at_most=3.0), True),
        (Figure("x", float("nan"), at_most=1.0), False),
        (Figure("x", 9.0), True),
    ],
)
def test_a_figure_holds_within_its_limits(figure: Figure, holds: bool) -> None:
    assert figure.holds is holds


def test_table_is_for_people_and_the_last_line_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    main("somewhere/step_overhead.py", "Says.", lambda quick: FIGURES, ["--json", "--quick"])
    *rows, last = capsys.readouterr().out.splitlines()
    assert [row.split() for row in rows] == [
        ["step_overhead"],
        ["step_ms", "0.08", "at", "most", "0.1:", "holds"],
        ["rate_per_s", "90", "at", "least", "100:", "MISSED", "32", "requests"],
        ["peak_mib", "512"],
    ]
    outcome = json.loads(last)
    assert outcome["name"] == "step_overhead"
    assert outcome["figures"] == {"step_ms": 0.08, "rate_per_s": 90.0, "peak_mib": 512.0}
    assert outcome["aims"]["rate_per_s"] == {"at_least": 100.0, "holds": False}
    assert outcome["holds"] is False
    assert outcome["quick"] is True
    assert outcome["machine"]["cores"] >= 1
    assert "torch" in outcome["versions"]


def test_save_keeps_full_results_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("name.py", "Says.", lambda quick: FIGURES, ["--save", "--quick"], tmp_path)
    assert "leave out --quick" in capsys.readouterr().err
    main("name.py", "Says.", lambda quick: FIGURES, ["--save"], tmp_path)
    kept = json.loads((tmp_path / "name.json").read_text())
    assert (kept["name"], kept["quick"]) == ("name", False)
