"""Devices on which a program computes: a CPU, a GPU, or a null device that stands for a GPU."""
