"""What absent peers contribute to a rank that runs without them."""
