"""A backend for those who assemble specs with Megatron's own builders.

get_mlp_module_spec_for_backend(backend=CommFuseSpecProvider(LocalSpecProvider()))
"""

from typing import Any

from commfuse_megatron.plugin.spec import REPLACEMENTS

__all__ = ["CommFuseSpecProvider"]


class CommFuseSpecProvider:
    """Answers like `fallback`, with our classes in place of Megatron's local ones."""

    def __init__(self, fallback: Any) -> None:
        self._fallback = fallback

    def column_parallel_linear(self) -> type:
        """Our column-parallel linear where the fallback has Megatron's."""
        return _replaced(self._fallback.column_parallel_linear())

    def row_parallel_linear(self) -> type:
        """Our row-parallel linear where the fallback has Megatron's."""
        return _replaced(self._fallback.row_parallel_linear())

    def layer_norm(self, *args: Any, **kwargs: Any) -> Any:
        """A norm that works under sequence parallelism where the fallback's does not."""
        return _replaced(self._fallback.layer_norm(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._fallback, name)


def _replaced(leaf: Any) -> Any:
    return REPLACEMENTS.get(leaf, leaf)
