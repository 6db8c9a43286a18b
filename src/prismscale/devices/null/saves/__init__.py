"""Checkpoints that are written to nowhere."""
