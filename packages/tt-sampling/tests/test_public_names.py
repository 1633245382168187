import tt_sampling


def test_public_names_are_these() -> None:
    assert tt_sampling.__all__ == [
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
    assert all(hasattr(tt_sampling, name) for name in tt_sampling.__all__)
