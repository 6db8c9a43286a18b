"""Explains why a job hangs: where each rank stands, which ranks it waits for, and the cause."""
