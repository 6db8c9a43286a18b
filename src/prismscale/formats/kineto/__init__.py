"""Kineto traces (Chrome trace JSON of ``torch.profiler``), one file a rank."""

from prismscale.formats.kineto.profiled_job import read_kineto

__all__ = ["read_kineto"]
