"""Which heads may be claimed: false discoveries, and how often a head is selected again.

:func:`discoveries` bounds the share of false claims. The masks were drawn by us, so chance is known
exactly: in a Bernoulli design a head's column says nothing about the other columns, and if the head
does not matter, its ablations could as well have been dealt to other masks. Each head is tested
against its own column dealt anew.

:func:`selection_frequency` fits no null at all: it asks how often half of the masks select a head.

Both speak of the items measured; whether an effect holds for other items is for
:func:`csloc_utils.confidence.confirmed_effects`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import false_discovery_control
from sklearn.base import BaseEstimator, clone

from csloc_utils.designs import as_generator, check_count
from csloc_utils.errors import InputError
from csloc_utils.recovery import HeadLasso, check_masks

# Penalty of the regression that takes the other heads out, relative to the universal one. Half of
# it found most heads in simulations, at the same false discovery rate as 1 and 0.25.
_PENALTY = 0.5


@dataclass(frozen=True)
class Discoveries:
    """The result of :func:`discoveries`.

    Attributes
    ----------
    heads : list of int
        Flat indices of the claimed heads, smallest p-value first; empty when nothing can be
        claimed.
    p_values : ndarray of float, shape (n_heads,)
        Of each head alone; 1 for a head that was never ablated.
    adjusted : ndarray of float, shape (n_heads,)
        The smallest level at which the head would be claimed.
    level : float
        False discovery rate asked for.
    """

    heads: list[int]
    p_values: np.ndarray
    adjusted: np.ndarray
    level: float


def discoveries(
    masks: np.ndarray,
    effects: np.ndarray,
    level: float = 0.1,
    design: str = "bernoulli",
    two_sided: bool = False,
    n_resamples: int = 10_000,
    seed: int = 0,
) -> Discoveries:
    """Claim heads with a bound on the expected share of false claims.

    For every head: a Lasso on the *other* heads, refitted by least squares, leaves residuals; the
    statistic is their sum over the masks that ablate the head (very negative = needed). Its null
    distribution comes from dealing the head's ablations to other masks. Benjamini and Hochberg's
    rule turns the p-values into claims.

    Parameters
    ----------
    masks, effects : arrays, shapes (n_masks, n_heads) and (n_masks,)
        A Bernoulli design and its measured effects. Rows must have been drawn independently of
        each other and of all earlier measurements.
    level : float, default 0.1
        False discovery rate.
    design : {"bernoulli"}
        How the masks were drawn. Others are refused: in a stratified design a head's column is
        fixed by the other columns, and nothing is left to resample.
    two_sided : bool, default False
        Also claim heads whose ablation *raises* the score.
    n_resamples : int, default 10000
        Resamples; p-values are multiples of ``1 / (n_resamples + 1)``.
    seed : int, default 0
        Seed of the resampling.

    Returns
    -------
    Discoveries

    Raises
    ------
    InputError
        For another design, masks that all have the same size, too few resamples to claim a single
        head at this level, or bad arrays.

    Notes
    -----
    A false claim is a head whose ablation changes nothing given the others; a head with a tiny
    effect is a true one. The p-values are exact without any model of the effects (Candès, Fan,
    Janson and Lv 2018; the distilled statistic is that of Liu, Katsevich, Janson and Ramdas 2022):
    given the other columns and how often the head was ablated, every choice of masks is equally
    likely. So the ablation probability need not be known. Where only this head was ablated, it had
    to be (empty masks are never drawn): such masks stay as they are. The rule of Benjamini and
    Hochberg (1995) assumes independent or positively dependent tests; these are nearly
    independent, and the rate is checked by simulation in ``tests/long``.

    Knockoffs control the same rate but need at least ``1 / level`` claims to make any; with five
    strong heads they mostly make none.
    """
    if design != "bernoulli":
        raise InputError(
            f"false discoveries cannot be controlled for a {design} design: "
            "its columns depend on each other; measure a Bernoulli design"
        )
    if not 0 < level < 1:
        raise InputError(f"level is {level!r}: give a rate between 0 and 1, like 0.1")
    columns = check_masks(masks) == 1
    n_masks, n_heads = columns.shape
    sizes = columns.sum(axis=1)
    if n_masks > 1 and np.ptp(sizes) == 0:
        raise InputError(
            f"every mask ablates {sizes[0]} heads, so they were not drawn independently: "
            "measure a Bernoulli design"
        )
    n_resamples = check_count("n_resamples", n_resamples)
    sides = 2 if two_sided else 1
    if (n_resamples + 1) * level < sides * n_heads:
        raise InputError(
            f"{n_resamples} resamples cannot show a p-value small enough for {n_heads} heads at "
            f"level {level}: use at least {int(np.ceil(sides * n_heads / level))}"
        )
    orders = as_generator(seed).random((n_resamples, n_masks)).argsort(axis=1)
    p_values = np.ones(n_heads)
    residuals = _residuals(columns, effects)
    for head in range(n_heads):
        movable = ~(columns[:, head] & (sizes == 1))
        p_values[head] = _p_value(columns[:, head], residuals[head], movable, orders, two_sided)
    adjusted = false_discovery_control(p_values)
    order = np.argsort(p_values, kind="stable")
    heads = [int(head) for head in order if adjusted[head] <= level]
    return Discoveries(heads, p_values, adjusted, level)


@dataclass(frozen=True)
class Stability:
    """How often each head is selected on half of the masks; see :func:`selection_frequency`.

    Attributes
    ----------
    frequencies : ndarray of float, shape (n_heads,)
        Share of the ``2 * n_pairs`` halves that select the head.
    heads : list of int
        Flat indices with a frequency of at least ``threshold``, most frequent first.
    q, threshold, n_pairs
        As given.
    bound : float
        Upper bound on the expected number of heads in ``heads`` that half the masks select with
        probability at most ``q / n_heads``, no more often than a blind choice would.
    bound_unimodal : float
        The smaller bound that holds if the number of halves selecting such a head has a
        distribution with one peak; equal to ``bound`` where the theory gives none.
    """

    frequencies: np.ndarray
    heads: list[int]
    q: int
    threshold: float
    n_pairs: int
    bound: float
    bound_unimodal: float


def selection_frequency(
    masks: np.ndarray,
    effects: np.ndarray,
    q: int,
    threshold: float = 0.75,
    n_pairs: int = 50,
    seed: int = 0,
    estimator: BaseEstimator | None = None,
) -> Stability:
    r"""Stability selection with complementary pairs (Shah and Samworth 2013).

    The masks are cut into two random halves ``n_pairs`` times. Each half selects up to ``q`` heads
    (most negative coefficients); a head is kept when at least a share ``threshold`` of all halves
    select it.

    Parameters
    ----------
    masks, effects : arrays, shapes (n_masks, n_heads) and (n_masks,)
        A design and its measured effects.
    q : int
        Most heads that a half may select.
    threshold : float, default 0.75
        Above 0.5, at most 1.
    n_pairs, seed : int, default 50 and 0
        Number and seed of the cuts.
    estimator : estimator with ``fit``, ``coef_`` and ``top``, default HeadLasso()
        Selects the heads.

    Returns
    -------
    Stability

    Raises
    ------
    InputError
        For bad arrays, counts or threshold, or fewer than four masks.

    Notes
    -----
    ``bound`` is :math:`q^2 / ((2\pi - 1) N)`: Theorem 1 of Shah and Samworth, without assumptions,
    for heads of low selection probability. Meinshausen and Bühlmann (2010) give the same number for
    heads without any effect, if those are exchangeable. ``bound_unimodal`` is Theorem 2.
    """
    q = check_count("q", q)
    n_pairs = check_count("n_pairs", n_pairs)
    if not 0.5 < threshold <= 1:
        raise InputError(f"threshold is {threshold!r}: give a share above 0.5, at most 1")
    estimator = HeadLasso() if estimator is None else estimator
    clone(estimator).fit(masks, effects)  # says what is wrong with the input
    design, effects = check_masks(masks), np.asarray(effects, dtype=float)
    n_masks, n_heads = design.shape
    check_count("q", q, high=n_heads)
    if n_masks < 4:
        raise InputError(f"{n_masks} masks cannot be cut in half: measure at least four")
    rng = as_generator(seed)
    counts = np.zeros(n_heads)
    for _ in range(n_pairs):
        order, size = rng.permutation(n_masks), n_masks // 2
        for rows in (order[:size], order[size : 2 * size]):
            counts[select(estimator, design[rows], effects[rows], q)] += 1
    frequencies = counts / (2 * n_pairs)
    order = np.argsort(-frequencies, kind="stable")
    heads = [int(head) for head in order if frequencies[head] >= threshold - 1e-12]
    bounds = _stability_bounds(q, n_heads, threshold, n_pairs)
    return Stability(frequencies, heads, q, threshold, n_pairs, *bounds)


def _stability_bounds(q: int, n_heads: int, threshold: float, n_pairs: int) -> tuple[float, float]:
    """Theorems 1 and 2 of Shah and Samworth (2013), at selection probability q / n_heads."""
    theta, step = q / n_heads, 1 / (2 * n_pairs)
    worst = q * theta / (2 * threshold - 1)
    lowest = min(0.5 + theta**2, 0.5 + step + 0.75 * theta**2)
    if theta > 1 / np.sqrt(3) or threshold <= lowest or 2 * threshold - 1 <= step:
        return worst, worst
    if threshold <= 0.75:
        factor = 1 / (2 * (2 * threshold - 1 - step))
    else:
        factor = 4 * (1 - threshold + step) / (1 + 2 * step)
    return worst, min(worst, q * theta * factor)


def select(estimator: BaseEstimator, design: np.ndarray, effects: np.ndarray, k: int) -> np.ndarray:
    """Up to k heads with a negative coefficient; none where all effects are equal."""
    if np.ptp(effects) <= 1e-12 * np.abs(effects).max():
        return np.array([], dtype=int)
    fit = clone(estimator).fit(design, effects)
    top = fit.top(k)
    return top[fit.coef_[top] < 0]


def _residuals(columns: np.ndarray, effects: np.ndarray) -> np.ndarray:
    """What the other heads leave unexplained of the effects, (n_heads, n_masks)."""
    n_masks, n_heads = columns.shape
    share = columns.mean()
    # A column of pure chance has about this covariance with the effects at most (Donoho and
    # Johnstone's universal threshold). Nothing here depends on which masks ablate the head.
    alpha = _PENALTY * np.sqrt(share * (1 - share) * 2 * np.log(n_heads) / n_masks)
    lasso = HeadLasso(alpha=max(alpha, 1e-6))
    support = lasso.fit(columns, effects).support_.copy()
    effects = np.asarray(effects, dtype=float)
    # Leaving out a head with coefficient zero does not change the fit.
    residuals = np.tile(_refit(columns[:, support], effects), (n_heads, 1))
    for head in np.flatnonzero(support):
        rest = np.delete(columns, head, axis=1)
        if rest.shape[1]:
            rest = rest[:, lasso.fit(rest, effects).support_]
        residuals[head] = _refit(rest, effects)
    return residuals


def _refit(columns: np.ndarray, effects: np.ndarray) -> np.ndarray:
    """Residuals of least squares with an intercept."""
    regressors = np.column_stack([np.ones(len(effects)), columns])
    return effects - regressors @ np.linalg.lstsq(regressors, effects, rcond=None)[0]


def _p_value(
    column: np.ndarray,
    residuals: np.ndarray,
    movable: np.ndarray,
    orders: np.ndarray,
    two_sided: bool,
) -> float:
    """Share of deals of the column, itself included, with a sum of residuals at least as low."""
    count = np.count_nonzero(column & movable)
    if not count:
        return 1.0
    # The first `count` movable masks of a random order are a random deal of the column.
    deals = orders if movable.all() else orders[movable[orders]].reshape(len(orders), -1)
    null = residuals[deals[:, :count]].sum(axis=1)
    observed = residuals[column & movable].sum()
    rounding = 1e-9 * np.abs(residuals).sum()
    low = (1 + np.count_nonzero(null <= observed + rounding)) / (1 + len(null))
    if not two_sided:
        return low
    high = (1 + np.count_nonzero(null >= observed - rounding)) / (1 + len(null))
    return min(1.0, 2 * min(low, high))
