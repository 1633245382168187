"""What this package raises.

TTSamplingError
├── ParamsError (ValueError)   a parameter, or a list of them, that cannot be carried or sampled with
└── ShapeError (ValueError)    tensors whose shapes or row counts disagree
"""


class TTSamplingError(Exception):
    """Root of this package's errors."""


class ParamsError(TTSamplingError, ValueError):
    """A sampling parameter is outside what the receiver takes."""


class ShapeError(TTSamplingError, ValueError):
    """Two arguments that describe the same rows disagree about how many there are, or how wide."""
