import pytest
from hypothesis import given
from hypothesis import strategies as st
from tt_registry import (
    AdapterImportError,
    BundleSource,
    CodeSource,
    DuplicateArchitectureError,
    Entry,
    InvalidEntryError,
    Registry,
    UnknownArchitectureError,
)
from tt_registry.registry import merged

NAMES = st.sampled_from(["AForCausalLM", "BForCausalLM", "TTBForCausalLM", "CForCausalLM"])


@given(builtin=st.sets(NAMES), provided=st.lists(NAMES, max_size=5))
def test_what_users_provide_wins_and_duplicates_raise(builtin: set[str], provided: list[str]) -> None:
    built_in = [Entry(name, "built:In") for name in builtin]
    entries = [Entry(n, f"user:C{i}", source=BundleSource(f"/b{i}")) for i, n in enumerate(provided)]
    plain = [entry.architecture for entry in entries]
    if len(set(plain)) < len(plain):
        with pytest.raises(DuplicateArchitectureError) as caught:
            merged(built_in, entries)
        assert caught.value.first != caught.value.second
        assert {caught.value.first, caught.value.second} <= {entry.source for entry in entries}
        return
    result = merged(built_in, entries)
    known = {entry.architecture for entry in built_in}
    assert set(result) == known | set(plain)
    for entry in entries:
        found = result[entry.architecture]
        assert (found.target, found.source) == (entry.target, entry.source)
        assert found.replaces == ("built:In" if entry.architecture in known else None)


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ("LamaForCausalLM", "LlamaForCausalLM"),
        ("TTGptossForCausalLM", "GptOssForCausalLM"),
        ("qwen2forcausallm", "Qwen2ForCausalLM"),
    ],
)
def test_an_unknown_architecture_lists_the_nearest(asked: str, nearest: str) -> None:
    with pytest.raises(UnknownArchitectureError) as caught:
        Registry.from_environ({}, entry_points=False).resolve(asked)
    assert caught.value.nearest[0] == nearest
    assert asked in str(caught.value)
    assert nearest in str(caught.value)


def test_an_unknown_architecture_mentions_what_was_left_out(tmp_path: object) -> None:
    registry = Registry.from_environ({"EXTRA_MODELS_DIR": str(tmp_path)}, entry_points=False)
    with pytest.raises(UnknownArchitectureError, match=f"left out.*{tmp_path}"):
        registry.resolve("NewForCausalLM")


def test_no_built_ins_on_request() -> None:
    registry = Registry.from_environ({"TT_VLLM_BUILTIN_MODELS": "0"}, entry_points=False)
    assert dict(registry.entries) == {}
    with pytest.raises(UnknownArchitectureError, match="is registered"):
        registry.resolve("LlamaForCausalLM")


def test_entries_cannot_be_changed() -> None:
    registry = Registry.from_environ({}, entry_points=False)
    with pytest.raises(TypeError):
        registry.entries["A"] = Entry("A", "b:C")  # type: ignore[index]


@pytest.mark.parametrize(
    ("architecture", "target", "word"),
    [
        ("", "a:B", "architecture is ''"),
        ("TT", "a:B", "architecture is ''"),
        ("a b", "a:B", "architecture is 'a b'"),
        (3, "a:B", "architecture is 3"),
        ("A", "a.B", "target is 'a.B'"),
        ("A", ":B", "expected module:Class"),
        ("A", "a:B.C", "expected module:Class"),
        ("A", None, "target is None"),
    ],
)
def test_malformed_entries(architecture: str, target: str, word: str) -> None:
    with pytest.raises(InvalidEntryError, match=word):
        Entry(architecture, target)


def test_load_gives_the_class() -> None:
    assert Entry("A", "collections:OrderedDict").load().__name__ == "OrderedDict"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("models.absent:A", ["models.absent:A", "ModuleNotFoundError", "PYTHONPATH"]),
        ("json:Absent", ["json:Absent", "has no class Absent"]),
        ("json:dumps", ["has no class dumps"]),
    ],
)
def test_a_class_that_does_not_load(target: str, words: list[str]) -> None:
    with pytest.raises(AdapterImportError) as caught:
        Entry("A", target).load()
    assert all(word in str(caught.value) for word in words)
    assert caught.value.source == CodeSource()


def test_capabilities_of_an_entry_know_its_mesh() -> None:
    registry = Registry.from_environ({}, entry_points=False)
    for architecture, folds in [("GptOssForCausalLM", True), ("LlamaForCausalLM", False)]:
        whole_mesh = registry.resolve(architecture).whole_mesh
        entry = Entry("A", "collections:OrderedDict", whole_mesh=whole_mesh)
        assert entry.capabilities().folds_dp_into_lanes is folds
