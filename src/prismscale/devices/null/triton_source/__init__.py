"""What a Triton kernel computes and moves, read off its source: it is followed, not run."""
