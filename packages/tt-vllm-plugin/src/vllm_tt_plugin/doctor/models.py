"""Which architectures can be served, and where their classes come from."""

from collections.abc import Iterator

from vllm_tt_plugin.doctor.facts import Facts
from vllm_tt_plugin.doctor.finding import Finding


def model_findings(facts: Facts) -> Iterator[Finding]:
    """Registered classes, those that are missing, and bundles that fail."""
    for problem in facts.model_problems:
        yield Finding("models", "problem", problem)
    missing = [model for model in facts.models if not model.found]
    servable = [model for model in facts.models if model.found and model.refused is None]
    for model in servable:
        yield Finding("models", "ok", f"{model.architecture}: {model.adapter_class} ({model.source})")
    if missing:
        names = ", ".join(model.architecture for model in missing)
        yield Finding(
            "models",
            "warning" if servable else "problem",
            f"the adapter classes of {len(missing)} architectures are not on the Python path: {names}",
            "Add the folder that holds TT-Metal's `models` package to PYTHONPATH"
            + ("" if servable else ", or name a folder with models of your own in EXTRA_MODELS_DIR"),
        )
    elif not servable and not facts.model_problems:
        yield Finding(
            "models",
            "problem",
            "no architecture is registered that could be served",
            "Unset TT_VLLM_BUILTIN_MODELS, or name a folder with models of your own in EXTRA_MODELS_DIR",
        )
