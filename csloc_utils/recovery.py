"""From the effects of masks to the effects of heads: sparse regression.

If effects roughly add up and few heads matter, the effect of a mask is about ``intercept + sum of
the effects of its heads`` with most of those zero. The Lasso finds such a solution from far fewer
masks than heads. :class:`HeadLasso` is the paper's estimator with scikit-learn's conventions; a
*negative* coefficient means that the score falls when the head is switched off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.linear_model import Lasso
from sklearn.utils.validation import check_is_fitted

from csloc_utils.designs import check_count
from csloc_utils.errors import InputError


class HeadLasso(RegressorMixin, BaseEstimator):
    r"""The paper's estimator: a Lasso of mask effects on the 0/1 masks.

    With :math:`\Phi` the masks and :math:`y` the effects, standardized to mean 0 and standard
    deviation 1, it minimizes

    .. math:: \frac{1}{2M} \lVert y - \beta_0 - \Phi x \rVert_2^2 + \alpha \lVert x \rVert_1

    and reports :math:`x` and :math:`\beta_0` in the units of the effects.

    Parameters
    ----------
    alpha : float, default 0.01
        Penalty, in standardized units when ``standardize`` is true. The paper's value.
    standardize : bool, default True
        Standardize the effects first, so that ``alpha`` means the same for every task and score.
    max_iter : int, default 5000
        Limit on the passes of coordinate descent.

    Attributes
    ----------
    coef_ : ndarray of float, shape (n_heads,)
        Estimated effect of ablating each head, in the units of the effects; shrunk towards zero.
    intercept_ : float
        Estimated effect of a mask without heads, in the same units.
    importances_ : ndarray of float, shape (n_heads,)
        ``-coef_``: large = needed.
    support_ : ndarray of bool, shape (n_heads,)
        Heads with a coefficient other than zero.
    residual_covariances_ : ndarray of float, shape (n_heads,)
        Covariance of each head's column with what the fit leaves unexplained. Among heads with
        coefficient zero, the most negative one would enter the model next as an important head.
    n_iter_ : int
        Passes of coordinate descent.
    n_features_in_ : int
        Number of heads.

    References
    ----------
    Bair, Xu, Sun and Kolter (2026), Compressed Sensing for Capability Localization in Large
    Language Models.

    Examples
    --------
    >>> import numpy as np
    >>> from csloc_utils.designs import stratified
    >>> effects_of_heads = np.zeros(40)
    >>> effects_of_heads[[3, 17]] = [-2.0, -1.0]
    >>> masks = stratified(30, 40, size=4, random_state=0)
    >>> HeadLasso().fit(masks, masks @ effects_of_heads).top(2).tolist()
    [3, 17]
    """

    def __init__(self, alpha: float = 0.01, standardize: bool = True, max_iter: int = 5000):
        self.alpha = alpha
        self.standardize = standardize
        self.max_iter = max_iter

    def fit(self, masks: np.ndarray, effects: np.ndarray) -> HeadLasso:
        """Fit the regression.

        Parameters
        ----------
        masks : array of bool or 0/1, shape (n_masks, n_heads)
            ``True`` = ablated.
        effects : array of float, shape (n_masks,)
            score(ablated) - score(intact) of every mask.

        Raises
        ------
        InputError
            When the masks are not a 2-D 0/1 array with at least two rows, when the lengths differ,
            or when the effects are not finite or all the same.
        """
        design = check_masks(masks)
        effects = check_effects(effects, len(design))
        shift, scale = (effects.mean(), effects.std()) if self.standardize else (0.0, 1.0)
        lasso = Lasso(alpha=self.alpha, max_iter=self.max_iter)
        lasso.fit(design, (effects - shift) / scale)
        self.coef_ = lasso.coef_ * scale + 0.0  # turns -0.0 into 0.0
        self.intercept_ = float(lasso.intercept_ * scale + shift)
        self.importances_ = 0.0 - self.coef_
        self.support_ = self.coef_ != 0
        self.n_iter_ = lasso.n_iter_
        self.n_features_in_ = design.shape[1]
        residuals = effects - self.intercept_ - design @ self.coef_
        self.residual_covariances_ = (design - design.mean(axis=0)).T @ residuals / len(design)
        return self

    def predict(self, masks: np.ndarray) -> np.ndarray:
        """Predicted effect of every mask, shape (n_masks,), in the units of the effects."""
        check_is_fitted(self)
        design = check_masks(masks)
        if design.shape[1] != self.n_features_in_:
            raise InputError(
                f"the masks have {design.shape[1]} heads but the fit had {self.n_features_in_}: "
                "give masks of the same model"
            )
        return design @ self.coef_ + self.intercept_

    def top(self, k: int) -> np.ndarray:
        """Flat indices of the ``k`` most important heads (most negative ``coef_``), best first.

        Equal coefficients (most are exactly zero) are ordered by ``residual_covariances_``, then by
        flat index. Whether a head was really selected tells ``coef_[head] < 0``.

        Raises
        ------
        InputError
            When ``k`` is not a whole number from 1 to the number of heads.
        """
        check_is_fitted(self)
        k = check_count("k", k, high=self.n_features_in_)
        return np.lexsort((self.residual_covariances_, self.coef_))[:k]


def check_masks(masks: np.ndarray) -> np.ndarray:
    """Return the masks as a float copy of 0s and 1s, (n_masks, n_heads), or raise InputError."""
    try:
        design = np.array(masks, dtype=float)
    except (TypeError, ValueError) as error:
        raise InputError(f"the masks are not an array of numbers: {error}") from error
    if design.ndim != 2 or design.shape[1] == 0:
        raise InputError(
            f"the masks have shape {design.shape}: give a 2-D array, (n_masks, n_heads)"
        )
    if not np.isin(design, (0.0, 1.0)).all():
        raise InputError(
            "the masks hold values other than 0 and 1: use True or 1 for ablated heads"
        )
    return design


def recall(found: Iterable, truth: Iterable) -> float:
    """Share of ``truth`` that is among ``found``; heads or flat indices, order ignored."""
    found, truth = set(found), set(truth)
    if not truth:
        raise InputError("no true heads given: recall needs at least one")
    return len(found & truth) / len(truth)


def recovery_curve(
    masks: np.ndarray,
    effects: np.ndarray,
    truth: Sequence[int],
    sizes: Sequence[int],
    estimator: BaseEstimator | None = None,
) -> pd.DataFrame:
    """How much of ``truth`` is recovered from the first rows of a measured design.

    First rows, not random ones: the beginning of a stratified design is balanced, a random part is
    not.

    Parameters
    ----------
    masks, effects : array, shapes (n_masks, n_heads) and (n_masks,)
        A design and its measured effects.
    truth : sequence of int
        Flat indices of the heads to find, for instance the top five of a sweep.
    sizes : sequence of int
        Numbers of rows to use, each from 2 to ``n_masks``.
    estimator : estimator with ``fit`` and ``top``, default HeadLasso()
        Cloned for every size.

    Returns
    -------
    DataFrame
        One row a size, columns ``n_masks`` and ``recall``.
    """
    estimator = HeadLasso() if estimator is None else estimator
    truth = [int(head) for head in truth]
    rows = []
    for size in sizes:
        size = check_count("number of masks", size, low=2, high=len(masks))
        fit = clone(estimator).fit(masks[:size], effects[:size])
        rows.append({"n_masks": size, "recall": recall(fit.top(len(truth)).tolist(), truth)})
    return pd.DataFrame(rows, columns=["n_masks", "recall"])


def check_effects(effects: np.ndarray, n_masks: int) -> np.ndarray:
    """Return the effects as a float copy that a regression can learn from, or raise InputError."""
    try:
        effects = np.array(effects, dtype=float)
    except (TypeError, ValueError) as error:
        raise InputError(f"the effects are not an array of numbers: {error}") from error
    if effects.shape != (n_masks,):
        raise InputError(
            f"the effects have shape {effects.shape} but there are {n_masks} masks: "
            "give one effect for every mask"
        )
    if n_masks < 2:
        raise InputError("one mask cannot tell heads apart: measure at least two")
    if not np.isfinite(effects).all():
        bad = int((~np.isfinite(effects)).sum())
        raise InputError(
            f"{bad} of {n_masks} effects are NaN or infinite: measure them again or drop them"
        )
    if np.ptp(effects) <= 1e-12 * np.abs(effects).max():
        raise InputError(
            "all masks have the same effect, so nothing tells the heads apart: "
            "use larger masks, more items, or log-probability instead of accuracy"
        )
    return effects
