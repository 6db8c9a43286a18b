"""Lets a bench import ``support``, the helpers of tests: the oracle, made-up jobs, runs.

A script finds only what lies beside it. ``import tests_on_path`` comes before ``from support``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
