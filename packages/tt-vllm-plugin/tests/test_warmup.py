"""What is said and counted of programs that are compiled after warm-up."""

import attrs
import pytest
from prometheus_client import CollectorRegistry
from tt_scheduler import Phase
from vllm_tt_plugin.mesh import HostMesh
from vllm_tt_plugin.warmup import ProgramWatch


@attrs.define
class Device:
    """Tells how many programs it holds, as a mesh device of ttnn does."""

    programs: int = 5

    def num_program_cache_entries(self) -> int:
        return self.programs


def counted(registry: CollectorRegistry) -> float:
    """In Prometheus's multiprocess mode, what other tests of this process counted is among it."""
    return registry.get_sample_value("tt:programs_compiled_after_warmup_total") or 0.0


def test_each_program_compiled_by_a_step_is_counted_and_said(plugin_log: pytest.LogCaptureFixture) -> None:
    device, registry = Device(), CollectorRegistry()
    watch = ProgramWatch(device, registry)
    before = counted(registry)
    watch.look(Phase.DECODE)
    assert (counted(registry), plugin_log.messages) == (before, [])
    device.programs = 7
    watch.look(Phase.PREFILL)
    watch.look(Phase.DECODE)
    assert counted(registry) == before + 2
    (said,) = plugin_log.messages
    assert "A prefill step compiled 2 programs after warm-up" in said
    assert "trace_mode" in said


def test_a_cache_that_was_cleared_is_followed(plugin_log: pytest.LogCaptureFixture) -> None:
    device, registry = Device(), CollectorRegistry()
    watch = ProgramWatch(device, registry)
    before = counted(registry)
    for device.programs in (0, 1):
        watch.look(Phase.DECODE)
    assert counted(registry) == before + 1


def test_the_host_mesh_compiles_nothing(plugin_log: pytest.LogCaptureFixture) -> None:
    watch = ProgramWatch(HostMesh.open((1, 2)).device, CollectorRegistry())
    watch.look(Phase.DECODE)
    assert plugin_log.messages == []
