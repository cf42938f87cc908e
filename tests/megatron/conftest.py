"""Import Megatron once, before the tests: it warns about what is not installed, and warnings are errors here."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import commfuse_megatron.plugin  # noqa: F401
