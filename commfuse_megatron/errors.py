"""Every exception the package raises on purpose. Nothing here imports anything of ours."""

__all__ = [
    "CommFuseError",
    "ConfigError",
    "ScheduleError",
    "ShapeError",
    "TransportError",
    "TransportTimeoutError",
    "UnsupportedError",
    "VerificationError",
]


class CommFuseError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(CommFuseError, ValueError):
    """A configuration value, key or combination is wrong."""


class ShapeError(CommFuseError, ValueError):
    """Tensors do not fit together, or ranks disagree about the problem they are solving."""


class UnsupportedError(CommFuseError, NotImplementedError):
    """The request is meaningful but this package cannot serve it and was told not to fall back."""


class ScheduleError(CommFuseError):
    """A schedule is not a correct program: see the printed grid."""


class TransportError(CommFuseError, RuntimeError):
    """A transfer failed, or a context was used after it failed or was closed."""


class TransportTimeoutError(CommFuseError, TimeoutError):
    """A peer did not deliver in time; names the op, the step and both ranks."""


class VerificationError(CommFuseError):
    """A result differs from its reference by more than its tolerance."""
