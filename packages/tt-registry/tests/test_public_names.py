import subprocess
import sys

import tt_registry


def test_public_names() -> None:
    assert sorted(tt_registry.__all__) == [
        "AdapterImportError",
        "BuiltinSource",
        "BundleImportError",
        "BundleSource",
        "Capabilities",
        "CapabilityError",
        "CodeSource",
        "DuplicateArchitectureError",
        "Entry",
        "EntryPointSource",
        "Finding",
        "InvalidEntryError",
        "LaneRule",
        "MalformedBundleError",
        "Problem",
        "Registry",
        "RegistryError",
        "Report",
        "SettingError",
        "Source",
        "UnknownArchitectureError",
        "WholeMesh",
        "check_adapter",
        "check_bundle",
    ]
    assert all(hasattr(tt_registry, name) for name in tt_registry.__all__)


def test_building_a_registry_imports_no_framework() -> None:
    code = (
        "import sys, tt_registry; tt_registry.Registry.from_environ({}, entry_points=False).install();"
        "print([m for m in ('vllm', 'torch', 'numpy', 'ttnn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
