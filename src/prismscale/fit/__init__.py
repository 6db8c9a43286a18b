"""``prismscale fit``: does a program fit into the GPU's memory, by one capture of each stage."""
