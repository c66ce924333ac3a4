"""Do the assumptions of compressed sensing hold? Sparsity and additivity, put to the test.

*Sparsity*: few heads hold most of the effect. *Additivity*: heads that are off together do what
they do alone, summed. Neither is a matter of yes or no, so each is given as a number with its
interval, and as one plain word by thresholds that are stated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, clone
from sklearn.model_selection import KFold, cross_val_predict

from csloc_utils.designs import check_count
from csloc_utils.errors import InputError
from csloc_utils.heads import HeadGrid
from csloc_utils.intervals import Interval, bootstrap
from csloc_utils.recovery import HeadLasso, check_masks

# Share of the summed |effect| in the top k from which sparsity is called strong, or moderate.
_STRONG, _MODERATE = 0.75, 0.5
# Held-out R² below which a regression on masks explains too little to be trusted.
_TRUSTED = 0.5


@dataclass(frozen=True)
class Sparsity:
    """How few heads hold how much of the summed absolute effect.

    Attributes
    ----------
    top_share : Interval
        Share of the `k` largest.
    gini : Interval
        Gini coefficient: 0 when all heads do the same, near 1 when one does all.
    effective_heads : Interval
        Participation ratio, (sum of absolute effects)² / sum of squares: n equal heads and no more
        give n.
    k : int
    """

    top_share: Interval
    gini: Interval
    effective_heads: Interval
    k: int

    @property
    def verdict(self) -> str:
        """``strong`` if the top k hold 75 % or more, ``moderate`` from 50 %, else ``weak``."""
        share = self.top_share.value
        return "strong" if share >= _STRONG else "moderate" if share >= _MODERATE else "weak"


def sparsity(
    item_effects: np.ndarray,
    facts: np.ndarray,
    k: int = 5,
    n_boot: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Sparsity:
    """Measure sparsity on a sweep.

    Parameters
    ----------
    item_effects : float array (n_heads, n_items)
        Effects of ablating each head alone, item by item.
    facts : array (n_items,)
        Items with the same fact are resampled together.
    k : int
        How many heads the share is of.
    n_boot, confidence, seed
        Of the bootstrap over facts.

    Notes
    -----
    Noise makes every head look as if it did something, so a tail of many small effects is
    overstated on few items and sparsity understated. A resample of facts holds less information
    than the sample: its tail is noisier still, and intervals lean towards "less sparse".

    References
    ----------
    Hurley and Rickard (2009), Comparing measures of sparsity.
    """
    effects = np.asarray(item_effects, float)
    if effects.ndim != 2 or np.shape(facts) != effects.shape[1:]:
        raise InputError(
            f"item effects of shape {effects.shape} do not go with facts of shape "
            f"{np.shape(facts)}: give (n_heads, n_items) and one fact an item"
        )
    if not np.isfinite(effects).all() or not effects.mean(axis=1).any():
        raise InputError("the effects are not finite or all 0: measure them again, in nats")
    k = check_count("k", k, high=len(effects))
    settings = {"n_boot": n_boot, "confidence": confidence, "seed": seed}

    def of(measure):
        return bootstrap([(row, facts) for row in effects], measure, paired=True, **settings)

    return Sparsity(
        of(lambda *means: top_share(np.stack(means), k)),
        of(lambda *means: gini(np.stack(means))),
        of(lambda *means: effective_heads(np.stack(means))),
        k,
    )


def top_share(effects: np.ndarray, k: int) -> np.ndarray:
    """Share of the summed absolute effect that the `k` largest hold; heads along the first axis."""
    sizes = -np.sort(-np.abs(effects), axis=0)
    return sizes[:k].sum(0) / sizes.sum(0)


def gini(effects: np.ndarray) -> np.ndarray:
    """Gini coefficient of the absolute effects; heads along the first axis."""
    sizes = np.sort(np.abs(effects), axis=0)
    n = len(sizes)
    ranks = np.arange(1, n + 1).reshape(-1, *[1] * (sizes.ndim - 1))
    return ((2 * ranks - n - 1) * sizes).sum(0) / (n * sizes.sum(0))


def effective_heads(effects: np.ndarray) -> np.ndarray:
    """Participation ratio of the absolute effects; heads along the first axis."""
    return np.abs(effects).sum(0) ** 2 / (np.asarray(effects) ** 2).sum(0)


def additivity(masks: np.ndarray, effects: np.ndarray, single: np.ndarray) -> pd.DataFrame:
    """Compare measured effects of masks with the sum of single effects, mask size by mask size.

    Parameters
    ----------
    masks : bool array (n_masks, n_heads)
    effects : float array (n_masks,)
        What was measured.
    single : float array (n_heads,)
        Single effects, as a sweep on the same items gives them. Nothing is fitted to the masks.

    Returns
    -------
    DataFrame
        A row a mask size, with ``size``, ``n_masks``, ``r`` (Pearson), ``slope`` (of measured on
        predicted, through zero: above 1 when heads do more damage together), ``r2`` (of the plain
        prediction; negative when it is worse than the mean), ``mean_predicted``, ``mean_measured``.
    """
    design = check_masks(masks)
    if np.shape(single) != design.shape[1:] or np.shape(effects) != design.shape[:1]:
        raise InputError(
            f"{design.shape[0]} masks of {design.shape[1]} heads do not go with effects of shape "
            f"{np.shape(effects)} and single effects of shape {np.shape(single)}"
        )
    predicted, measured = design @ np.asarray(single, float), np.asarray(effects, float)
    sizes = design.sum(axis=1).astype(int)
    rows = []
    for size in np.unique(sizes):
        p, m = predicted[sizes == size], measured[sizes == size]
        spread = ((m - m.mean()) ** 2).sum()
        varied = len(p) > 1 and p.std() > 0 and m.std() > 0
        rows.append(
            {
                "size": int(size),
                "n_masks": len(p),
                "r": float(np.corrcoef(p, m)[0, 1]) if varied else np.nan,
                "slope": float(p @ m / (p @ p)) if p.any() else np.nan,
                "r2": float(1 - ((m - p) ** 2).sum() / spread) if spread else np.nan,
                "mean_predicted": float(p.mean()),
                "mean_measured": float(m.mean()),
            }
        )
    return pd.DataFrame(rows)


def pair_masks(heads: Sequence[int], n_heads: int) -> np.ndarray:
    """Masks of all pairs among `heads`, in the order of `itertools.combinations`."""
    pairs = list(combinations(heads, 2))
    masks = np.zeros((len(pairs), n_heads), bool)
    for mask, pair in zip(masks, pairs):
        mask[list(pair)] = True
    return masks


def pairs(
    grid: HeadGrid,
    masks: np.ndarray,
    item_effects: np.ndarray,
    single: np.ndarray,
    facts: np.ndarray,
    n_boot: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> pd.DataFrame:
    """How pairs of heads differ from their sum.

    Two heads of which either does the work of the other (*backups*) do more damage together than
    the sum of each alone: with one off, the other steps in. Two heads of the same path (a *chain*)
    do less: once the path is cut, cutting it again costs nothing. Saturation, too, looks like a
    chain.

    Parameters
    ----------
    grid : HeadGrid
    masks : bool array (n_pairs, n_heads)
        Two heads each.
    item_effects : float array (n_pairs, n_items)
    single : float array (n_heads, n_items)
        Effects of every head alone on the same items.
    facts : array (n_items,)

    Returns
    -------
    DataFrame
        A row a pair: ``a``, ``b``, ``sum``, ``joint``, ``interaction`` (joint − sum) with ``low``
        and ``high``, and ``kind``: backups (interval below 0), chain (above 0) or additive.
    """
    masks = grid.check_masks(masks)
    if not (masks.sum(axis=1) == 2).all():
        raise InputError("pairs holds masks of exactly two heads: leave the others out")
    settings = {"n_boot": n_boot, "confidence": confidence, "seed": seed}
    rows = []
    for mask, joint in zip(masks, np.asarray(item_effects, float)):
        together = np.asarray(single, float)[mask].sum(axis=0)
        extra = bootstrap([(joint - together, facts)], **settings)
        kind = "backups" if extra.high < 0 else "chain" if extra.low > 0 else "additive"
        a, b = (str(grid.head(i)) for i in np.flatnonzero(mask))
        rows.append(
            {
                "a": a,
                "b": b,
                "sum": float(together.mean()),
                "joint": float(joint.mean()),
                "interaction": extra.value,
                "low": extra.low,
                "high": extra.high,
                "kind": kind,
            }
        )
    return pd.DataFrame(rows)


def pair_coverage(masks: np.ndarray) -> float:
    """How many masks of a design hold an average pair of heads together."""
    sizes = check_masks(masks).sum(axis=1)
    n = np.shape(masks)[1]
    return float((sizes * (sizes - 1)).sum() / (n * (n - 1)))


def coherence(masks: np.ndarray) -> float:
    """Largest absolute correlation between two heads' columns; 1 when some are always off together.

    What is never or always off has no correlation and is left out.
    """
    design = check_masks(masks)
    design = design[:, design.std(axis=0) > 0]
    if design.shape[1] < 2:
        raise InputError("fewer than two heads are off in some masks only: draw other masks")
    correlations = np.abs(np.corrcoef(design, rowvar=False))
    np.fill_diagonal(correlations, 0)
    return float(correlations.max())


def held_out_r2(
    masks: np.ndarray,
    effects: np.ndarray,
    estimator: BaseEstimator | None = None,
    n_splits: int = 5,
    seed: int = 0,
) -> float:
    """R² of a regression on masks that it was not fitted to, pooled over folds; never in-sample."""
    design, effects = check_masks(masks), np.asarray(effects, float)
    if len(design) < 2 * n_splits:
        raise InputError(f"{len(design)} masks are too few for {n_splits} folds: measure more")
    folds = KFold(n_splits, shuffle=True, random_state=seed)
    guess = cross_val_predict(clone(estimator or HeadLasso()), design, effects, cv=folds)
    return float(1 - ((effects - guess) ** 2).sum() / ((effects - effects.mean()) ** 2).sum())


@dataclass(frozen=True)
class Diagnosis:
    """What a design and its measurements can support.

    Attributes
    ----------
    n_masks : int
    least, most : int
        Fewest and most masks that any head is off in.
    pair_coverage, coherence, held_out_r2 : float
    warnings : tuple of str
        One plain sentence for each assumption that does not hold.
    """

    n_masks: int
    least: int
    most: int
    pair_coverage: float
    coherence: float
    held_out_r2: float
    warnings: tuple[str, ...]


def diagnose(
    masks: np.ndarray, effects: np.ndarray, estimator: BaseEstimator | None = None, seed: int = 0
) -> Diagnosis:
    """Say what masks and their effects can support, with a sentence where they cannot."""
    counts = check_masks(masks).sum(axis=0).astype(int)
    alike, r2 = coherence(masks), held_out_r2(masks, effects, estimator, seed=seed)
    warnings = []
    if not counts.min():
        warnings.append(f"{(counts == 0).sum()} heads were never off: nothing is known of them")
    if alike > 1 - 1e-9:
        warnings.append("some heads were always off together: no regression tells them apart")
    if r2 < _TRUSTED:
        warnings.append(
            f"on masks it has not seen the regression explains {max(r2, 0):.0%} of the variance: "
            "sparsity or additivity does not hold, or there are too few masks"
        )
    return Diagnosis(
        len(masks),
        int(counts.min()),
        int(counts.max()),
        pair_coverage(masks),
        alike,
        r2,
        tuple(warnings),
    )
