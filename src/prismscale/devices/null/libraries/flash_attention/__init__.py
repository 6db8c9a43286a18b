"""Stand-ins for FlashAttention 2 and 3: their extensions, and their kernels from a hub."""
