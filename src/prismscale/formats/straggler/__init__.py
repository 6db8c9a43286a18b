"""Straggler traces of ByteDance: one row for each operation of each worker in each step."""

from prismscale.formats.straggler.assembled import read_meta, read_straggler

__all__ = ["read_meta", "read_straggler"]
