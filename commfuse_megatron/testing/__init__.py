"""Helpers to run and compare Megatron models, on the CPU as well. Never active unless asked for."""

from commfuse_megatron.testing.cpu import cpu_megatron
from commfuse_megatron.testing.pretraining import cpu_pretraining

__all__ = ["cpu_megatron", "cpu_pretraining"]
