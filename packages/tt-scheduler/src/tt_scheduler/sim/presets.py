"""Devices that a policy can be tried on.

Figures said to be published are in the table of models in the readme that the ttnn 0.81.1 package carries,
for 128 tokens in and 32 users. Everything else is an estimate, and named as one.
"""

from collections.abc import Mapping
from types import MappingProxyType

from tt_scheduler.sim.device import Device
from tt_scheduler.sim.engine import Setup
from tt_scheduler.sim.lane import LaneShape

CHUNK_SIZES = (128, 256, 512, 1024, 2048)
"""Lengths that prompts are padded to: the usual powers of two."""

GALAXY_70B = Setup(
    # Published for Llama 3.3 70B: 53 ms to the first token, 72.5 tokens/s/user, so 13.8 ms a decode.
    # Estimates: a token costs a quarter of the T3K's since there are four times the chips, a row 0.05 ms,
    # and a change of phase 5 ms. Four lanes of eight rows; 64 blocks of 64 tokens for each row.
    Device(
        prefill_fixed_s=0.0474,
        prefill_token_s=44e-6,
        decode_fixed_s=1 / 72.5 - 32 * 50e-6,
        decode_row_s=50e-6,
        switch_s=0.005,
        padded_to=CHUNK_SIZES,
    ),
    LaneShape(rows=8, blocks=8 * 320, block_size=64),
    lanes=4,
    step_tokens=2048,
)

T3K_70B = Setup(
    # Published for Qwen 2.5 72B on eight Wormhole chips, the nearest in size: 223 ms to the first token, 15.4
    # tokens/s/user, so 64.9 ms a decode. Calibrated (see the readme): a chunk of 1,024 takes 0.38 s and a
    # change of phase 37.5 ms. Estimate: a row 0.2 ms.
    Device(
        prefill_fixed_s=0.2006,
        prefill_token_s=175.2e-6,
        decode_fixed_s=1 / 15.4 - 32 * 200e-6,
        decode_row_s=200e-6,
        switch_s=0.0375,
        padded_to=CHUNK_SIZES[:4],
    ),
    LaneShape(rows=32, blocks=4096, block_size=64),
    step_tokens=1024,
)

N150_8B = Setup(
    # All estimates, near what demos of Llama 3.1 8B show: 0.1 s to the first token of 128 tokens, 40 ms a
    # decode of 32 rows, 5 ms for a change of phase.
    Device(
        prefill_fixed_s=0.05,
        prefill_token_s=400e-6,
        decode_fixed_s=0.036,
        decode_row_s=125e-6,
        switch_s=0.005,
        padded_to=CHUNK_SIZES,
    ),
    LaneShape(rows=32, blocks=1024, block_size=64),
    step_tokens=2048,
)

PRESETS: Mapping[str, Setup] = MappingProxyType(
    {"n150-8b": N150_8B, "t3k-70b": T3K_70B, "galaxy-70b": GALAXY_70B}
)
