"""Results beside public measurements: the rows of ``docs/accuracy.md``."""
