"""Compares whole training steps with public measurements: ``prismscale validate steps``."""
