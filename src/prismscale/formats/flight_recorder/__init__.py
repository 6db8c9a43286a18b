"""Reads and writes dumps of torch's flight recorder: each rank's last calls when a job hangs.

Source of the format: torch, ``torch/csrc/distributed/c10d/FlightRecorder.hpp`` (version 2.x), and
its reader ``torch.distributed.flight_recorder`` (``torchfrtrace``).
"""
