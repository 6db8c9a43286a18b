"""Memory of a null device: statistics, history, owners of blocks, and memory outside torch."""
