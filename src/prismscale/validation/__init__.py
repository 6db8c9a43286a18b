"""Compares results with measurements: public ones (``docs/accuracy.md``), and a user's on a GPU."""
