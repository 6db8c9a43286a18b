"""Checkpoint saves on the null device, where the data of device tensors is not written."""
