"""The command `commfuse`. Results go to stdout, logs and progress to stderr; the only place that prints."""
