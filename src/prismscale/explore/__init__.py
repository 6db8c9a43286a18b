"""Explore by running: many command lines of one program, each captured, side by side."""
