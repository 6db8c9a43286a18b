"""What a user says of values that absent peers contribute."""
