"""Helpers to run and compare Megatron models, on the CPU as well. Never active unless asked for."""

from commfuse_megatron.testing.cpu import cpu_megatron

__all__ = ["cpu_megatron"]
