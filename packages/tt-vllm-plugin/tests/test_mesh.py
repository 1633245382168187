import pytest
from vllm_tt_plugin.errors import ConfigurationError
from vllm_tt_plugin.mesh import HostMesh, MeshSpec, default_fabric
from vllm_tt_plugin.mesh_ttnn import taken

PRESETS = {
    (1, 1): ("N150", "P100", "P150"),
    (1, 2): ("N300", "P300", "P150x2"),
    (1, 4): ("N150x4", "P150x4", "P300x2"),
    (1, 8): ("T3K", "P150x8"),
    (8, 4): ("TG", "BH-Galaxy"),
}


@pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for shape, names in PRESETS.items() for name in names]
)
def test_products(name: str, shape: tuple[int, int]) -> None:
    assert MeshSpec.parse(name) == MeshSpec.parse(f"  {name} ") == MeshSpec(on_host=False, shape=shape)


@pytest.mark.parametrize(
    ("value", "on_host", "shape"),
    [
        (None, False, None),
        ("", False, None),
        ("  ", False, None),
        ("(4,8)", False, (4, 8)),
        ("( 2 , 16 )", False, (2, 16)),
        ("host", True, (1, 1)),
        ("host:8x4", True, (8, 4)),
        ("host:1x32", True, (1, 32)),
    ],
)
def test_shapes_and_the_host_mesh(value: str | None, on_host: bool, shape: tuple[int, int] | None) -> None:
    assert MeshSpec.parse(value) == MeshSpec(on_host, shape)


@pytest.mark.parametrize(
    "value",
    [
        "N151",
        "t3k",
        "4x8",
        "(4,8",
        "(4)",
        "(0,8)",
        "(-1,8)",
        "(4,8,1)",
        "host:",
        "host:0x1",
        "host:8",
        "Host",
    ],
)
def test_other_values_name_every_form(value: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        MeshSpec.parse(value)
    message = str(caught.value)
    assert repr(value) in message
    for form in ("'(4,8)'", "'host:8x4'", *(name for names in PRESETS.values() for name in names)):
        assert form in message


@pytest.mark.parametrize(
    ("cluster", "chips_in_mesh", "fabric"),
    [
        *[(cluster, 1, None) for cluster in ("N150", "T3K", "GALAXY", "TG", "P150", "BLACKHOLE_GALAXY")],
        *[(cluster, 2, "FABRIC_1D") for cluster in ("N300", "T3K", "N300_2x2", "P150_X2", "P300", "CUSTOM")],
        *[(cluster, 8, "FABRIC_1D") for cluster in ("T3K", "P150_X8")],
        *[(cluster, chips, "FABRIC_1D_RING") for cluster in ("GALAXY", "TG") for chips in (2, 32)],
        ("BLACKHOLE_GALAXY", 32, "FABRIC_2D_TORUS_XY"),
    ],
)
def test_the_fabric_that_a_cluster_gets(cluster: str, chips_in_mesh: int, fabric: str | None) -> None:
    assert default_fabric(cluster, chips_in_mesh) == fabric


WAITS = "Waiting for lock 'CHIP_IN_USE_0_PCIe' which is currently held by thread TID: 15243, PID: 15240"
HELD = "another process is already holding the sysmem NOC address space UMD requires"


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (f"2026-11-30 16:18:16.939 | warning  |             UMD | {WAITS} (robust_mutex.cpp:476)\n", WAITS),
        (
            "Waiting for KMD lock 3 on 0, which is currently held by another handle",
            "Waiting for KMD lock 3 on 0, which is currently held by another handle",
        ),
        (
            "Expected sysmem to be mapped at NOC address 0x1, but it was mapped at 0x2. This usually means"
            f" {HELD} (often a stale or crashed process from a previous run). To fix this, find and kill",
            HELD,
        ),
    ],
)
def test_that_another_process_holds_the_chips_is_said_in_words(said: str, found: str) -> None:
    assert taken(said) == f"another process holds the chips; end it, then start again ({found})"


def test_other_failures_are_not_put_down_to_another_process() -> None:
    assert taken("Timeout waiting for ARC msg request queue. Failed to open device 0: No such file") is None


class Event:
    happened = False

    def synchronize(self) -> None:
        self.happened = True


def test_a_host_mesh_stands_in_for_a_device() -> None:
    mesh = HostMesh.open((8, 4))
    assert (mesh.shape, mesh.device.shape, mesh.device.get_num_devices()) == ((8, 4), (8, 4), 32)
    event = Event()
    mesh.wait_for(event)
    assert event.happened
    mesh.close()
    mesh.close()
