"""Timings: what the kernels and the ops take, beside their bounds. Reports, never asserts."""
