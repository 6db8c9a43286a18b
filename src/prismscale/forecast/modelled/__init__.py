"""Draws around modelled durations: what a variability profile says, on every rank of a job."""
