"""Distributions of durations: of one kind of work, and of the slowest of many."""
