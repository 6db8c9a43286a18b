"""Libraries that exist only beside a GPU, answered for on the null device."""
