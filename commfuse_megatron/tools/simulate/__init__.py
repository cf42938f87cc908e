"""`commfuse simulate`: what other groups and links would take, from measured rows."""
