import subprocess
import sys

import tt_scheduler
import tt_scheduler.sim


def test_public_names() -> None:
    assert sorted(tt_scheduler.__all__) == [
        "Admission",
        "BoundedGap",
        "Choice",
        "CursorError",
        "Interleave",
        "LaneLoad",
        "Line",
        "Phase",
        "PhasePolicy",
        "PrefillFirst",
        "RowAccount",
        "RowError",
        "SimulationError",
        "Standing",
        "StepRecord",
        "TTSchedulerError",
        "Work",
        "choose_lane",
        "cut",
        "padded",
    ]
    assert all(hasattr(tt_scheduler, name) for name in tt_scheduler.__all__)


def test_public_names_of_the_simulator() -> None:
    assert sorted(tt_scheduler.sim.__all__) == [
        "Arrival",
        "Device",
        "LaneShape",
        "MODES",
        "MixedBudget",
        "Mode",
        "PRESETS",
        "PhasePure",
        "RanStep",
        "Run",
        "Setup",
        "SimRequest",
        "SimStep",
        "Summary",
        "TRACES",
        "bursts",
        "chat_mix",
        "draw",
        "long_prompts",
        "mode_named",
        "percentile",
        "read_arrivals",
        "read_measured",
        "saturating",
        "simulate",
        "summarize",
        "table",
        "write_arrivals",
    ]
    assert all(hasattr(tt_scheduler.sim, name) for name in tt_scheduler.sim.__all__)


def test_scheduling_imports_no_framework() -> None:
    strangers = ("vllm", "torch", "numpy", "ttnn", "matplotlib")
    code = f"import sys, tt_scheduler.sim; print([name for name in {strangers} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
