"""Runs schedules: the only place where schedule, transport and kernels meet."""
