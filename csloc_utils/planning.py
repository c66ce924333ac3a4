"""Before anything runs: what a search will cost, and what its items can tell apart."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from scipy import stats

from csloc_utils.designs import check_count
from csloc_utils.errors import InputError
from csloc_utils.measure import Evaluator
from csloc_utils.screening import default_budget
from csloc_utils.search import cost

# Masks that sparse recovery needs per k log(N / k); theory leaves the constant open, and this one
# gives what the paper reports in practice.
_RECOVERY = 6.0
# How often a difference that is there should be seen.
_POWER = 0.8


@dataclass(frozen=True)
class Plan:
    """What a search will take.

    Attributes
    ----------
    equivalents : dict of str to int
        Evaluation-equivalents by method; a backward pass counts two. For a race, the most it can
        take: it stops early where heads differ clearly.
    minutes : dict of str to float, or None
        The same in minutes, if the time of one mask is known.
    resolved : float
        Difference between two heads, in nats, that the items show at the stated confidence in four
        cases of five.
    n_items : int
    confidence : float
    """

    equivalents: dict[str, int]
    minutes: dict[str, float] | None
    resolved: float
    n_items: int
    confidence: float


def plan(
    n_heads: int,
    k: int = 5,
    n_items: int = 24,
    seconds: float | None = None,
    confidence: float = 0.9,
    spread: float = 1.0,
) -> Plan:
    """Say what each search costs for ``k`` heads, and what ``n_items`` items can tell apart.

    Parameters
    ----------
    n_heads, k, n_items : int
        Heads in the model, heads to find, locate items.
    seconds : float, optional
        Time of one mask on these items.
    confidence : float
        For `resolved`.
    spread : float
        Standard deviation over items of the difference between two heads' effects, in nats.

    Raises
    ------
    InputError
        For numbers out of range.

    Notes
    -----
    For the paper's method ``6 k ln(N / k)`` masks, the order that compressed sensing promises
    (Candès and Wakin 2008) with a constant that gives about what the paper reports. ``resolved`` is
    ``(t + z) * spread / sqrt(n_items)``, with Student's t at the two-sided confidence and the
    normal quantile z of a power of 0.8: items are paired, so only what differs between two heads
    counts. Items of one fact are no independent evidence; count facts where there are fewer.
    """
    k = check_count("k", k, high=check_count("n_heads", n_heads))
    check_count("n_items", n_items, low=2)
    if not 0 < confidence < 1:
        raise InputError(f"confidence is {confidence!r}: give a level between 0 and 1, like 0.9")
    for name, value in (("spread", spread), ("seconds", 1.0 if seconds is None else seconds)):
        if not 0 < value < np.inf:
            raise InputError(f"{name} is {value!r}: give a positive number")
    equivalents = {
        "screened": default_budget(k),
        "paper": 1 + int(np.ceil(_RECOVERY * k * np.log(max(n_heads / k, np.e)))),
        "sweep": cost("sweep", n_heads, k),
        "greedy": cost("greedy", n_heads, k),
        "race": cost("sweep", n_heads, k),
    }
    minutes = None
    if seconds is not None:
        minutes = {m: n * seconds / 60 for m, n in equivalents.items()}
    resolved = spread / np.sqrt(n_items)
    resolved *= stats.t.ppf((1 + confidence) / 2, n_items - 1) + stats.norm.ppf(_POWER)
    return Plan(equivalents, minutes, float(resolved), n_items, confidence)


def time_of_a_mask(evaluator: Evaluator) -> float:
    """Seconds a mask takes, from one chunk of the model's first heads, which skip no layer."""
    n_masks = min(evaluator.chunk + 1, evaluator.grid.size)
    masks = evaluator.grid.single_masks()[: max(2, n_masks)]
    evaluator.measure(masks[:1], count=False)
    start = time.perf_counter()
    evaluator.measure(masks[1:], count=False)
    return (time.perf_counter() - start) / (len(masks) - 1)
