"""A backend for those who assemble specs with Megatron's own builders.

get_mlp_module_spec_for_backend(backend=CommFuseSpecProvider(LocalSpecProvider()))   # or TESpecProvider()
"""

from typing import Any

from commfuse_megatron.plugin.spec import our_spec

__all__ = ["CommFuseSpecProvider"]


class CommFuseSpecProvider:
    """Answers like `fallback`, with our classes in place of Megatron's linears, core attention and torch norms."""

    def __init__(self, fallback: Any) -> None:
        self._fallback = fallback

    def column_parallel_linear(self) -> Any:
        """Our column-parallel linear where the fallback has Megatron's."""
        return our_spec(self._fallback.column_parallel_linear())

    def row_parallel_linear(self) -> Any:
        """Our row-parallel linear where the fallback has Megatron's."""
        return our_spec(self._fallback.row_parallel_linear())

    def column_parallel_layer_norm_linear(self) -> Any:
        """Our norm and linear in one where the fallback has Transformer Engine's; None where it has none."""
        return our_spec(self._fallback.column_parallel_layer_norm_linear())

    def core_attention(self) -> Any:
        """Our core attention where the fallback has Megatron's."""
        return our_spec(self._fallback.core_attention())

    def layer_norm(self, *args: Any, **kwargs: Any) -> Any:
        """A norm that works under sequence parallelism where the fallback's does not."""
        return our_spec(self._fallback.layer_norm(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._fallback, name)
