"""From the traces of a few captured ranks to the graph of all ranks."""
