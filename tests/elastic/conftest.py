"""One nursery for all groups of these tests: imports are paid for once."""

from collections.abc import Iterator

import pytest
from elastic_ep import Launcher
from elastic_ep.testing.toy_group import ENVIRONMENT


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher(["elastic_ep.testing.toy_group", "nixl._api"], ENVIRONMENT)
    yield launcher
    launcher.close()
