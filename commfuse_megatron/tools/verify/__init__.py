"""`commfuse verify`: whether results are right on this machine."""
