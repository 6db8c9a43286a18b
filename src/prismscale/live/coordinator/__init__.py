"""Who tells live ranks when their communications end: the engine beside them."""
