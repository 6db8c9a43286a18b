"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# Tests never assert wall time.
settings.register_profile("prismscale", deadline=None)
settings.load_profile("prismscale")
