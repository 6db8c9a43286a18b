"""FlexAttention on the null device: one kernel forward and one backward, with the work that its
mask leaves."""
