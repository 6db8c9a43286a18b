"""Metadata that pipeline stages send each other before their first activations."""
