import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tt_registry import BundleImportError, Registry

MakeBundle = Callable[..., Path]

EVERY_IMPORT = """
import helper
import json
import package.inner as dotted
from helper import NAME
from package import inner
from package.inner import FROM_INNER
from . import helper as relative
from .package.inner import FROM_INNER as relative_inner

class Adapter:
    def seen(self):
        import helper as lazy
        import package.inner
        import plain.deep
        from helper import NAME as lazily
        def nested():
            import helper
            return helper.NAME
        names = [helper.NAME, NAME, lazy.NAME, lazily, relative.NAME, nested(), dotted.FROM_INNER]
        names += [FROM_INNER, relative_inner, inner.FROM_INNER, package.inner.FROM_INNER, plain.deep.NAME]
        assert lazy is helper is relative
        return set(names), json.dumps({})
"""


def every_import(name: str) -> dict[str, str]:
    """A bundle whose modules find each other in every way that Python's import statement has."""
    return {
        "adapter.py": EVERY_IMPORT,
        "helper.py": f"NAME = {name!r}\n",
        "package/__init__.py": "",
        "package/inner.py": "import helper\nfrom ..helper import NAME\nFROM_INNER = helper.NAME\n",
        "plain/deep.py": "from helper import NAME\n",
    }


def registry_of(folder: Path) -> Registry:
    return Registry.from_environ({"EXTRA_MODELS_DIR": str(folder)}, entry_points=False)


def test_two_bundles_with_modules_of_the_same_names(make_bundle: MakeBundle) -> None:
    for name in ["a", "b"]:
        folder = make_bundle(name, every_import(name), f"{name.upper()}ForCausalLM")
    registry = registry_of(folder.parent)
    before = set(sys.modules)
    registry.install()
    classes = [registry.resolve(f"{name}ForCausalLM").load() for name in "AB"]
    assert [cls().seen() for cls in classes] == [({"a"}, "{}"), ({"b"}, "{}")]
    assert {name.partition(".")[0] for name in set(sys.modules) - before} == {"tt_bundles"}


def test_the_bundles_own_modules_win_over_installed_ones(make_bundle: MakeBundle) -> None:
    files = {
        "adapter.py": "import attrs, json\nclass Adapter:\n    seen = attrs.MINE, json.MINE\n",
        "attrs/__init__.py": "MINE = 1\n",
        "json.py": "MINE = 2\n",
    }
    registry = registry_of(make_bundle("new", files))
    registry.install()
    assert registry.resolve("NewForCausalLM").load().seen == (1, 2)  # type: ignore[attr-defined]
    assert importlib.import_module("attrs").frozen
    assert importlib.import_module("json").dumps


def test_a_plain_folder_does_not_hide_an_installed_package(make_bundle: MakeBundle) -> None:
    files = {"adapter.py": "from attrs import frozen\nclass Adapter: ...\n", "attrs/data.txt": ""}
    registry = registry_of(make_bundle("new", files))
    registry.install()
    assert registry.resolve("NewForCausalLM").load()


def test_relative_imports_reach_the_bundles_init(make_bundle: MakeBundle) -> None:
    files = {
        "__init__.py": "import helper\nANSWER = helper.ANSWER\n",
        "helper.py": "ANSWER = 42\n",
        "adapter.py": "from . import ANSWER\nclass Adapter:\n    answer = ANSWER\n",
    }
    registry = registry_of(make_bundle("new", files))
    registry.install()
    assert registry.resolve("NewForCausalLM").load().answer == 42  # type: ignore[attr-defined]


def test_the_class_is_known_by_the_same_name_in_another_process(make_bundle: MakeBundle) -> None:
    folder = make_bundle("new", every_import("new"))
    registry = registry_of(folder)
    registry.install()
    pickled = pickle.dumps(registry.resolve("NewForCausalLM").load()())
    code = (
        "import os, pickle, sys; from tt_registry import Registry\n"
        "Registry.from_environ(os.environ, entry_points=False).install()\n"
        "print(pickle.loads(sys.stdin.buffer.read()).seen())"
    )
    environ = {**os.environ, "EXTRA_MODELS_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, env=environ)
    assert done.stdout.decode().strip() == "({'new'}, '{}')", done.stderr.decode()


def test_an_import_error_names_place_and_cause(make_bundle: MakeBundle) -> None:
    files = {"adapter.py": "import helper\n", "helper.py": "x = 1\nimport absent_module\n"}
    folder = make_bundle("new", files)
    registry = registry_of(folder)
    registry.install()
    with pytest.raises(BundleImportError) as caught:
        registry.resolve("NewForCausalLM").load()
    words = [str(folder), "No module named 'absent_module'", "helper.py:2", "python -m tt_registry check"]
    assert all(word in str(caught.value) for word in words)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_loading_before_install_says_so(make_bundle: MakeBundle) -> None:
    registry = registry_of(make_bundle("new", every_import("new")))
    with pytest.raises(BundleImportError, match=r"registry\.install\(\)"):
        registry.resolve("NewForCausalLM").load()


def test_folders_of_the_same_name_stay_apart(make_bundle: MakeBundle) -> None:
    for parent in ["x", "y"]:
        folder = make_bundle(f"{parent}/model 1.0", every_import(parent), f"{parent.upper()}ForCausalLM")
    registries = [registry_of(folder.parent.parent / parent) for parent in "xy"]
    for registry in registries:
        registry.install()
    seen = [
        next(iter(r.entries[f"{n}ForCausalLM"].load()().seen()[0]))
        for r, n in zip(registries, "XY", strict=True)
    ]
    assert seen == ["x", "y"]


def test_uninstall_leaves_another_registrys_modules_alone(make_bundle: MakeBundle) -> None:
    folder = make_bundle("new", every_import("new"))
    first, second = registry_of(folder), registry_of(folder)
    first.install()
    second.install()
    loaded = first.resolve("NewForCausalLM").load()
    first.uninstall()
    assert second.resolve("NewForCausalLM").load() is loaded


@pytest.fixture
def two_registries(make_bundle: MakeBundle) -> list[tuple[Registry, set[str]]]:
    """One registry over bundles A and B, one over B alone."""
    make_bundle("a", every_import("a"), "AForCausalLM")
    both = make_bundle("b", every_import("b"), "BForCausalLM").parent
    return [(registry_of(both), {"A", "B"}), (registry_of(both / "b"), {"B"})]


def test_install_and_uninstall_in_any_order(two_registries: list[tuple[Registry, set[str]]]) -> None:
    class Installing(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.installed: set[int] = set()

        @rule(which=st.sampled_from([0, 1]))
        def install(self, which: int) -> None:
            two_registries[which][0].install()
            self.installed.add(which)

        @rule(which=st.sampled_from([0, 1]))
        def uninstall(self, which: int) -> None:
            two_registries[which][0].uninstall()
            self.installed.discard(which)

        @rule(name=st.sampled_from("AB"))
        def load(self, name: str) -> None:
            entry = two_registries[0][0].entries[f"{name}ForCausalLM"]
            if any(name in two_registries[which][1] for which in self.installed):
                assert entry.load()().seen() == ({name.lower()}, "{}")
            else:
                with pytest.raises(BundleImportError):
                    entry.load()

        @invariant()
        def modules_live_only_where_served(self) -> None:
            served = set().union(*(two_registries[which][1] for which in self.installed))
            loaded = {name.split(".")[1][0].upper() for name in sys.modules if name.startswith("tt_bundles.")}
            assert loaded <= served
            assert "helper" not in sys.modules

        def teardown(self) -> None:
            for registry, _ in two_registries:
                registry.uninstall()
            assert not [name for name in sys.modules if name.startswith("tt_bundles")]

    Installing.TestCase.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)
    Installing.TestCase("runTest").runTest()
