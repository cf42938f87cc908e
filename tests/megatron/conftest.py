"""Import Megatron once, before the tests: it warns about what is not installed, and warnings are errors here.

Selective recompute makes Megatron compile a small extension. It does so in a folder of this run alone: a compilation
that was killed leaves a lock behind, on which every later run in a shared folder would wait for ever.
"""

import os
import tempfile
import warnings

_extensions = tempfile.TemporaryDirectory(prefix="torch-extensions-")
os.environ["TORCH_EXTENSIONS_DIR"] = _extensions.name

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import commfuse_megatron.plugin  # noqa: F401
