"""Servers of several processes."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

from .conftest import OPTIONS
from .serving import SERVE_SMOLLM2, Server, environment, running, tail
from .test_requests import PROMPTS, generate

ENDS_WITHIN_S = 30  # most of it is for a busy machine


def nothing_is_left_of(server: Server) -> bool:
    deadline = time.monotonic() + ENDS_WITHIN_S
    while server.members() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not server.members()


GUIDE = [
    *("--data_parallel_size", "4", "--max_num_seqs", "8", "--async-scheduling"),
    *("--additional-config.tt.dispatch_core_axis", "col"),
    *("--additional-config.tt.sample_on_device_mode", "all"),
    *("--additional-config.tt.fabric_config", "FABRIC_1D_RING"),
    *("--additional-config.tt.worker_l1_size", "1344544"),
    *("--additional-config.tt.trace_region_size", "220000000"),
]
"""How the published guide starts a Galaxy: four lanes, and as many API servers, which is vLLM's default."""


def told_at_rest(server: Server, admitted: int) -> list[str]:
    """What the server tells when all that was admitted is over; counts are written out twice a second."""
    wanted = {f"tt:admissions_total {admitted}.0"}
    wanted |= {f'tt:lane_running{{lane="{lane}"}} 0.0' for lane in range(4)}
    deadline = time.monotonic() + ENDS_WITHIN_S
    while True:
        counted = sorted(line for line in server.get("/metrics").splitlines() if line.startswith("tt:"))
        if wanted <= set(counted):
            return counted
        assert time.monotonic() < deadline, "\n".join(counted)
        time.sleep(0.1)


@pytest.mark.timeout(1200)  # six processes, each of which imports all of vLLM
def test_four_lanes_as_the_guide_starts_them(tmp_path: Path, client: OpenAI) -> None:
    """Tokens do not depend on lanes, and every API server tells the same of all lanes."""
    prompts = [f"{number} is my number. " + PROMPTS[2] for number in range(8)]
    expected = [generate(client, prompt, max_tokens=24) for prompt in prompts]
    command = [*SERVE_SMOLLM2, *OPTIONS, *GUIDE]
    with running(command, tmp_path, environment(MESH_DEVICE="host:8x4")) as server:

        def through_its_own_connection(prompt: str) -> list[int]:
            with server.client() as other:
                return generate(other, prompt, max_tokens=24)

        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(through_its_own_connection, prompts)) == expected
        told = [told_at_rest(server, len(prompts)) for _ in range(4)]
        assert told[0] == told[1] == told[2] == told[3]
        assert server.metric("tt:steps_total") > 24
        assert "4 lanes of 8 sequences" in server.log.read_text()
        server.press_ctrl_c()
        assert server.process.wait(ENDS_WITHIN_S) == 0, tail(server.log)
        assert nothing_is_left_of(server), tail(server.log)
