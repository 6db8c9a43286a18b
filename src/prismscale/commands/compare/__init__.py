"""``prismscale compare``: what differs between runs."""
