"""CUDA graphs and private memory pools of the null device, under ``torch.cuda``'s own Python code.

- :mod:`.graph_recording` holds a graph: what its capture recorded, and the calls of its replays;
- :mod:`.null_graph` and :mod:`.mem_pools` replace the C++ classes of a CUDA build of torch;
- :mod:`.graph_api` installs them in ``torch.cuda``.
"""
