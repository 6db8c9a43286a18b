"""A CUDA device that is not there: plain tensors on ``cuda`` in a CPU-only torch.

Tensors have shapes, dtypes, storages and addresses, but no bytes. The metadata of every op's
outputs comes from torch's own Meta kernels, through a cache. Memory comes from a model of the CUDA
caching allocator, time from a logical clock per stream. CPU tensors stay real.

- :mod:`.runtime` activates the device, :mod:`.gpus` says which GPU it is;
- :mod:`.value_policy` answers reads of values that do not exist, and counts them;
- :mod:`.memory.memory_stats` shows what occupies the memory.
"""
