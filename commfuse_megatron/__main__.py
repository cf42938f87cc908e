"""`python -m commfuse_megatron` is the command `commfuse`."""

import sys

from commfuse_megatron.tools.main import main

if __name__ == "__main__":
    sys.exit(main())
