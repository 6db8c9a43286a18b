"""Whole training steps against public measurements: ``prismscale validate steps``."""
