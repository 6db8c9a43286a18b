"""Draws around modelled durations: a variability profile on every rank of a job."""
