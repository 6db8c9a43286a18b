"""Values of a job's communications, recorded while all ranks ran, for live ranks of later runs."""
