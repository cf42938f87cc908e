"""`commfuse bench`: what the operations take, beside their lower bounds. Reports, never asserts."""
