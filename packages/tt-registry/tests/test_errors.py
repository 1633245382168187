import pickle

import pytest
from tt_registry import (
    AdapterImportError,
    BundleImportError,
    BundleSource,
    CapabilityError,
    DuplicateArchitectureError,
    EntryPointSource,
    InvalidEntryError,
    MalformedBundleError,
    Problem,
    RegistryError,
    SettingError,
    UnknownArchitectureError,
)

BUNDLE = BundleSource("/bundles/new")
PROBLEM = Problem(BUNDLE, "arch is None", ("A",))


@pytest.mark.parametrize(
    "error",
    [
        SettingError("TT_LLAMA_TEXT_VER", "x", "one of a, b"),
        InvalidEntryError("target", "x", "module:Class"),
        DuplicateArchitectureError("A", BUNDLE, EntryPointSource("a", "acme")),
        UnknownArchitectureError("A", ("B",), (PROBLEM,)),
        MalformedBundleError("A", PROBLEM),
        CapabilityError("Adapter", "supports_async_decode", 1, "a bool"),
        AdapterImportError("m:C", EntryPointSource("a", "acme"), "reason", "advice"),
        BundleImportError("m:C", BUNDLE, "reason", "advice"),
    ],
)
def test_errors_cross_processes_whole(error: RegistryError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))
    for value in vars(error).values():
        assert str(value) in str(error) or isinstance(value, tuple | int)
