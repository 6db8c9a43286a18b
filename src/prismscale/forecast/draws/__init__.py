"""Draws of all durations of a job, re-timed together."""
