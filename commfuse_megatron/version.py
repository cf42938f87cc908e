"""The version of this package. Nothing here imports anything of ours."""

__all__ = ["__version__"]

__version__ = "0.2.0"
