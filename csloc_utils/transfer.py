"""What head lists have in common: by name, by what they do, and by dose.

Two lists for one capability, from two tasks, two seeds or two methods, can be compared by their
*names* (`overlap`), by the effects of *all* heads behind them (`rank_correlations`), or by what
they *do* to the same items (`shares` of an atlas). A search that does not repeat itself cannot be
expected to agree with another one: `halves` is the yardstick, the same task on two halves of its
items. `dose` shows how damage, and damage elsewhere, grows with the number of heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import stats

from csloc_utils.atlas import Atlas, check_judges
from csloc_utils.designs import as_generator, check_count, check_heads
from csloc_utils.errors import InputError
from csloc_utils.heads import Head
from csloc_utils.intervals import bootstrap

if TYPE_CHECKING:
    from csloc_utils.measurements import Measurements, Scorer
    from csloc_utils.search import SearchResult

_MOST_HEADS = 20  # how far a dose goes unless sizes say more


def locate_all(
    locators: Mapping[str, Any], k: int = 5, budget: int | None = None, score: str = "logprob"
) -> dict[str, SearchResult]:
    """Find the heads of every task by `csloc_utils.screening.screened`.

    Parameters
    ----------
    locators : mapping of str to Evaluator
        The same model on *locate* items of each task.
    k, budget, score
        Of each search.

    Returns
    -------
    dict of str to SearchResult
        Each one's ``found`` is a head set for `csloc_utils.atlas.atlas`.
    """
    from csloc_utils.screening import screened

    return {task: screened(one, k, budget, score) for task, one in locators.items()}


def shares(made: Atlas) -> pd.DataFrame:
    """Share of a task's own damage that the heads of another set do to it.

    Both drops are resampled together, on the same facts. A share of 1 means: as much as the task's
    own heads.

    Returns
    -------
    DataFrame
        One row a set, other task with heads of its own, and score: ``heads_of``, ``task``,
        ``score``, ``share`` (drop under the set / drop under the task's own heads), ``low``,
        ``high``; NaN where the interval of the own drop does not lie above 0: there is no damage to
        take a share of.
    """
    rows = []
    for score in made.scores:
        for mine, b in np.argwhere(made.own):
            for a in range(len(made.sets)):
                if a == mine:
                    continue
                ends = (np.nan,) * 3
                if made.low[score][mine, b] > 0:
                    cells = [made.cell(score, row, b) for row in (a, mine)]
                    share = bootstrap(cells, _share, paired=True, **made.resampling)
                    ends = (share.value, share.low, share.high)
                rows.append((made.sets[a], made.tasks[b], score, *ends))
    return pd.DataFrame(rows, columns=["heads_of", "task", "score", "share", "low", "high"])


def dose(
    judges: Mapping[str, Scorer],
    order: Sequence[Head],
    sizes: Sequence[int] | None = None,
    seed: int = 0,
    n_boot: int = 2000,
    confidence: float = 0.95,
) -> pd.DataFrame:
    """Damage to every task when the first heads of a list are off, more and more of them.

    Parameters
    ----------
    judges : mapping of str to Evaluator
        The same model on *verify* items of each task.
    order : sequence of Head
        Most important first.
    sizes : sequence of int, optional
        How many heads are off, 0 (the intact model) to all of `order`; by default 1, 2, … 20, or
        as many as there are.
    seed, n_boot, confidence
        Of the bootstrap.

    Returns
    -------
    DataFrame
        One row a task, score and size: ``task``, ``score``, ``size``, ``heads`` (their names),
        ``intact``, ``ablated``, ``drop`` (positive = damage), ``low``, ``high``.

    Raises
    ------
    InputError
        As `csloc_utils.atlas.atlas`, and for sizes out of range.
    """
    grid, scores, resampling = check_judges(judges, seed, n_boot, confidence)
    order = check_heads(grid, order)
    sizes = range(1, 1 + min(len(order), _MOST_HEADS)) if sizes is None else sizes
    sizes = sorted({check_count("size", size, low=0, high=len(order)) for size in sizes})
    if not sizes:
        raise InputError("there is no size to measure: give one or more, like 1, 2, 5")
    masks = np.array([grid.mask(order[:size]) for size in sizes])
    rows = []
    for task, judge in judges.items():
        measured = judge.measure(masks, count=False)
        for score in scores:
            intact = float(measured.baseline[score].mean())
            for size, drops in zip(sizes, -measured.item_effects(score)):
                made = bootstrap([(drops, np.asarray(judge.facts))], **resampling)
                row = {"task": task, "score": score, "size": size}
                row["heads"] = ",".join(map(str, order[:size]))
                row |= {"intact": intact, "ablated": intact - made.value, "drop": made.value}
                rows.append(row | {"low": made.low, "high": made.high})
    return pd.DataFrame(rows)


def overlap(heads: Mapping[str, Sequence[Head]], n_heads: int) -> pd.DataFrame:
    """Heads that two lists share, for every pair of lists.

    Parameters
    ----------
    heads : mapping of str to sequence of Head
        Lists by name: of tasks, seeds or methods.
    n_heads : int
        Heads of the model they are from.

    Returns
    -------
    DataFrame
        One row a pair, in the order given: ``a``, ``b``, ``shared`` (number of heads in both),
        ``jaccard`` (as a share of all that are in either), ``expected_shared`` (the mean of lists
        that are drawn by lot) and ``p_value`` (chance that such lists share as many or more, from
        the hypergeometric distribution; of one pair that was chosen beforehand).

    Raises
    ------
    InputError
        For fewer than two lists, an empty one, a head twice in one, or more heads than there are.
    """
    n_heads = check_count("n_heads", n_heads)
    if len(heads) < 2:
        raise InputError(f"{len(heads)} head list(s) cannot overlap: give two or more")
    for name, chosen in heads.items():
        if not 0 < len(set(chosen)) == len(chosen) <= n_heads:
            raise InputError(
                f"list {name!r} has {len(chosen)} heads, {len(set(chosen))} of them different, of "
                f"{n_heads}: give each head once"
            )
    rows = []
    for a, b in combinations(heads, 2):
        first, second = set(heads[a]), set(heads[b])
        shared = len(first & second)
        by_lot = stats.hypergeom(n_heads, len(first), len(second))
        row = (a, b, shared, shared / len(first | second))
        rows.append((*row, float(by_lot.mean()), float(by_lot.sf(shared - 1))))
    return pd.DataFrame(rows, columns=["a", "b", "shared", "jaccard", "expected_shared", "p_value"])


def rank_correlations(effects: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """Spearman's rank correlation of the effects of all heads, for every pair of vectors.

    Most heads do next to nothing, and their order is mostly noise; so a low correlation does not
    exclude that the first few heads agree, and a high one does not imply it (see `overlap`).

    Parameters
    ----------
    effects : mapping of str to float array (n_heads,)
        An effect, or an importance, of every head: all of the same sign. NaN = not known.

    Returns
    -------
    DataFrame
        One row a pair, in the order given: ``a``, ``b``, ``rho`` (NaN where a vector is constant)
        and ``n_heads`` (known in both).

    Raises
    ------
    InputError
        For fewer than two vectors, or vectors of different lengths or with less than three heads
        known in both.
    """
    values = {name: np.asarray(v, float) for name, v in effects.items()}
    if len(values) < 2:
        raise InputError(f"{len(values)} vector(s) cannot be compared: give two or more")
    if len({v.shape for v in values.values()}) > 1 or next(iter(values.values())).ndim != 1:
        raise InputError(
            "the vectors differ in shape: give one number a head of the same model, "
            f"not {', '.join(str(v.shape) for v in values.values())}"
        )
    rows = []
    for a, b in combinations(values, 2):
        known = np.isfinite(values[a]) & np.isfinite(values[b])
        if known.sum() < 3:
            raise InputError(f"{a!r} and {b!r} have fewer than three heads in common to compare")
        x, y = values[a][known], values[b][known]
        constant = np.ptp(x) == 0 or np.ptp(y) == 0
        rho = np.nan if constant else float(stats.spearmanr(x, y).statistic)
        rows.append((a, b, rho, int(known.sum())))
    return pd.DataFrame(rows, columns=["a", "b", "rho", "n_heads"])


def halves(
    sweep: Measurements,
    k: int = 5,
    n_draws: int = 20,
    seed: int = 0,
    score: str = "logprob",
) -> pd.DataFrame:
    """Does a sweep repeat itself? The same heads on two random halves of the facts.

    This is how far any two lists of this task can be expected to agree, on half as many items.

    Parameters
    ----------
    sweep : Measurements
        One mask a head, in the order of the heads, as `csloc_utils.search.sweep` leaves in
        ``extra["measurements"]``.
    k : int, default 5
        Length of the lists that are compared.
    n_draws, seed : int
        How often facts are cut in two, and the seed of it.
    score : str, default "logprob"
        Score of the effects.

    Returns
    -------
    DataFrame
        One row a draw: ``rho`` (rank correlation over all heads), ``shared`` (of the first `k`) and
        ``jaccard``.

    Raises
    ------
    InputError
        When the masks are no sweep, there are fewer than two facts, or a number is out of range.
    """
    grid = sweep.grid
    if not np.array_equal(sweep.masks, grid.single_masks()):
        raise InputError("these masks are no sweep: give one mask a head, in the order of heads")
    k, n_draws = check_count("k", k, high=grid.size), check_count("n_draws", n_draws)
    rng = as_generator(check_count("seed", seed, low=0))
    names = np.unique(sweep.facts)
    if len(names) < 2:
        raise InputError("one fact cannot be cut in two: give items of two or more")
    items = sweep.item_effects(score)
    rows = []
    for _ in range(n_draws):
        left = np.isin(sweep.facts, rng.permutation(names)[: len(names) // 2])
        parts = {"a": items[:, left].mean(axis=1), "b": items[:, ~left].mean(axis=1)}
        lists = {
            n: [grid.head(i) for i in np.argsort(v, kind="stable")[:k]] for n, v in parts.items()
        }
        both = overlap(lists, grid.size).iloc[0]
        rho = rank_correlations(parts)["rho"].iloc[0]
        rows.append((rho, int(both["shared"]), float(both["jaccard"])))
    return pd.DataFrame(rows, columns=["rho", "shared", "jaccard"])


def _share(drop: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Share of the own drop; a rare resample without damage counts as a very large one."""
    return drop / np.maximum(own, 1e-9)
