"""Real communication between rank processes on this machine, over gloo."""
