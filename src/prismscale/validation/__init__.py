"""Results beside measurements: public ones, for ``docs/accuracy.md``, and a user's own on a GPU."""
