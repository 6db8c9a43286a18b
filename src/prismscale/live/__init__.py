"""Live ranks: chosen ranks run the program, all others are replayed around them."""
