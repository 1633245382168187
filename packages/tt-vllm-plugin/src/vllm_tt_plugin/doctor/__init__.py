"""``tt-vllm doctor``: what would happen if a server were started here, and what to change where it would not.

Facts are gathered at the edge (``sources.py``); what they mean is worked out by pure functions over them, one
module for each part of an installation. vLLM is not imported: its metadata and its rules are enough.
"""

from vllm_tt_plugin.doctor.facts import Facts
from vllm_tt_plugin.doctor.finding import Finding
from vllm_tt_plugin.doctor.hardware import hardware_findings
from vllm_tt_plugin.doctor.installation import installation_findings
from vllm_tt_plugin.doctor.models import model_findings
from vllm_tt_plugin.doctor.sources import gather

__all__ = ["Facts", "Finding", "diagnose", "gather"]


def diagnose(facts: Facts) -> tuple[Finding, ...]:
    """Everything there is to say about ``facts``; a server would start if none of it is a problem."""
    return (*installation_findings(facts), *hardware_findings(facts), *model_findings(facts))
