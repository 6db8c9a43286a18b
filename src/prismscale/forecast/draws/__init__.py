"""Random draws of all durations of a job, and re-timing the job with them."""
