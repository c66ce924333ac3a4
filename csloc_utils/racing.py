"""Racing: spend items where it is not yet clear who belongs to the first ``k``.

A sweep scores every head on every item, though after a few items most heads are clearly out of the
race and one or two clearly in. A race scores all candidates on a first batch of items, drops those
that are settled, scores the rest on the next batch, and so on, until the first ``k`` are known at
the stated confidence or the items are spent. Candidates are compared on the same items, so what
makes an item easy or hard for all of them cancels.

A candidate is a set of heads: one, a pair, a group, or one head beside others that stay off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from csloc_utils.designs import as_generator, check_count
from csloc_utils.errors import InputError
from csloc_utils.search import SearchResult, check_budget, check_score

if TYPE_CHECKING:
    from csloc_utils.measure import Evaluator

BATCH = 8  # items of a batch, unless facts are larger


@dataclass(frozen=True)
class Race:
    """How a race went.

    Attributes
    ----------
    masks : bool array (n_candidates, n_heads)
    order : int array (n_candidates,)
        Candidates, most damaging first; those that are settled stand on their side of ``k``.
    status : str array (n_candidates,)
        ``"in"`` the first k, ``"out"`` of them, or ``"open"``.
    effects : float array (n_candidates,)
        Mean effect over the items a candidate was scored on. For ordering only: candidates that
        stayed long were lucky or close, so measure those you name on fresh items.
    n_items : int array (n_candidates,)
        How many items that were.
    k : int
    equivalents : float
        Cost in evaluations on all items, the intact model's included.
    """

    masks: np.ndarray
    order: np.ndarray
    status: np.ndarray
    effects: np.ndarray
    n_items: np.ndarray
    k: int
    equivalents: float

    @property
    def found(self) -> np.ndarray:
        """Candidates that are named, ``(k,)``."""
        return self.order[: self.k]

    @property
    def settled(self) -> bool:
        """Whether all that are named are known to belong there."""
        return bool((self.status[self.found] == "in").all())


def race(
    evaluator: Evaluator,
    masks: np.ndarray,
    k: int,
    confidence: float = 0.9,
    tolerance: float = 0.0,
    budget: float | None = None,
    score: str = "logprob",
    batch: int = BATCH,
    seed: int = 0,
) -> Race:
    """Find the ``k`` most damaging of some masks, on as few items as that takes.

    Parameters
    ----------
    evaluator : Evaluator
        Model and items; a fact's items stay in one batch.
    masks : bool array (n_candidates, n_heads)
        True = ablated.
    k : int
        How many to find, fewer than there are.
    confidence : float, default 0.9
        If the race settles, the chance that its first ``k`` are the right ones is at least this.
    tolerance : float, default 0
        Difference in effect, in units of the score, that does not matter: a named candidate may do
        that much less damage than one that is not named.
    budget : float, optional
        Evaluations on all items, the baseline included; the items end the race by default.
    score : str, default "logprob"
    batch : int, default 8
        Items scored before a decision.
    seed : int, default 0
        Seed of the batches.

    Raises
    ------
    InputError
        For numbers out of range, or a budget that does not reach through the first batch.

    Notes
    -----
    After every batch, each pair of candidates still open is compared by a one-sided t test on the
    differences of facts. The level of each is ``1 - confidence`` over ``k (n_candidates - k)``
    pairs, in which a wrong order could change the first ``k``, and over the looks (Bonferroni). One
    that is worse than enough others is in, one that is better than enough others is out: a
    selection race (Heidrich-Meisner and Igel 2009), with t intervals in the place of Hoeffding's or
    Bernstein's bounds, since log-probabilities are not bounded. With strongly skewed items the t
    test needs several facts; nothing is decided before there are eight.
    """
    masks = evaluator.grid.check_masks(masks)
    k = check_count("k", k, high=len(masks) - 1)
    check_race(confidence, tolerance)
    check_score(evaluator, score)
    batches = _batches(evaluator.facts, check_count("batch", batch), seed)
    n_all = len(evaluator.facts)
    if budget is not None and budget < 1 + len(masks) * len(batches[0]) / n_all:
        needed = int(np.ceil(1 + len(masks) * len(batches[0]) / n_all))
        check_budget(int(budget), needed, f"a race of {len(masks)} candidates")
    level = (1 - confidence) / (k * (len(masks) - k) * len(batches))

    values = np.full((len(masks), n_all), np.nan)
    status = np.full(len(masks), "open", dtype="U4")
    spent, done = 1.0, np.empty(0, int)
    for rows in batches:
        open_ = np.flatnonzero(status == "open")
        cost = len(open_) * len(rows) / n_all
        if not len(open_) or (budget is not None and spent + cost > budget + 1e-9):
            break
        measured = evaluator.part(rows).measure(masks[open_], count=False)
        values[np.ix_(open_, rows)] = measured.item_effects(score)
        spent, done = spent + cost, np.append(done, rows)
        _settle(values[:, done], evaluator.facts[done], status, k, level, tolerance)
    effects = np.nanmean(values, axis=1)
    place = np.select([status == "in", status == "open"], [0, 1], 2)
    order = np.lexsort((effects, place))
    n_items = np.isfinite(values).sum(axis=1)
    return Race(masks, order, status, effects, n_items, k, spent)


def check_race(confidence: float, tolerance: float) -> None:
    """Raise `InputError` for a confidence or tolerance that no race can have."""
    if not 0 < confidence < 1:
        raise InputError(f"confidence is {confidence!r}: give a level between 0 and 1, like 0.9")
    if not 0 <= tolerance < np.inf:
        raise InputError(f"tolerance is {tolerance!r}: give a difference of 0 or more")


def raced(
    evaluator: Evaluator,
    k: int = 5,
    candidates: Sequence[int] | None = None,
    off: Sequence[int] = (),
    **options: Any,
) -> SearchResult:
    """Race heads for the ``k`` that do most damage one by one.

    Rows of the table: ``head``, ``effect`` and ``accuracy_effect`` (missing: None), ``status``
    (``"in"`` if settled, else ``"open"``) and ``n_items``. ``extra["race"]`` is the `Race`.

    Parameters
    ----------
    evaluator : Evaluator
    k : int, default 5
    candidates : sequence of int, optional
        Flat indices of the heads in the race; all heads by default. What is settled is settled
        among them.
    off : sequence of int, optional
        Heads that are off throughout: the race is for the effect given that.
    options
        Of :func:`race`: ``confidence``, ``tolerance``, ``budget``, ``score``, ``batch``, ``seed``.
    """
    grid = evaluator.grid
    if candidates is None:
        candidates = np.setdiff1d(np.arange(grid.size), off)
    candidates = np.asarray(candidates, int)
    masks = grid.single_masks()[candidates]
    masks[:, list(off)] = True
    result = race(evaluator, masks, k, **options)
    heads = [grid.head(candidates[i]) for i in result.order]
    table = [
        {
            "head": str(grid.head(candidates[i])),
            "effect": float(result.effects[i]),
            "accuracy_effect": None,
            "status": str(result.status[i]),
            "n_items": int(result.n_items[i]),
        }
        for i in result.order
    ]
    equivalents = int(np.ceil(result.equivalents))
    evaluations = {"forward": equivalents, "backward": 0, "equivalents": equivalents}
    extra = {"race": result, "score": options.get("score", "logprob")}
    return SearchResult("race", heads, table, k, evaluations, extra)


def _batches(facts: np.ndarray, size: int, seed: int) -> list[np.ndarray]:
    """Deal the items out, facts whole, into batches of at least this size; the rest to the last."""
    names, fact = np.unique(facts, return_inverse=True)
    batches: list[np.ndarray] = []
    current: list[int] = []
    for number in as_generator(seed).permutation(len(names)):
        current += np.flatnonzero(fact.reshape(-1) == number).tolist()
        if len(current) >= size:
            batches.append(np.sort(current))
            current = []
    if current and batches:
        batches[-1] = np.sort([*batches[-1], *current])
    elif current:
        batches.append(np.sort(current))
    return batches


def _settle(
    values: np.ndarray,
    facts: np.ndarray,
    status: np.ndarray,
    k: int,
    level: float,
    tolerance: float,
) -> None:
    """Mark candidates that are in or out, given item effects ``(n_candidates, n_items)``."""
    _, fact = np.unique(facts, return_inverse=True)
    counts = np.bincount(fact.reshape(-1))
    if len(counts) < BATCH:
        return
    while True:
        open_ = np.flatnonzero(status == "open")
        places = k - np.count_nonzero(status == "in")
        # All places are taken, or all that are left get one.
        if places == 0 or places == len(open_):
            status[open_] = "in" if places else "out"
            return
        means = values[open_] @ np.eye(len(counts))[fact.reshape(-1)] / counts.mean()
        # Fact contributions: their mean over facts is the mean over items.
        gaps = means[None] - means[:, None]  # [i, j] > 0: i does more damage than j
        error = gaps.std(axis=2, ddof=1) / np.sqrt(len(counts))
        sure = gaps.mean(axis=2) + tolerance > stats.t.isf(level, len(counts) - 1) * error
        np.fill_diagonal(sure, False)
        first = np.argsort(values[open_].mean(axis=1), kind="stable")
        is_in = sure.sum(axis=1) >= len(open_) - places
        is_in[first[places:]] = False
        is_out = sure.sum(axis=0) >= places
        is_out[first[:places]] = False
        if not (is_in | is_out).any():
            return
        status[open_[is_in]], status[open_[is_out]] = "in", "out"
