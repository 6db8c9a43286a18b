"""``prismscale study``: published experiments, on the user's own runs."""
