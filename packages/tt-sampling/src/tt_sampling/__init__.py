"""Where a batch is sampled, with which parameters, and what the right answer is."""

from tt_sampling.errors import ParamsError, ShapeError, TTSamplingError
from tt_sampling.reference import Sampled, penalise, probabilities, sample
from tt_sampling.reload import ReloadCommands, ReloadState, StepFacts, advance
from tt_sampling.routing import (
    DeviceCapabilities,
    DeviceLogprobs,
    Phase,
    Reason,
    Route,
    RowNeeds,
    SampleMode,
    route,
    route_rows,
    row_reasons,
)
from tt_sampling.seeds import fresh_generator, step_generator, step_seed
from tt_sampling.wire import NO_LOGPROBS, TOP_LOGPROBS, RowParams, TTSamplingParams, is_greedy, pack

__all__ = [
    "NO_LOGPROBS",
    "TOP_LOGPROBS",
    "DeviceCapabilities",
    "DeviceLogprobs",
    "ParamsError",
    "Phase",
    "Reason",
    "ReloadCommands",
    "ReloadState",
    "Route",
    "RowNeeds",
    "RowParams",
    "SampleMode",
    "Sampled",
    "ShapeError",
    "StepFacts",
    "TTSamplingError",
    "TTSamplingParams",
    "advance",
    "fresh_generator",
    "is_greedy",
    "pack",
    "penalise",
    "probabilities",
    "route",
    "route_rows",
    "row_reasons",
    "sample",
    "step_generator",
    "step_seed",
]
