"""What-ifs: the time that a job would take after a change that nobody has implemented yet.

A what-if changes the inputs of a run's timing: the costs of its kernels, the links of its cluster,
the places of its groups, or the edges of its graph. No node is added, so that all readers of a run
see the same job.
"""
