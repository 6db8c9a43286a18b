"""What tells of a node's GPUs without torch: NVML and ``nvidia-smi``."""
