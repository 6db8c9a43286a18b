"""torch's flight recorder: what every rank called last, written when a job does not go on.

Source of the format: torch, ``torch/csrc/distributed/c10d/FlightRecorder.hpp`` (version 2.x), and
its reader ``torch.distributed.flight_recorder`` (``torchfrtrace``).
"""
