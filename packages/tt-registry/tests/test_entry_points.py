import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tt_registry import DuplicateArchitectureError, EntryPointSource, Registry

MakeBundle = Callable[..., Path]

HEAD = "from tt_registry import Entry\n"


def distribute(folder: Path, name: str, value: str, module: str) -> None:
    """Put a distribution with one entry point and one module on `sys.path`, as an installer would."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tt_registry.architectures]\n{name} = {value}\n")
    (folder / f"{value.partition(':')[0]}.py").write_text(module)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.mark.parametrize(
    ("number", "body", "expected"),
    [
        (0, "it = Entry('OneForCausalLM', 'm:One')", ["OneForCausalLM"]),
        (1, "it = [Entry('OneForCausalLM', 'm:One'), Entry('TTTwo', 'm:Two')]", ["OneForCausalLM", "Two"]),
        (2, "def it(): return Entry('OneForCausalLM', 'm:One')", ["OneForCausalLM"]),
        (3, "def it(): yield Entry('OneForCausalLM', 'm:One')", ["OneForCausalLM"]),
    ],
)
def test_the_forms_of_an_entry_point(tmp_path: Path, number: int, body: str, expected: list[str]) -> None:
    distribute(tmp_path, "acme", f"acme_form_{number}:it", HEAD + body)
    registry = Registry.from_environ({"TT_VLLM_BUILTIN_MODELS": "0"})
    mine = [e for e in registry.entries.values() if e.source == EntryPointSource("acme", "acme")]
    assert [entry.architecture for entry in mine] == expected


@pytest.mark.parametrize(
    ("number", "body", "word"),
    [
        (0, "raise RuntimeError('licence expired')", "RuntimeError: licence expired"),
        (1, "import absent_module", "ModuleNotFoundError"),
        (2, "other = 1", "AttributeError"),
        (3, "it = 3", "expected an Entry"),
        (4, "it = ['LlamaForCausalLM']", "expected an Entry"),
        (5, "def it(): return [Entry('A', 'no-colon')]", "target is 'no-colon'"),
    ],
)
def test_a_failing_entry_point_hinders_no_other(tmp_path: Path, number: int, body: str, word: str) -> None:
    distribute(tmp_path, "broken", f"broken_{number}:it", HEAD + body)
    distribute(tmp_path, "sound", f"sound_{number}:it", HEAD + "it = Entry('SoundForCausalLM', 'm:S')")
    registry = Registry.from_environ({})
    assert registry.resolve("SoundForCausalLM").source == EntryPointSource("sound", "sound")
    (problem,) = [p for p in registry.problems if p.source == EntryPointSource("broken", "broken")]
    assert word in str(problem)
    assert "distribution 'broken'" in str(problem)


def test_a_bundle_and_an_entry_point_for_one_architecture(tmp_path: Path, make_bundle: MakeBundle) -> None:
    folder = make_bundle("new", {"adapter.py": ""}, "TwiceForCausalLM")
    distribute(tmp_path, "twice", "twice_it:it", HEAD + "it = Entry('TwiceForCausalLM', 'm:T')")
    with pytest.raises(DuplicateArchitectureError) as caught:
        Registry.from_environ({"EXTRA_MODELS_DIR": str(folder)})
    assert str(folder) in str(caught.value)
    assert "distribution 'twice'" in str(caught.value)


def test_an_entry_point_replaces_a_built_in(tmp_path: Path) -> None:
    distribute(tmp_path, "better", "better_it:it", HEAD + "it = Entry('GptOssForCausalLM', 'm:G')")
    assert Registry.from_environ({}).resolve("GptOssForCausalLM").replaces is not None
    assert Registry.from_environ({}, entry_points=False).resolve("GptOssForCausalLM").replaces is None
