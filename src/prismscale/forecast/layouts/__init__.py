"""Other layouts of a job, composed by rules."""
