"""The process that runs the engine beside live ranks and tells them when communications end."""
