import json
import subprocess
import sys
from pathlib import Path

import pytest
from tt_scheduler.sim import PRESETS, TRACES, Arrival, Run, SimStep, draw, read_arrivals, write_arrivals
from tt_scheduler.sim.command import main

SHORT = [Arrival(0.0, 100, 10), Arrival(0.1, 3000, 5)]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    write_arrivals(tmp_path / "trace.jsonl", SHORT)
    return str(tmp_path / "trace.jsonl")


def test_a_table_with_a_column_for_each_policy(trace: str) -> None:
    command = [sys.executable, "-m", "tt_scheduler", "simulate", "--trace", trace, "--preset", "galaxy-70b"]
    done = subprocess.run(
        [*command, "--policy", "prefill-first", "--policy", "bounded-gap:0.2"],
        capture_output=True,
        text=True,
        check=True,
    )
    head, columns, *rows = done.stdout.splitlines()
    assert head == f"galaxy-70b, trace {trace}, times in seconds"
    assert columns.split() == ["prefill-first", "bounded-gap:0.2"]
    worst = next(row for row in rows if row.startswith("worst gap  "))
    first, bounded = map(float, worst.split()[-2:])
    assert bounded <= 0.2 < first + 0.1


def test_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["simulate", "--trace", trace, "--json", "--lanes", "2", "--jitter", "0.1"])
    found = json.loads(capsys.readouterr().out)
    assert list(found["policies"]) == ["prefill-first", "interleave:2:1", "bounded-gap:1.0", "mixed"]
    assert all(figures["requests"] == 2 for figures in found["policies"].values())


def test_costs_are_fitted_to_measured_steps(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = PRESETS["n150-8b"].device
    steps = [SimStep((128,)), SimStep((512,)), SimStep((), 1), SimStep((), 9), SimStep((), 9, True)]
    lines = [
        {"prefills": s.prefills, "decode_rows": s.decode_rows, "changes_phase": s.changes_phase}
        | {"seconds": 2 * device.seconds(s)}
        for s in steps
    ]
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = ["simulate", "--trace", trace, "--preset", "n150-8b", "--json", "--policy", "mixed"]
    main([*arguments, "--measured", str(tmp_path / "steps.jsonl")])
    found = json.loads(capsys.readouterr().out)["device"]
    assert found["decode_row_s"] == pytest.approx(2 * device.decode_row_s)
    assert found["prefill_token_s"] == pytest.approx(2 * device.prefill_token_s)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "fifo"], "'fifo' is no policy"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--preset", "abacus"], "invalid choice: 'abacus'"),
        (["--jitter", "2"], "jitter"),
    ],
)
def test_what_cannot_be_understood(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", *arguments])
    assert says in capsys.readouterr().err


def test_pictures(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    main(["simulate", "--trace", trace, "--preset", "galaxy-70b", "--plot", str(tmp_path / "drawn")])
    for name in ("times.png", "phases.png"):
        assert (tmp_path / "drawn" / name).read_bytes().startswith(b"\x89PNG")
    assert "drew" in capsys.readouterr().err


def test_a_picture_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert all(path.exists() for path in draw({"none": Run((), (), ())}, tmp_path))


def test_arrivals_come_back_in_order(tmp_path: Path) -> None:
    write_arrivals(tmp_path / "trace", SHORT[::-1])
    assert read_arrivals(tmp_path / "trace") == SHORT


@pytest.mark.parametrize("text", ["x", '{"at_s": 0}', '{"at_s": -1, "prompt_tokens": 1, "output_tokens": 1}'])
def test_a_line_that_is_no_arrival_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace").write_text(f'{{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1}}\n\n{text}\n')
    with pytest.raises(ValueError, match=r"line 3: .* is no arrival"):
        read_arrivals(tmp_path / "trace")


def test_an_empty_file_holds_no_arrival(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("\n")
    with pytest.raises(ValueError, match="holds no arrival"):
        read_arrivals(tmp_path / "trace")


@pytest.mark.parametrize("name", TRACES)
def test_synthetic_traces_are_the_same_each_time(name: str) -> None:
    assert TRACES[name]() == TRACES[name]()
    assert TRACES[name]() == sorted(TRACES[name](), key=lambda arrival: arrival.at_s)
