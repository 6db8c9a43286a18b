"""Runs with real values: every rank of a job runs, a few at a time, and they exchange real data."""
