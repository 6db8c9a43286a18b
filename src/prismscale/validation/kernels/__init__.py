"""The kernel model against public measurements of kernels."""
