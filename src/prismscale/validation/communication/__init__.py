"""Communication against public measurements: NCCL's collectives, DeepEP and HybridEP."""
