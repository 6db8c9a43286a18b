"""What NCCL takes of a GPU: memory outside torch's allocator, and multiprocessors."""
