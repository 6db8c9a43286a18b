"""User rules for the values that absent peers contribute."""
