"""The command `commfuse`: a room for each of its subcommands, and `common` for what they share.

Results go to stdout, logs and progress to stderr; nothing below this package prints.
"""
