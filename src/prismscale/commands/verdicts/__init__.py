"""``prismscale fit``, and what it and ``run`` answer alike."""
