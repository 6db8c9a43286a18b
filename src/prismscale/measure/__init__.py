"""What times hardware, and programs that run on it."""
