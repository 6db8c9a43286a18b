"""What a job would take if something were otherwise, before anybody writes it.

A what-if changes what a run is timed with: the costs of its kernels, the links of its cluster, the
places of its groups, or the edges of its graph. No node is added, so that all readers of a run see
the same job.
"""
