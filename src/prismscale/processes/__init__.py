"""Processes of a job: starting them, making sure that they end, and measuring their memory."""
