"""Exchanges of tokens between ranks with experts: how many go where, and what a kernel takes."""
