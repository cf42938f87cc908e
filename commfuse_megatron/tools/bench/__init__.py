"""`commfuse bench`: what the operations take, beside their bounds. Reports, never asserts."""
