"""Slopes and random masks in one regression: which heads matter one by one, for a part of a sweep.

Slopes know something about every head, for nearly nothing, and some of it is wrong. Random masks
are right and know little, as long as they are few. So let the slopes be the *prior* of the
regression: before any mask is measured, a head's effect is expected to be a weighted sum of its
slopes, the less surely the larger they are; the masks then say how far the slopes can be trusted,
and correct single heads. The heads that look worst are measured alone, and only measurements are
reported.

This answers the question of the paper's regression, *single* effects. A set that does most damage
together is what `csloc_utils.screening` looks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import nnls

from csloc_utils.designs import check_count, stratified
from csloc_utils.errors import InputError
from csloc_utils.gradients import SMOOTH_SCORES
from csloc_utils.measurements import SLOPE_COST
from csloc_utils.recovery import check_effects, check_masks
from csloc_utils.search import SearchResult, check_budget, check_score, default_size

if TYPE_CHECKING:
    from csloc_utils.measure import Evaluator

# Keep-strengths of all heads at which slopes are taken; chosen as in `csloc_utils.screening`.
STRENGTHS = (1.0, 0.75)
# Share of what is left after the slopes that random masks get; the rest confirms heads singly.
MASK_SHARE = 2 / 3
_FEWEST_MASKS = 2
# Prior variance of a head without any slope, beside the mean over heads; and variance of what the
# sum of single effects leaves unexplained, beside that of the sum. The data choose.
_FLOORS = (0.05, 0.2, 1.0)
_NOISES = (0.1, 0.5, 2.0, 10.0)


@dataclass(frozen=True)
class Fusion:
    """What slopes and masks say together.

    Attributes
    ----------
    effects : float array (n_heads,)
        Expected effect of ablating each head, in the units of the masks' effects.
    spreads : float array (n_heads,)
        Their standard deviations, as the model has it.
    weights : float array (n_slopes,)
        What each kind of slope is worth: 0 is nothing, 1 is its word.
    intercept : float
    """

    effects: np.ndarray
    spreads: np.ndarray
    weights: np.ndarray
    intercept: float


def fuse(masks: np.ndarray, effects: np.ndarray, slopes: Sequence[np.ndarray]) -> Fusion:
    r"""Regress the effects of masks on their heads, with slopes as the prior.

    Parameters
    ----------
    masks : array of bool or 0/1, shape (n_masks, n_heads)
        ``True`` = ablated.
    effects : array of float, shape (n_masks,)
        Effect of every mask.
    slopes : sequence of float arrays (n_heads,)
        Guesses of single effects: the effects of `csloc_utils.gradients.Slopes` at some points.

    Raises
    ------
    InputError
        For masks or effects that no regression can learn from, or slopes of another length.

    Notes
    -----
    The model is linear and Gaussian, :math:`y = \beta_0 + \Phi x + \varepsilon` with

    .. math:: x_h \sim N\bigl(\textstyle\sum_s w_s g_{sh},\; \tau^2 (f + a_h)\bigr),
              \qquad \varepsilon \sim N(0, \sigma^2)

    where :math:`g_s` are the slopes and :math:`a_h` is the mean over them of
    :math:`|g_{sh}|`, each scaled to mean 1 over heads. Weights :math:`w_s \ge 0` and
    :math:`\beta_0` follow by generalized least squares, :math:`\tau` in closed form, the floor
    :math:`f` and :math:`\sigma / \tau` from a small grid by marginal likelihood (empirical Bayes).
    """
    design, effects = check_masks(masks), check_effects(effects, len(masks))
    guesses = np.array(slopes, float)
    if guesses.ndim != 2 or guesses.shape[1] != design.shape[1] or not np.isfinite(guesses).all():
        raise InputError(
            f"slopes have shape {guesses.shape}: give finite ones, a row of {design.shape[1]} "
            "heads for every point"
        )
    size = np.abs(guesses).mean(axis=1, keepdims=True)
    certain = (np.abs(guesses) / np.where(size > 0, size, 1)).mean(axis=0)
    n = len(effects)
    # The intercept may have either sign; the weights may not.
    explained = np.column_stack([-np.ones(n), np.ones(n), design @ guesses.T])
    best: tuple[float, Any] = (-np.inf, None)
    for floor in _FLOORS:
        prior = (floor + certain) / (floor + certain).mean()
        covariance = (design * prior) @ design.T
        prior, covariance = prior * n / np.trace(covariance), covariance * n / np.trace(covariance)
        for noise in _NOISES:
            root = cholesky(covariance + noise * np.eye(n), lower=True)
            beta = nnls(
                solve_triangular(root, explained, lower=True),
                solve_triangular(root, effects, lower=True),
            )[0]
            left = solve_triangular(root, effects - explained @ beta, lower=True)
            scale = max(left @ left / n, np.finfo(float).tiny)
            likelihood = -n * np.log(scale) / 2 - np.log(np.diag(root)).sum()
            if likelihood > best[0]:
                best = likelihood, (root, prior, beta, left, scale)
    root, prior, beta, left, scale = best[1]
    gain = solve_triangular(root, design * prior, lower=True)
    return Fusion(
        effects=guesses.T @ beta[2:] + gain.T @ left,
        spreads=np.sqrt(scale * np.maximum(prior - (gain**2).sum(axis=0), 0)),
        weights=beta[2:],
        intercept=float(beta[1] - beta[0]),
    )


def fused(
    evaluator: Evaluator,
    k: int = 5,
    budget: int = 100,
    size: int | None = None,
    seed: int = 0,
    score: str = "logprob",
) -> SearchResult:
    """Find the ``k`` heads with the largest single effects from slopes, masks and confirmations.

    Rows of the table: ``head``, ``effect`` (measured alone), ``accuracy_effect``, ``expected`` (by
    the regression, before that) and ``rank`` (its place among all heads by that expectation).
    ``extra`` holds ``fusion``, ``slopes`` ``(2, n_heads)``, ``candidates`` (flat indices of the
    heads that were measured alone, most promising first) and both ``measurements`` (of the random
    masks) and ``confirmed``.

    Parameters
    ----------
    evaluator : Evaluator
        Model and items.
    k : int, default 5
        Heads to name.
    budget : int, default 100
        Evaluation-equivalents, the baseline included: two backward passes, then two thirds of the
        rest in random masks and one third in heads alone, at least ``k`` of them.
    size : int, optional
        Heads in a mask, 2 % by default.
    seed : int, default 0
        Seed of the masks, which are those of `csloc_utils.search.paper`.
    score : str, default "logprob"
        Score to lower. Where it has no slope (accuracy), slopes are of the log-probability.

    Raises
    ------
    InputError
        For a bad ``k``, size, seed or score or a budget that is too small, before any mask is
        measured; for masks that all have the same effect, after.
    """
    grid = evaluator.grid
    k = check_count("k", k, high=grid.size)
    needed = 1 + SLOPE_COST * len(STRENGTHS) + _FEWEST_MASKS + k
    check_budget(budget, needed, f"a fused search for {k} heads")
    size = default_size(grid.size) if size is None else size
    size = check_count("mask size", size, high=grid.size)
    check_score(evaluator, score)
    left = budget - 1 - SLOPE_COST * len(STRENGTHS)
    n_masks = min(max(_FEWEST_MASKS, int(MASK_SHARE * left)), left - k)
    n_alone = min(left - n_masks, grid.size)
    masks = stratified(n_masks, grid.size, size, check_count("seed", seed, low=0))

    smooth = score if score in SMOOTH_SCORES else "logprob"
    intact = np.zeros((1, grid.size), bool)
    slopes = np.array([evaluator.slopes(intact, s, smooth).effects[0] for s in STRENGTHS])
    measured = evaluator.measure(masks)
    fusion = fuse(masks, measured.effects(score), slopes)
    candidates = np.argsort(fusion.effects, kind="stable")[:n_alone]
    confirmed = evaluator.measure(grid.single_masks()[candidates])
    effects, accuracy = confirmed.effects(score), confirmed.effects("accuracy")
    order = np.lexsort((confirmed.effects("logprob"), effects))[:k]
    table = [
        {
            "head": str(grid.head(candidates[i])),
            "effect": float(effects[i]),
            "accuracy_effect": float(accuracy[i]),
            "expected": float(fusion.effects[candidates[i]]),
            "rank": int(i) + 1,
        }
        for i in order
    ]
    n_passes = len(STRENGTHS)
    evaluations = {
        "forward": 1 + n_passes + n_masks + n_alone,
        "backward": n_passes,
        "equivalents": 1 + SLOPE_COST * n_passes + n_masks + n_alone,
    }
    extra = {
        "fusion": fusion,
        "slopes": slopes,
        "candidates": candidates,
        "measurements": measured,
        "confirmed": confirmed,
        "score": score,
    }
    heads = [grid.head(candidates[i]) for i in order]
    return SearchResult("fused", heads, table, k, evaluations, extra)
