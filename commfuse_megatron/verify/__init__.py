"""Checks that a user runs on their own machine: what can run here, and whether the results are right."""
