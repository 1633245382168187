"""What this package raises.

TTMockError
├── ClusterError       no such cluster, or what it needs is not installed
├── ChildError         a function failed in the process that it ran in; the message has its output
├── ValuesError        a tensor whose values nobody computed
└── TraceError         what a device could not do, or must not, while a trace is captured or afterwards
"""


class TTMockError(Exception):
    """Base of every error of this package."""


class ClusterError(TTMockError):
    """A process for this cluster cannot be prepared."""


class ChildError(TTMockError):
    """A function raised, or its process ended otherwise than by returning."""


class ValuesError(TTMockError):
    """A tensor has no values: its operation has neither a golden function nor a reference."""


class TraceError(TTMockError, RuntimeError):
    """A rule of traces is broken; ttnn raises a RuntimeError in its place, or a device hangs."""
