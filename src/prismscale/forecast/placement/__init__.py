"""Which node hosts which rank."""
