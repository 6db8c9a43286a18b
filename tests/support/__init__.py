"""What several tests need: jobs, traces, oracles, runs."""
