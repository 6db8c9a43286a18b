"""Measures hardware, and programs that run on it."""
