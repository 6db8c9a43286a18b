"""What a program computes on: a CPU, a GPU, or a GPU that is not there."""
