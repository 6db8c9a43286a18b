"""The memory of one rank, event by event: by kind, over time, its largest blocks."""
