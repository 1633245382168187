"""Every error that this package raises on purpose.

RegistryError
├── SettingError                 an environment variable has a value that is not understood
├── InvalidEntryError            an Entry was made from a name or target of the wrong form
├── DuplicateArchitectureError   two providers claim one architecture
├── UnknownArchitectureError     nobody provides the architecture
├── MalformedBundleError         the bundle that claims the architecture cannot be read
├── CapabilityError              an adapter class declares a capability of the wrong type or range
└── AdapterImportError           the adapter class cannot be imported
    └── BundleImportError        ... and it lives in a bundle

Each takes its facts as positional arguments and keeps them as attributes, so it survives pickling.
"""

from collections.abc import Sequence

from tt_registry.sources import Problem, Source


class RegistryError(Exception):
    """Base of this package's errors."""


class SettingError(RegistryError):
    def __init__(self, variable: str, value: str, expected: str) -> None:
        super().__init__(variable, value, expected)
        self.variable, self.value, self.expected = variable, value, expected

    def __str__(self) -> str:
        return f"{self.variable}={self.value!r}: expected {self.expected}. Set it so, or unset it."


class InvalidEntryError(RegistryError):
    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(field, value, expected)
        self.field, self.value, self.expected = field, value, expected

    def __str__(self) -> str:
        return f"{self.field} is {self.value!r}; expected {self.expected}"


class DuplicateArchitectureError(RegistryError):
    def __init__(self, architecture: str, first: Source, second: Source) -> None:
        super().__init__(architecture, first, second)
        self.architecture, self.first, self.second = architecture, first, second

    def __str__(self) -> str:
        return (
            f"{self.architecture} is provided twice: by {self.first} and by {self.second}. "
            "Expected one provider: take the folder out of EXTRA_MODELS_DIR or uninstall the distribution."
        )


class UnknownArchitectureError(RegistryError):
    def __init__(self, architecture: str, nearest: Sequence[str], problems: Sequence[Problem]) -> None:
        super().__init__(architecture, nearest, problems)
        self.architecture, self.nearest, self.problems = architecture, tuple(nearest), tuple(problems)

    def __str__(self) -> str:
        nearest = f"; nearest: {', '.join(self.nearest)}" if self.nearest else ""
        first = (
            f"no adapter is registered for architecture {self.architecture!r}{nearest}. "
            "`python -m tt_registry` lists all; add a bundle under EXTRA_MODELS_DIR to serve a new one."
        )
        rest = [f"left out, and perhaps the one you meant: {problem}" for problem in self.problems]
        return "\n".join([first, *rest])


class MalformedBundleError(RegistryError):
    def __init__(self, architecture: str, problem: Problem) -> None:
        super().__init__(architecture, problem)
        self.architecture, self.problem = architecture, problem

    def __str__(self) -> str:
        return f"{self.architecture} cannot be served: {self.problem}"


class CapabilityError(RegistryError):
    def __init__(self, class_name: str, key: str, value: object, expected: str) -> None:
        super().__init__(class_name, key, value, expected)
        self.class_name, self.key, self.value, self.expected = class_name, key, value, expected

    def __str__(self) -> str:
        given = f"{self.value!r} ({type(self.value).__name__})"
        return f"{self.class_name} declares {self.key} = {given}; expected {self.expected}"


class AdapterImportError(RegistryError):
    def __init__(self, target: str, source: Source, reason: str, advice: str) -> None:
        super().__init__(target, source, reason, advice)
        self.target, self.source, self.reason, self.advice = target, source, reason, advice

    def __str__(self) -> str:
        return f"cannot import {self.target} ({self.source}): {self.reason}. {self.advice}"


class BundleImportError(AdapterImportError):
    pass
