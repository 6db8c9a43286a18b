"""Processes of a job: how they start, that they end, and what they cost."""
