import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tt_registry import (
    BundleSource,
    DuplicateArchitectureError,
    MalformedBundleError,
    Registry,
    SettingError,
)
from tt_registry.bundles import read_bundle

MakeBundle = Callable[..., Path]

MODULE = {"adapter.py": "class Adapter: ...\n"}


def registry_of(folder: Path, **environ: str) -> Registry:
    return Registry.from_environ({"EXTRA_MODELS_DIR": str(folder), **environ}, entry_points=False)


@pytest.mark.parametrize("arch", ["NewForCausalLM", "TTNewForCausalLM", ["TTNewForCausalLM"]])
@pytest.mark.parametrize("main_class", ["adapter:Adapter", "adapter.Adapter"])
def test_metadata_forms(make_bundle: MakeBundle, arch: object, main_class: str) -> None:
    folder = make_bundle("new", MODULE, arch, main_class)
    entry = registry_of(folder.parent).resolve("NewForCausalLM")
    assert entry.registered_as == "TTNewForCausalLM"
    assert entry.target.endswith(".adapter:Adapter")
    assert entry.source == BundleSource(str(folder))


def test_the_variable_may_name_one_bundle(make_bundle: MakeBundle) -> None:
    assert "NewForCausalLM" in registry_of(make_bundle("new", MODULE)).entries


def test_one_bundle_may_serve_several_architectures(make_bundle: MakeBundle) -> None:
    folder = make_bundle("new", MODULE, ["AForCausalLM", "TTBForCausalLM", "AForCausalLM"])
    registry = registry_of(folder, TT_VLLM_BUILTIN_MODELS="0")
    assert list(registry.entries) == ["AForCausalLM", "BForCausalLM"]


def test_other_metadata_keys_and_other_folders_are_ignored(make_bundle: MakeBundle) -> None:
    folder = make_bundle("new", MODULE)
    metadata = {"arch": "NewForCausalLM", "main_class": "adapter:Adapter", "author": ["a"], "": None}
    (folder / "vllm_metadata.json").write_text(json.dumps(metadata))
    (folder.parent / "weights").mkdir()
    (folder.parent / "notes.txt").write_text("")
    registry = registry_of(folder.parent, TT_VLLM_BUILTIN_MODELS="0")
    assert (list(registry.entries), registry.problems) == (["NewForCausalLM"], ())


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\udcff", "is not JSON"),
        ("[]", "expected an object"),
        ("{}", "arch is None"),
        ('{"arch": []}', "arch is []"),
        ('{"arch": ["AForCausalLM", 3]}', "arch is ['AForCausalLM', 3]"),
        ('{"arch": "TT"}', "arch is 'TT'"),
        ('{"arch": "A"}', "main_class is None"),
        ('{"arch": "A", "main_class": "Adapter"}', "expected module:Class"),
        ('{"arch": "A", "main_class": "../adapter:Adapter"}', "expected module:Class"),
        ('{"arch": "A", "main_class": "adaptor:Adapter"}', "there is no adaptor.py"),
    ],
)
def test_a_malformed_bundle_beside_a_good_one(make_bundle: MakeBundle, metadata: str, words: str) -> None:
    good = make_bundle("good", MODULE)
    bad = make_bundle("bad", MODULE)
    (bad / "vllm_metadata.json").write_bytes(metadata.encode(errors="surrogateescape"))
    registry = registry_of(good.parent)
    assert registry.resolve("NewForCausalLM").source == BundleSource(str(good))
    (problem,) = registry.problems
    assert problem.source == BundleSource(str(bad))
    assert words in problem.message


def test_a_malformed_bundle_is_not_papered_over_by_the_built_in(make_bundle: MakeBundle) -> None:
    folder = make_bundle("llama", MODULE, "LlamaForCausalLM", "adaptor:Adapter")
    registry = registry_of(folder)
    assert "LlamaForCausalLM" not in registry.entries
    with pytest.raises(MalformedBundleError, match=r"bundle .*llama: .*there is no adaptor\.py"):
        registry.resolve("TTLlamaForCausalLM")
    assert registry.resolve("Qwen2ForCausalLM")


def test_a_bundle_replaces_a_built_in_and_says_so(make_bundle: MakeBundle) -> None:
    folder = make_bundle("llama", MODULE, "LlamaForCausalLM")
    built_in = "models.tt_transformers.tt.generator_vllm:LlamaForCausalLM"
    assert registry_of(folder).resolve("LlamaForCausalLM").replaces == built_in
    alone = registry_of(folder, TT_VLLM_BUILTIN_MODELS="0")
    assert [entry.replaces for entry in alone.entries.values()] == [None]


def test_two_bundles_for_one_architecture(make_bundle: MakeBundle) -> None:
    first, second = make_bundle("first", MODULE), make_bundle("second", MODULE, "TTNewForCausalLM")
    with pytest.raises(DuplicateArchitectureError) as caught:
        registry_of(first.parent)
    assert all(word in str(caught.value) for word in ["NewForCausalLM", str(first), str(second)])


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"EXTRA_MODELS_DIR=.*expected an existing folder"):
        registry_of(tmp_path / "mistyped")


def test_a_folder_without_bundles_is_a_problem(tmp_path: Path) -> None:
    (problem,) = registry_of(tmp_path).problems
    assert "vllm_metadata.json" in problem.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.text(alphabet="TAa_.:/0", max_size=6)


@given(arch=JSON | NAMES | st.lists(NAMES, max_size=3), main_class=JSON | NAMES)
def test_any_metadata_gives_entries_or_a_problem(arch: object, main_class: object) -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "a.py").write_text("")
        (folder / "vllm_metadata.json").write_text(json.dumps({"arch": arch, "main_class": main_class}))
        bundle = read_bundle(folder)
    assert bool(bundle.entries) is (bundle.problem is None)
    assert all(entry.architecture.isidentifier() for entry in bundle.entries)
