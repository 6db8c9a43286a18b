"""Compares the kernel model with public measurements of kernels."""
