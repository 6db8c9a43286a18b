"""``prismscale what-if``: the command, its tables, and its section of the report."""
