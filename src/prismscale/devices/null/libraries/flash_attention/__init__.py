"""FlashAttention 2 and 3: their extensions, and kernels of the same that come from a hub."""
