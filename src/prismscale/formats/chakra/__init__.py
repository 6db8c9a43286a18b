"""Reads and writes Chakra execution traces (length-delimited protobuf)."""

from prismscale.formats.chakra.reader import read_chakra
from prismscale.formats.chakra.writer import write_chakra

__all__ = ["read_chakra", "write_chakra"]
