"""Work and memory traffic of a Triton kernel, found by tracing its source with symbolic blocks."""
