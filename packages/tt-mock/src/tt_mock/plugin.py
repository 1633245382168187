"""The pytest plugin. It imports nothing of this package, nor ttnn, until a test asks for the fixture."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tt_mock.mock import MockClusters


@pytest.fixture(scope="session")
def tt_mock(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> "MockClusters":
    """Mock clusters: `tt_mock.run("t3k", function, argument)` calls it in a process that has a T3K."""
    from tt_mock.mock import MockClusters

    folder = tmp_path_factory.mktemp("tt_mock")
    cache = getattr(pytestconfig, "cache", None)  # absent under -p no:cacheprovider
    tools = cache.mkdir("tt_mock") if cache is not None else folder
    return MockClusters(folder=folder, tools=tools, start=pytestconfig.rootpath)
