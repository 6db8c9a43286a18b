"""Memory of one rank, event by event: what it holds by kind and over time, its largest blocks."""
