"""Intervals for means over items that are not independent.

Items that ask for the same *fact* move together. Intervals therefore resample facts, each with all
its items (a cluster bootstrap).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from csloc_utils.designs import as_generator


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def bootstrap(
    tasks: Sequence[tuple[np.ndarray, np.ndarray]],
    combine: Callable[..., Any] = lambda mean: mean,
    n_boot: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
    paired: bool = False,
) -> Interval:
    """Percentile bootstrap over facts of a combination of task means.

    Parameters
    ----------
    tasks : sequence of (values, facts)
        For each task its item values ``(n_items,)`` and the fact of every item ``(n_items,)``. A
        resample draws as many facts as there are, with replacement, and takes all items of each;
        tasks are resampled independently of each other.
    combine : callable, default the mean of the only task
        Takes one array of means a task, gives the array of estimates.
    n_boot, confidence, seed
        Resamples, level, and seed of the resampling.
    paired : bool
        All tasks are about the same facts, and every resample draws the same ones for all.

    Returns
    -------
    Interval
        The estimate on all items and its interval; of width zero where all facts agree or there is
        only one.
    """
    sums, counts, indices = [], [], []
    for values, facts in tasks:
        _, fact = np.unique(facts, return_inverse=True)
        fact = fact.reshape(-1)
        sums.append(np.bincount(fact, weights=values))
        counts.append(np.bincount(fact))
        # Resampling refuses a single observation; the same one twice gives the width zero it
        # should.
        indices.append(
            np.arange(len(counts[-1])) if len(counts[-1]) > 1 else np.zeros(2, dtype=int)
        )

    def statistic(*resampled: np.ndarray, axis: int = -1) -> np.ndarray:
        drawn = [index.astype(int) for index in resampled]
        means = [s[i].sum(axis) / c[i].sum(axis) for s, c, i in zip(sums, counts, drawn)]
        return combine(*means)

    value = combine(*(s.sum() / c.sum() for s, c in zip(sums, counts)))
    result = stats.bootstrap(
        indices,
        statistic,
        n_resamples=n_boot,
        vectorized=True,
        confidence_level=confidence,
        method="percentile",
        rng=as_generator(seed),
        paired=paired,
    )
    low, high = result.confidence_interval
    return Interval(float(value), float(low), float(high))
