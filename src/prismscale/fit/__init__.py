"""``prismscale fit``: captures pipeline stages once to see whether they fit into GPU memory."""
