"""`commfuse doctor`: what this machine has, and what will run on it."""
