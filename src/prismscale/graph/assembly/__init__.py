"""Assembles the graph of all ranks from the traces of a few captured ranks."""
