"""Stand-ins for the tools that report a node's GPUs without torch: NVML and ``nvidia-smi``."""
