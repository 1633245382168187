import subprocess
import sys

import tt_scheduler


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
        "Standing",
        "StepRecord",
        "TTSchedulerError",
        "Work",
        "choose_lane",
        "pack",
        "padded",
    ]
    assert all(hasattr(tt_scheduler, name) for name in tt_scheduler.__all__)


def test_scheduling_imports_no_framework() -> None:
    code = (
        "import sys, tt_scheduler; print([m for m in ('vllm', 'torch', 'numpy', 'ttnn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
