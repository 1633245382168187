"""Checks a bundle folder or an adapter class against the contract before anything is served."""

import inspect
from pathlib import Path

import attrs

from tt_registry.bundles import read_bundle
from tt_registry.capabilities import Capabilities
from tt_registry.contract import ALLOCATORS, OUTPUT_PAIR, Call, contract_calls
from tt_registry.entry import Entry
from tt_registry.errors import AdapterImportError, CapabilityError
from tt_registry.importing import BundleFinder


@attrs.frozen
class Finding:
    """One thing that is wrong: `where` is a method, an attribute or a part of the bundle."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@attrs.frozen
class Report:
    """What a check of one bundle folder found; good if `findings` is empty."""

    path: str
    entries: tuple[Entry, ...]
    findings: tuple[Finding, ...]


def check_bundle(path: str | Path) -> Report:
    """Read the metadata, import the module (its code runs), find the class and check it."""
    folder = Path(path).expanduser()
    bundle = read_bundle(folder)
    if bundle.problem:
        return Report(str(folder), (), (Finding("metadata", bundle.problem.message),))
    finder = BundleFinder([folder])
    finder.install()
    try:
        findings = check_adapter(bundle.entries[0].load(), known_to_vllm=False)
    except AdapterImportError as error:
        findings = (Finding("main_class", error.reason),)
    finally:
        finder.uninstall()
    return Report(str(folder), bundle.entries, findings)


def check_adapter(adapter: type, *, known_to_vllm: bool = True) -> tuple[Finding, ...]:
    """What in the class does not fit the calls it will receive, given the capabilities it declares.

    With `known_to_vllm=False` also what vLLM's inspection wants of a class for an architecture that vLLM does
    not know, as a bundle's may be.
    """
    findings: list[Finding] = []
    try:
        capabilities = Capabilities.from_class(adapter)
    except CapabilityError as error:
        findings.append(Finding(error.key, str(error)))
        capabilities = Capabilities()
    findings += [Finding("model_capabilities", reason) for reason in capabilities.refusals()]
    for call in contract_calls(capabilities):
        findings += _check_call(adapter, call)
    if not any(_method(adapter, name) for name in ALLOCATORS):
        findings.append(Finding(ALLOCATORS[0], f"is missing; expected it or {ALLOCATORS[1]}"))
    for present, absent in (OUTPUT_PAIR, OUTPUT_PAIR[::-1]):
        if _method(adapter, present) and not _method(adapter, absent):
            findings.append(Finding(absent, f"is missing, but {present} is there; expected both or neither"))
    if not known_to_vllm:
        findings += _check_vllm_surface(adapter)
    return tuple(findings)


def _check_call(adapter: type, call: Call) -> list[Finding]:
    method = _method(adapter, call.method)
    if method is None:
        return [Finding(call.method, "is missing; the contract requires it")] if call.required else []
    if call.on_class and not isinstance(method, classmethod | staticmethod):
        return [Finding(call.method, "is an instance method; expected a classmethod")]
    parameters = _parameters(adapter, call.method)
    if parameters is None:
        return []
    parameters, homeless = _after_leading(parameters, call.leading)
    parameters = _after_positional(parameters, call.positional)
    lacking = homeless + [name for name in call.always + call.sometimes if not _accepts(parameters, name)]
    demanded = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in call.always
    ]
    findings = [
        Finding(
            call.method,
            f"does not accept {name}; add it{' as a keyword argument' * (name not in call.leading)}",
        )
        for name in lacking
    ]
    for name in demanded:
        how_often = "only in some calls" if name in call.sometimes else "never"
        findings.append(Finding(call.method, f"demands {name}, which is sent {how_often}; give it a default"))
    return findings


def _check_vllm_surface(adapter: type) -> list[Finding]:
    findings = [
        Finding(name, "is missing; vLLM's inspection of model classes wants it")
        for name in ("embed_input_ids", "forward", "compute_logits")
        if _method(adapter, name) is None
    ]
    for method, name in (("__init__", "vllm_config"), ("forward", "input_ids"), ("forward", "positions")):
        parameters = _parameters(adapter, method) if _method(adapter, method) else None
        if parameters is not None and not _accepts(parameters, name):
            findings.append(Finding(method, f"does not accept {name}=; vLLM's inspection wants it"))
    return findings


def _method(adapter: type, name: str) -> object | None:
    return inspect.getattr_static(adapter, name, None) if callable(getattr(adapter, name, None)) else None


def _parameters(adapter: type, name: str) -> list[inspect.Parameter] | None:
    """The parameters a caller fills, without `self` or `cls`; None where Python cannot tell."""
    try:
        parameters = list(inspect.signature(getattr(adapter, name)).parameters.values())
    except (TypeError, ValueError):
        return None
    if isinstance(inspect.getattr_static(adapter, name), classmethod | staticmethod):
        return parameters
    return _after_positional(parameters, 1)


def _after_leading(
    parameters: list[inspect.Parameter], leading: tuple[str, ...]
) -> tuple[list[inspect.Parameter], list[str]]:
    """What is left to fill once the leading arguments came, and those of them that found no place."""
    by_keyword = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in leading}
    by_position = [name for name in leading if name not in by_keyword]
    rest = [parameter for parameter in parameters if parameter.name not in by_keyword]
    left = _after_positional(rest, len(by_position))
    open_ended = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    return left, [] if open_ended else by_position[len(rest) - len(left) :]


def _after_positional(parameters: list[inspect.Parameter], count: int) -> list[inspect.Parameter]:
    """What is left to fill once `count` arguments came by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = sum(parameter.kind in kinds for parameter in parameters)
    return parameters[min(count, places) :]


def _accepts(parameters: list[inspect.Parameter], name: str) -> bool:
    return any(
        parameter.kind is parameter.VAR_KEYWORD
        or (
            parameter.name == name
            and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        )
        for parameter in parameters
    )
