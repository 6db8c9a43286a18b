"""CUDA graphs and private memory pools of the null device, under ``torch.cuda``'s own Python code.

- :mod:`.graph_recording` is a graph: what its capture recorded, and the calls that replays make;
- :mod:`.null_graph` and :mod:`.mem_pools` stand for the C++ classes of a CUDA build of torch;
- :mod:`.graph_api` puts them in their place.
"""
