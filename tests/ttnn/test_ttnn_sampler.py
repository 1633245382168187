"""The sampler through ttnn, and tt_mock's stand-ins, by the real ttnn on mock clusters.

`sampler_checks.py` and `kit_checks.py` say what is checked.
"""

import pytest

from .checks import names_in
from .conftest import Watched

MESHES = {
    "n150": {"one chip": (1, 1, "DISABLED")},
    "t3k": {"a line": (1, 8, "FABRIC_1D_RING"), "a grid": (2, 4, "FABRIC_1D")},
}


def outcomes(mock: Watched, cluster: str) -> dict[str, dict[str, str]]:
    """By mesh, how each check failed, or nothing."""
    told = mock.run(cluster, "device_checks.on_meshes", list(MESHES[cluster].values()))
    return dict(zip(MESHES[cluster], told, strict=True))


@pytest.mark.parametrize("check", [*names_in("sampler_checks.py"), *names_in("kit_checks.py")])
@pytest.mark.parametrize(
    ("cluster", "mesh"), [(cluster, mesh) for cluster, meshes in MESHES.items() for mesh in meshes]
)
def test_on_mock_clusters(cluster: str, mesh: str, check: str, mock: Watched) -> None:
    failure = outcomes(mock, cluster)[mesh][check]
    assert not failure, failure
