"""Sweeps: many command lines of one program, each captured and simulated, side by side."""
