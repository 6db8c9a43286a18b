"""How a pacer reads and writes the words: times of counters, and gates that open in order."""

from __future__ import annotations

from typing import Any

import numpy as np

from prismscale.live.pacer.shared_words import Point, SharedWords

KEPT_TIMES = 8192
"""Number of times kept for each counter. A batch in flight needs only its own."""


class CounterTimes:
    """When each counter reached each value, as exactly as looking now and then can tell."""

    def __init__(self, words: SharedWords) -> None:
        self._words = words
        self._seen = np.zeros_like(words.counters)
        self._times: dict[int, dict[int, int]] = {}
        self._looked_ns: int | None = None

    def look(self, now_ns: int) -> bool:
        """Note what changed since the last look; return whether anything did."""
        before = now_ns if self._looked_ns is None else self._looked_ns
        self._looked_ns = now_ns
        changed = np.flatnonzero(self._words.counters != self._seen).tolist()
        for word in changed:
            times = self._times.setdefault(word, {})
            # Read once: the device goes on counting meanwhile.
            reached = int(self._words.counters[word])
            # The middle of two looks: see [Note: why a process paces] in shared_words.py.
            for value in range(int(self._seen[word]) + 1, reached + 1):
                times[value] = (before + now_ns) // 2
            self._seen[word] = reached
            while len(times) > KEPT_TIMES:
                del times[next(iter(times))]
        return bool(changed)

    def at(self, point: Point) -> int | None:
        """Host time at which the point was reached; None if it was not."""
        times = self._times.get(point.word)
        return None if times is None else times.get(point.value)


class ContiguousPrefix:
    """Words that each hold the last point up to which all points were passed.

    Points may be passed in any order, but a stream waits for its points in order.
    """

    def __init__(self, words: Any) -> None:
        self._words = words
        self._passed: set[Point] = set()

    def pass_(self, point: Point) -> None:
        """Count the point as soon as all points before it are passed."""
        self._passed.add(point)
        while (following := Point(point.word, int(self._words[point.word]) + 1)) in self._passed:
            self._passed.remove(following)
            self._words[point.word] = following.value
