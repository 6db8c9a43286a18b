"""The memory of a null device: who holds it, what happened to it, and what lies outside torch."""
