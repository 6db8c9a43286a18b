"""Differences between backends: memory, ordering, and the classes that torch looks up."""
