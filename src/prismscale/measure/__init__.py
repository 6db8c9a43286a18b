"""Commands that time hardware."""
