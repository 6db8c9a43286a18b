"""FlexAttention on the null device.

It runs as one kernel forward and one backward, with only the work that its mask leaves.
"""
