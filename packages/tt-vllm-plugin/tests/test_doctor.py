"""What the doctor makes of facts."""

import json
from typing import Any

import attrs
import pytest
from vllm_tt_plugin.config import TTConfig
from vllm_tt_plugin.doctor import Facts, Finding, diagnose
from vllm_tt_plugin.doctor.facts import Holder, Model, Plugin
from vllm_tt_plugin.doctor.report import as_json, as_text, serves
from vllm_tt_plugin.errors import Problem
from vllm_tt_plugin.mesh import MESH_SHAPES
from vllm_tt_plugin.mesh_ttnn import Probe

FABRICS = ("DISABLED", "FABRIC_1D", "FABRIC_1D_RING", "FABRIC_2D_TORUS_XY")
OURS = Plugin("tt", "tt-vllm-plugin")
OTHER = Plugin("ascend", "vllm-ascend")
LLAMA = Model("LlamaForCausalLM", "models.generator_vllm:LlamaForCausalLM", "built-in")
VERSIONS = {"vllm": "0.33.0", "ttnn": "0.81.1", "torch": "2.14.1", "numpy": "1.26.4"}
CHIPS = Probe(chips=8, cluster="T3K", fabric_names=FABRICS)
T3K = Facts(
    versions=VERSIONS,
    ttnn_path="site-packages/ttnn/__init__.py",
    environ={"MESH_DEVICE": "T3K"},
    platform_plugins=(OURS,),
    general_plugins=(Plugin("tt_model_registry", "tt-vllm-plugin"),),
    probe=CHIPS,
    driver_files=("0", "1", "2", "3"),
    models=(LLAMA,),
    memory_available=100 * 2**30,
)
"""A machine where all is well."""


def with_environ(**environ: str) -> dict[str, Any]:
    return {"environ": {**T3K.environ, **environ}}


def with_probe(**changes: Any) -> dict[str, Any]:
    return {"probe": attrs.evolve(CHIPS, **changes)}


def with_settings(**settings: Any) -> dict[str, Any]:
    return {"settings": TTConfig.parse(settings)}


def said(level: str, changes: dict[str, Any]) -> list[Finding]:
    return [finding for finding in diagnose(attrs.evolve(T3K, **changes)) if finding.level == level]


def test_where_all_is_well_a_server_would_start() -> None:
    findings = diagnose(T3K)
    assert {finding.level for finding in findings} == {"ok"}
    assert {finding.area for finding in findings} == {
        *("versions", "plugins", "devices", "mesh", "memory", "models")
    }
    assert serves(findings)


PROBLEMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no vLLM": ({"versions": {}}, "vLLM is not installed", "VLLM_TARGET_DEVICE=empty"),
    "old vLLM": ({"versions": {"vllm": "0.32.1"}}, "vLLM 0.32.1 is installed", "vLLM 0.33.x"),
    "new vLLM": ({"versions": {"vllm": "0.330.0"}}, "vLLM 0.330.0 is installed", "vLLM 0.33.x"),
    "numpy 2": ({"unmet": ("ttnn wants numpy<2, and numpy 2.1 is installed",)}, "numpy 2.1", "'numpy<2'"),
    "a sibling": (
        {"unmet": ("tt-vllm-plugin wants tt-sampling<0.2",)},
        "tt-sampling<0.2",
        "what is asked for",
    ),
    "only a path": ({"platform_plugins": ()}, "vLLM cannot find tt:", "pip install --no-deps"),
    "VLLM_PLUGINS is empty": (
        with_environ(VLLM_PLUGINS=""),
        "leaves out tt and tt_model_registry",
        "VLLM_PLUGINS=tt,tt_model_registry",
    ),
    "VLLM_PLUGINS without the registry": (
        with_environ(VLLM_PLUGINS="tt,tools"),
        "leaves out tt_model_registry",
        "VLLM_PLUGINS=tt,tools,tt_model_registry",
    ),
    "VLLM_PLUGINS with a space": (
        with_environ(VLLM_PLUGINS="tt, tt_model_registry"),
        "leaves out tt_model_registry",
        "VLLM_PLUGINS=tt,tt_model_registry",
    ),
    "another platform": (
        {"platform_plugins": (OURS, OTHER), "other_platforms": {"ascend": "ascend.NPUPlatform"}},
        "vllm-ascend brings a platform plugin 'ascend' that gives ascend.NPUPlatform",
        "VLLM_PLUGINS=tt,tt_model_registry",
    ),
    "vLLM's CPU": (with_environ(VLLM_TARGET_DEVICE="cpu"), "VLLM_TARGET_DEVICE is 'cpu'", "Unset it"),
    "no ttnn": ({"probe": None, "ttnn_path": None}, "ttnn is not installed", "MESH_DEVICE=host"),
    "a broken ttnn": (
        with_probe(chips=0, failure="libtt.so: cannot open"),
        "libtt.so: cannot",
        "Mend the TT-Metal",
    ),
    "no driver": (
        with_probe(chips=0) | {"driver_files": ()},
        "there is no /dev/tenstorrent",
        "modprobe tenstorrent",
    ),
    "hung cards": (with_probe(chips=0), "the driver has 4 cards", "tt-smi -r"),
    "too few chips": (with_probe(chips=4), "1x8 chips and 4 are visible", "TT_VISIBLE_DEVICES"),
    "an unknown mesh": (with_environ(MESH_DEVICE="T4K"), "MESH_DEVICE is 'T4K'", "N150"),
    "an unknown fabric": (with_settings(fabric_config="FABRIC_3D"), "is 'FABRIC_3D'", "FABRIC_1D_RING"),
    "a setting": ({"setting_problems": (Problem("no key 'x'", "y"),)}, "no key 'x'", "y"),
    "a bundle": ({"model_problems": ("bundle mine: adapter.py: no torch",)}, "bundle mine", ""),
    "no classes": ({"models": (attrs.evolve(LLAMA, found=False),)}, "LlamaForCausalLM", "PYTHONPATH"),
    "two providers": ({"models": (), "model_problems": ("X is provided twice",)}, "provided twice", ""),
    "no models": ({"models": ()}, "no architecture is registered", "EXTRA_MODELS_DIR"),
    "refused models": (
        {"models": (attrs.evolve(LLAMA, refused="no"),)},
        "could be served",
        "EXTRA_MODELS_DIR",
    ),
}


@pytest.mark.parametrize(("changes", "found", "fix"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_problem_and_its_fix(changes: dict[str, Any], found: str, fix: str) -> None:
    (problem,) = said("problem", changes)
    assert found in problem.found
    assert fix in problem.fix
    assert not serves([problem])


WARNINGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "another vLLM build": ({"vllm_has_kernels": True}, "another kind of device", "VLLM_TARGET_DEVICE=empty"),
    "another ttnn": ({"versions": VERSIONS | {"ttnn": "0.79.0"}}, "was tried with 0.81", "that version"),
    "V2": (with_environ(VLLM_USE_V2_MODEL_RUNNER="1"), "custom logits processors", "Unset it"),
    "a mock cluster": (with_environ(TT_METAL_MOCK_CLUSTER_DESC_PATH="t3k.yaml"), "only described", "Unset"),
    "a taken card": ({"holders": (Holder(77, "python3"),)}, "process 77 (python3)", "End it"),
    "little memory": ({"memory_available": 2**30}, "1.0 GiB", "End other programs"),
    "some classes": (
        {"models": (LLAMA, attrs.evolve(LLAMA, found=False))},
        "of 1 architectures",
        "PYTHONPATH",
    ),
}


@pytest.mark.parametrize(("changes", "found", "fix"), WARNINGS.values(), ids=WARNINGS)
def test_a_warning_does_not_keep_a_server_from_starting(
    changes: dict[str, Any], found: str, fix: str
) -> None:
    (warning,) = said("warning", changes)
    assert found in warning.found
    assert fix in warning.fix
    assert said("problem", changes) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"platform_plugins": (OURS, OTHER)},
        {"platform_plugins": (OURS, OTHER), **with_environ(VLLM_PLUGINS="tt,tt_model_registry")},
        with_environ(VLLM_PLUGINS="tt,tt_model_registry,tools"),
        with_environ(VLLM_USE_V2_MODEL_RUNNER="0"),
        {"versions": VERSIONS | {"ttnn": "0.81.1+local"}},
        {"versions": {"vllm": "0.33.1+empty"}},
        {"probe": None, "environ": {"MESH_DEVICE": "host:2x4"}},
    ],
)
def test_what_is_no_conflict(changes: dict[str, Any]) -> None:
    assert {finding.level for finding in diagnose(attrs.evolve(T3K, **changes))} == {"ok"}


@pytest.mark.parametrize("name", [*MESH_SHAPES, "(4,8)", ""])
@pytest.mark.parametrize(
    ("cluster", "chips", "fabric"),
    [
        ("N300", 2, "FABRIC_1D"),
        ("T3K", 8, "FABRIC_1D"),
        ("GALAXY", 32, "FABRIC_1D_RING"),
        ("BLACKHOLE_GALAXY", 32, "FABRIC_2D_TORUS_XY"),
    ],
)
def test_the_mesh_that_would_open(name: str, cluster: str, chips: int, fabric: str) -> None:
    rows, columns = MESH_SHAPES.get(name, (1, chips) if not name else (4, 8))
    facts = attrs.evolve(T3K, **with_environ(MESH_DEVICE=name), **with_probe(chips=chips, cluster=cluster))
    meshes = [finding.found for finding in diagnose(facts) if finding.area == "mesh"]
    if rows * columns > chips:
        assert meshes == []
        return
    (mesh,) = meshes
    assert mesh.startswith(f"a {rows}x{columns} mesh")
    assert (f"fabric {fabric}," in mesh) == (rows * columns > 1)
    assert ("no fabric" in mesh) == (rows * columns == 1)
    assert ("stay unused" in mesh) == (rows * columns < chips)


def test_a_fabric_of_the_user_is_the_one_that_would_open() -> None:
    (mesh,) = [
        f for f in diagnose(attrs.evolve(T3K, **with_settings(fabric_config="DISABLED"))) if f.area == "mesh"
    ]
    assert "fabric DISABLED, as set" in mesh.found


def test_text_and_json_say_the_same() -> None:
    findings = diagnose(attrs.evolve(T3K, versions={}, memory_available=0))
    text, told = as_text(findings), json.loads(as_json(T3K, findings))
    assert text.startswith("A server would not start here: 1 problem and 1 warning.")
    assert told["serves"] is False
    assert all(finding["found"] in text and finding["fix"] in text for finding in told["findings"])
    assert told["findings"] == [attrs.asdict(finding) for finding in findings]
    assert told["facts"]["probe"]["chips"] == 8
