"""Several tasks at once, on the same masks: which heads serve all of them, and which only one.

A head that breaks everything looks like a head for anything. So the same masks are measured on
several tasks, and then either

- all tasks are regressed together (:class:`MultiTaskHeadLasso`): a head enters for all tasks or for
  none, and how its coefficients are spread over the tasks says whether it is *universal* (every
  task needs it) or *specific* (one task does); or
- what control tasks lose is taken off what the target loses (:func:`contrast`), and the rest is
  regressed or ranked like the effects of a single task.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.linear_model import MultiTaskLasso
from sklearn.utils.validation import check_is_fitted

from csloc_utils.designs import check_count
from csloc_utils.errors import InputError
from csloc_utils.recovery import check_masks


class MultiTaskHeadLasso(RegressorMixin, BaseEstimator):
    r"""Lasso of several tasks' effects on the same masks, with one penalty a head.

    With :math:`\Phi` the masks and :math:`Y` the effects of :math:`T` tasks, each standardized to
    mean 0 and standard deviation 1, it minimizes

    .. math:: \frac{1}{2M} \lVert Y - 1\beta_0^\top - \Phi X \rVert_F^2
              + \alpha \sqrt{T} \sum_h \lVert x_h \rVert_2

    where :math:`x_h` holds head :math:`h`'s coefficients on all tasks. The factor :math:`\sqrt T`
    lets ``alpha`` mean the same for any number of tasks: one task, or copies of it, give what
    `csloc_utils.recovery.HeadLasso` gives.

    Parameters
    ----------
    alpha : float, default 0.01
        Penalty, in standardized units when ``standardize`` is true; before the factor above.
    standardize : bool, default True
        Standardize each task's effects first, so that no task counts more for its units.
    share : float, default 0.25
        A task *needs* a head whose coefficient is negative and at least this share of the task's
        most negative one.
    max_iter : int, default 5000
        Limit on the passes of coordinate descent.

    Attributes
    ----------
    coef_ : ndarray of float, shape (n_tasks, n_heads)
        Estimated effect of ablating each head, in the units of each task's effects; shrunk.
    intercept_ : ndarray of float, shape (n_tasks,)
        Estimated effects of a mask without heads.
    importances_ : ndarray of float, shape (n_tasks, n_heads)
        ``-coef_``: large = needed.
    support_ : ndarray of bool, shape (n_heads,)
        Heads with a coefficient other than zero on some task.
    needed_ : ndarray of bool, shape (n_tasks, n_heads)
        Which task needs which head.
    universal_ : ndarray of bool, shape (n_heads,)
        Heads that every task needs; none when there is only one task.
    specific_ : ndarray of bool, shape (n_tasks, n_heads)
        Heads that this task alone needs.
    residual_covariances_ : ndarray of float, shape (n_tasks, n_heads)
        Covariance of each head's column with what the fit leaves unexplained.
    n_iter_, n_features_in_ : int
        Passes of coordinate descent; number of heads.

    Notes
    -----
    The joint penalty selects heads, not pairs of head and task: a selected head has a coefficient
    on every task. That is why a role is decided by ``share`` and not by zeros. Roles carry no error
    rate, and they depend on choices: a specific head is shrunk about :math:`\sqrt T` times as much
    as a universal one, so that a large ``alpha`` loses specific heads first; a very large universal
    head raises what "a share of the largest" means, and hides small specific ones.

    References
    ----------
    Obozinski, Taskar and Jordan (2010), Joint covariate selection and joint subspace selection for
    multiple classification problems. Yuan and Lin (2006), Model selection and estimation in
    regression with grouped variables: the root of a group's size in its penalty.

    Examples
    --------
    >>> import numpy as np
    >>> from csloc_utils.designs import stratified
    >>> effects_of_heads = np.zeros((2, 40))
    >>> effects_of_heads[:, 3] = -2.0
    >>> effects_of_heads[0, 17] = effects_of_heads[1, 25] = -1.0
    >>> masks = stratified(60, 40, size=4, random_state=0)
    >>> fit = MultiTaskHeadLasso().fit(masks, masks @ effects_of_heads.T)
    >>> np.flatnonzero(fit.universal_).tolist()
    [3]
    >>> fit.roles(["sums", "rhymes"])[["head", "role", "tasks"]].values.tolist()
    [[3, 'universal', 'sums, rhymes'], [17, 'specific', 'sums'], [25, 'specific', 'rhymes']]
    """

    def __init__(
        self,
        alpha: float = 0.01,
        standardize: bool = True,
        share: float = 0.25,
        max_iter: int = 5000,
    ):
        self.alpha, self.standardize = alpha, standardize
        self.share, self.max_iter = share, max_iter

    def fit(self, masks: np.ndarray, effects: np.ndarray) -> MultiTaskHeadLasso:
        """Fit all tasks together.

        Parameters
        ----------
        masks : array of bool or 0/1, shape (n_masks, n_heads)
            ``True`` = ablated.
        effects : array of float, shape (n_masks, n_tasks)
            score(ablated) - score(intact) of every mask on every task.

        Raises
        ------
        InputError
            For masks that are no 2-D 0/1 array with at least two rows, effects that do not go with
            them, are not finite or all the same on a task, or a ``share`` outside (0, 1].
        """
        if not isinstance(self.share, Real) or not 0 < self.share <= 1:
            raise InputError(f"share is {self.share!r}: give a number above 0 and up to 1")
        design = check_masks(masks)
        effects = _check_tasks(effects, len(design))
        n_tasks = effects.shape[1]
        shift, scale = np.zeros(n_tasks), np.ones(n_tasks)
        if self.standardize:
            shift, scale = effects.mean(axis=0), effects.std(axis=0)
        lasso = MultiTaskLasso(alpha=self.alpha * np.sqrt(n_tasks), max_iter=self.max_iter)
        lasso.fit(design, (effects - shift) / scale)
        self.coef_ = lasso.coef_ * scale[:, None] + 0.0  # turns -0.0 into 0.0
        self.intercept_ = lasso.intercept_ * scale + shift
        self.importances_ = 0.0 - self.coef_
        self.support_ = (self.coef_ != 0).any(axis=0)
        self.n_iter_ = lasso.n_iter_
        self.n_features_in_ = design.shape[1]
        residuals = effects - self.intercept_ - design @ self.coef_.T
        self.residual_covariances_ = residuals.T @ (design - design.mean(axis=0)) / len(design)
        largest = self.importances_.max(axis=1, keepdims=True)
        self.needed_ = (self.importances_ > 0) & (self.importances_ >= self.share * largest)
        n_needing = self.needed_.sum(axis=0)
        # With one task "every task" and "one task only" are the same: call it specific.
        self.universal_ = (n_needing == n_tasks) & (n_tasks > 1)
        self.specific_ = self.needed_ & (n_needing == 1)
        return self

    def predict(self, masks: np.ndarray) -> np.ndarray:
        """Predicted effects of every mask, (n_masks, n_tasks), in the units of each task."""
        check_is_fitted(self)
        design = check_masks(masks)
        if design.shape[1] != self.n_features_in_:
            raise InputError(
                f"the masks have {design.shape[1]} heads but the fit had {self.n_features_in_}: "
                "give masks of the same model"
            )
        return design @ self.coef_.T + self.intercept_

    def top(self, k: int, task: int = 0) -> np.ndarray:
        """Flat indices of the ``k`` heads that one task needs most, best first.

        Ties go by ``residual_covariances_``, then by flat index, as in `HeadLasso.top`.

        Raises
        ------
        InputError
            For a ``k`` that is not from 1 to the number of heads, or a ``task`` that is none.
        """
        check_is_fitted(self)
        k = check_count("k", k, high=self.n_features_in_)
        task = check_count("task", task, low=0, high=len(self.coef_) - 1)
        return np.lexsort((self.residual_covariances_[task], self.coef_[task]))[:k]

    def roles(self, names: Sequence[str] | None = None) -> pd.DataFrame:
        """Which tasks need which head.

        Parameters
        ----------
        names : sequence of str, optional
            The tasks' names, in the order of the columns of ``effects``; ``task 0``, … by default.

        Returns
        -------
        DataFrame
            One row for every head that some task needs: ``head`` (flat index), ``role``
            (``universal``: every task needs it; ``specific``: one; ``shared``: some, not all),
            ``tasks`` (names of those that do), and the coefficient on each task under its name.
            Heads that more tasks need come first, then by the mean share of each task's largest.

        Raises
        ------
        InputError
            When there are not as many different names as tasks, or a name is that of a column.
        """
        check_is_fitted(self)
        n_tasks = len(self.coef_)
        names = [f"task {i}" for i in range(n_tasks)] if names is None else list(names)
        if len(set(names)) != n_tasks or len(names) != n_tasks:
            raise InputError(
                f"{len(names)} names for {n_tasks} tasks: give each its own, in the effects' order"
            )
        columns = ["head", "role", "tasks"]
        if set(names) & set(columns):
            raise InputError(f"a task is called like one of {', '.join(columns)}: rename it")
        largest = self.importances_.max(axis=1)
        lossy = largest > 0  # a task that needs no head has no share to speak of
        worth = (self.importances_[lossy] / largest[lossy, None]).sum(axis=0)
        n_needing = self.needed_.sum(axis=0)
        order = np.lexsort((-worth, -n_needing))[: np.count_nonzero(n_needing)]
        rows = []
        for head in order:
            role = "specific" if n_needing[head] == 1 else "shared"
            tasks = ", ".join(name for name, needs in zip(names, self.needed_[:, head]) if needs)
            role = "universal" if self.universal_[head] else role
            rows.append((int(head), role, tasks, *self.coef_[:, head].tolist()))
        return pd.DataFrame(rows, columns=columns + names)


def contrast(
    target: np.ndarray,
    controls: np.ndarray,
    weight: float = 1.0,
    tolerance: float = 0.0,
    units: Sequence[float] | None = None,
) -> np.ndarray:
    """Take the damage done to control tasks off the damage done to the target.

    What is left is negative where the target loses more than the controls do. Regressed on the
    masks (or ranked, for single heads) it locates heads that serve the target and not the controls.

    Parameters
    ----------
    target : array of float, shape (n,)
        Effects on the target: of masks, of single heads, or a fit's coefficients.
    controls : array of float, shape (n, n_controls)
        Effects of the same on the tasks that the heads should *not* serve.
    weight : float, default 1
        How much a control's loss counts; 0 gives the target alone. With 1, a head that costs target
        and controls the same is worth nothing.
    tolerance : float, default 0
        Loss of a control that is forgiven, in its units. Only what goes beyond counts.
    units : sequence of float, length 1 + n_controls, optional
        What counts as one, for the target and then each control; all 1 by default: nats are taken
        from nats. See the notes.

    Returns
    -------
    ndarray of float, shape (n,)
        ``target - weight * mean over controls of min(control + tolerance, 0)``, each divided by its
        units first.

    Raises
    ------
    InputError
        For arrays that do not go together or are not finite, a negative weight or tolerance, or
        units that are not positive.

    Notes
    -----
    *Gains.* A head that a control does better without is not rewarded for it: gains count as 0. In
    a mask of several heads one head's gain can still hide another's damage; where many heads bring
    gains, fit each task first and contrast the coefficients, for which the rule is exact.

    *Units.* A nat is a nat for every task (the answer became e times less likely), so nats are the
    default, as in the screened search. But a task whose answers are nearly certain, or long, has
    more to lose. If that matters, give what each task *can* lose: its intact mean score minus that
    of the same items with permuted answers; the result is in shares of it. The standard deviation
    of intact item scores is no good unit: it says how much items differ in difficulty.
    """
    target, controls = _check_contrast(target, controls)
    if not all(isinstance(v, Real) and 0 <= v < np.inf for v in (weight, tolerance)):
        raise InputError(
            f"weight is {weight!r} and tolerance {tolerance!r}: give finite numbers of 0 or more"
        )
    n = 1 + controls.shape[1]
    units = np.ones(n) if units is None else _as_floats(units)
    if units.shape != (n,) or not (np.isfinite(units) & (units > 0)).all():
        raise InputError(f"units are {units}: give {n} positive numbers, the target's first")
    losses = np.minimum(controls / units[1:] + tolerance, 0)
    return target / units[0] - weight * losses.mean(axis=1)


def _check_contrast(target: np.ndarray, controls: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both as finite floats, (n,) and (n, n_controls), or raise InputError."""
    target, controls = _as_floats(target), _as_floats(controls)
    if target.ndim != 1 or controls.ndim != 2 or len(controls) != len(target) or not controls.size:
        raise InputError(
            f"a target of shape {target.shape} does not go with controls of shape "
            f"{controls.shape}: give (n,) and (n, n_controls), with at least one control"
        )
    if not (np.isfinite(target).all() and np.isfinite(controls).all()):
        raise InputError("some effects are NaN or infinite: measure them again or drop them")
    return target, controls


def _as_floats(values: object) -> np.ndarray:
    try:
        return np.array(values, dtype=float)
    except (TypeError, ValueError) as error:
        raise InputError(f"the effects or units are no array of numbers: {error}") from error


def _check_tasks(effects: np.ndarray, n_masks: int) -> np.ndarray:
    """Return effects (n_masks, n_tasks) that a regression can learn from, or raise InputError."""
    effects = _as_floats(effects)
    if effects.ndim != 2 or len(effects) != n_masks or not effects.shape[1]:
        raise InputError(
            f"the effects have shape {effects.shape} but there are {n_masks} masks: "
            "give (n_masks, n_tasks), a column for every task"
        )
    if n_masks < 2:
        raise InputError("one mask cannot tell heads apart: measure at least two")
    if not np.isfinite(effects).all():
        raise InputError("some effects are NaN or infinite: measure again or drop those masks")
    still = np.ptp(effects, axis=0) <= 1e-12 * np.abs(effects).max(axis=0)
    if still.any():
        raise InputError(
            f"all masks have the same effect on task {np.flatnonzero(still)[0]} (counted from 0): "
            "drop that task, use larger masks, or log-probability instead of accuracy"
        )
    return effects
