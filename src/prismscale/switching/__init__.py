"""Real values: every rank of a job runs, a few at a time, and hears what the others really say."""
