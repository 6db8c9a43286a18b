"""prismscale: run any rank of an 8,192-GPU training job on the machine you have."""

__version__ = "0.1.0"
__all__ = ["__version__"]
