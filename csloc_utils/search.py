"""Search for the heads of a capability: one at a time, greedily, or from a few random masks.

Three searches with the same result type:

- :func:`sweep` ablates every head alone: the *single* effect of each, for ``N + 1`` evaluations;
- :func:`greedy` looks for a *set* that does most damage together: the worst head given those
  already found, ``k`` times, for about ``N * k`` evaluations;
- :func:`paper` measures random masks and regresses: an estimate of the single effects, for as many
  evaluations as you like.

An evaluation is one mask scored on the items. Every mask asked for counts, whether or not a store
already holds it, and so does the intact baseline. A budget of 150 is one baseline and 149 masks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from csloc_utils.designs import bernoulli, check_count, stratified
from csloc_utils.errors import InputError
from csloc_utils.heads import Head
from csloc_utils.recovery import HeadLasso

if TYPE_CHECKING:
    from csloc_utils.measure import Evaluator, Measurements

METHODS = ("screened", "paper", "sweep", "race", "greedy")
DESIGNS = ("stratified", "bernoulli")

# Share of the heads in a mask when no size is given: the example of the paper's code.
_SHARE = 0.02


@dataclass
class SearchResult:
    """What a search found.

    Attributes
    ----------
    method : str
        ``"sweep"``, ``"race"``, ``"greedy"``, ``"paper"``, ``"screened"`` or ``"fused"``.
    heads : list of Head
        Most important first. All heads for a sweep; the chosen ``k`` otherwise. Greedy's order is
        the order of choice.
    table : list of dict
        One row a head, in the order of ``heads``. Always ``head`` (its name), ``effect`` (in the
        units of the score, negative = needed) and ``accuracy_effect``; see the searches for the
        other columns.
    k : int
        How many heads were asked for; ``found`` is that many.
    evaluations : dict
        ``forward``, ``backward`` and ``equivalents``, the baseline included.
    extra : dict
        What the search measured and fitted, for figures and further analysis; not JSON.
    """

    method: str
    heads: list[Head]
    table: list[dict[str, Any]]
    k: int
    evaluations: dict[str, int]
    extra: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def found(self) -> list[Head]:
        """The ``k`` most important heads."""
        return self.heads[: self.k]


def cost(method: str, n_heads: int, k: int) -> int:
    """Evaluation-equivalents of a search; the fewest possible where a budget decides."""
    if method not in METHODS:
        raise InputError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
    masks = {
        "sweep": n_heads,
        "greedy": k * n_heads - k * (k - 1) // 2,
        "paper": 2,
        "race": 1,  # at least, and less than a sweep; items decide
        "screened": 4 * k,  # a backward pass and one candidate a round
    }
    return 1 + masks[method]


def check(
    method: str,
    n_heads: int,
    k: int,
    budget: int | None = None,
    size: int | None = None,
    design: str = "stratified",
    seed: int = 0,
    n_tasks: int = 1,
) -> None:
    """Raise `InputError` for a search that could not run, before there is a model.

    Parameters are those of the searches; `n_heads` is the number of heads in the model, `n_tasks`
    the number of tasks on which every mask is measured.
    """
    highest = n_heads - (method == "race")  # a race of all for all places is none
    needed = n_tasks * cost(method, n_heads, check_count("k", k, high=highest))
    if method == "paper":
        _paper_masks(n_heads, k, budget, size, design, seed)
    else:
        check_budget(budget, needed, method)


def default_size(n_heads: int) -> int:
    """Heads in a mask when none is given: 2 % of all heads, at least one."""
    return max(1, round(_SHARE * n_heads))


def sweep(
    evaluator: Evaluator, score: str = "logprob", k: int | None = None, budget: int | None = None
) -> SearchResult:
    """Ablate every head alone and sort all heads by the damage.

    Rows of the table: ``head``, ``effect`` (of ablating this head alone, mean over items) and
    ``accuracy_effect``. Heads of equal effect are ordered by their log-probability effect, then by
    position. ``extra["measurements"]`` holds the masks and item scores.

    Parameters
    ----------
    evaluator : Evaluator
        Model and items.
    score : str, default "logprob"
        Score to sort by.
    k : int, optional
        How many heads ``SearchResult.found`` names; all by default. Does not change what is
        measured.
    budget : int, optional
        Upper limit on evaluations; a sweep takes ``N + 1``.

    Raises
    ------
    InputError
        For a bad ``k`` or score, or a budget that is too small; no mask is measured then.
    """
    grid = evaluator.grid
    k = grid.size if k is None else check_count("k", k, high=grid.size)
    check_budget(budget, cost("sweep", grid.size, k), "a sweep")
    check_score(evaluator, score)
    measured = evaluator.measure(grid.single_masks())
    effects, accuracy = measured.effects(score), measured.effects("accuracy")
    order = _worst_first(measured, score)
    table = [
        {
            "head": str(grid.head(i)),
            "effect": float(effects[i]),
            "accuracy_effect": float(accuracy[i]),
        }
        for i in order
    ]
    heads = [grid.head(i) for i in order]
    extra = {"measurements": measured, "score": score}
    return SearchResult("sweep", heads, table, k, _evaluations(grid.size), extra)


def greedy(
    evaluator: Evaluator, k: int, score: str = "logprob", budget: int | None = None
) -> SearchResult:
    """Find ``k`` heads that do much damage together: the worst head given those found, ``k`` times.

    Each round ablates the found heads plus one other, for every other head, and keeps the one with
    the lowest score; what was found is never dropped again. Backup heads, which matter only once
    another head is off, are found this way and missed by a sweep. Ties go to the lower
    log-probability, then to the first position. There is no early stop: when no head lowers the
    score any further, the round keeps the one that raises it least, and its row shows an ``effect``
    that is not negative.

    Rows of the table: ``head``, ``effect`` (given the earlier ones), ``joint_effect`` (of all heads
    so far), ``single_effect`` (alone, from the first round), and ``accuracy_effect`` and
    ``joint_accuracy_effect`` likewise. ``extra["rounds"]`` holds the measurements of every round.

    Parameters
    ----------
    evaluator : Evaluator
        Model and items.
    k : int
        Heads to find.
    score : str, default "logprob"
        Score to lower.
    budget : int, optional
        Upper limit on evaluations; greedy takes ``1 + N + (N - 1) + …``, ``k`` rounds.

    Raises
    ------
    InputError
        For a bad ``k`` or score, or a budget that is too small; no mask is measured then.
    """
    grid = evaluator.grid
    k = check_count("k", k, high=grid.size)
    check_budget(budget, cost("greedy", grid.size, k), f"greedy search for {k} heads")
    check_score(evaluator, score)
    found: list[int] = []
    rounds: list[Measurements] = []
    table: list[dict[str, Any]] = []
    joint, joint_accuracy = 0.0, 0.0
    for _ in range(k):
        rest = np.array([i for i in range(grid.size) if i not in found])
        masks = np.zeros((len(rest), grid.size), dtype=bool)
        masks[:, found] = True
        masks[np.arange(len(rest)), rest] = True
        measured = evaluator.measure(masks)
        rounds.append(measured)
        row = _worst_first(measured, score)[0]
        head = int(rest[row])
        effect, accuracy = measured.effects(score)[row], measured.effects("accuracy")[row]
        table.append(
            {
                "head": str(grid.head(head)),
                "effect": float(effect - joint),
                "joint_effect": float(effect),
                "single_effect": float(rounds[0].effects(score)[head]),
                "accuracy_effect": float(accuracy - joint_accuracy),
                "joint_accuracy_effect": float(accuracy),
            }
        )
        found.append(head)
        joint, joint_accuracy = effect, accuracy
    heads = [grid.head(i) for i in found]
    evaluations = _evaluations(sum(len(measured.masks) for measured in rounds))
    extra = {"rounds": rounds, "score": score}
    return SearchResult("greedy", heads, table, k, evaluations, extra)


def paper(
    evaluator: Evaluator,
    k: int,
    budget: int,
    size: int | None = None,
    design: str = "stratified",
    seed: int = 0,
    score: str = "logprob",
) -> SearchResult:
    """The paper's search: random masks, a Lasso, the ``k`` most negative coefficients.

    Rows of the table: ``head``, ``effect`` (the coefficient, in the units of the score; the Lasso
    shrinks it towards zero), ``coef`` (the same number under the regression's name), ``selected``
    (whether it is negative: a head that is not only fills up the ``k``), ``n_masks`` (how many
    masks had the head off), ``aliases`` (other heads that were off in exactly the same masks, which
    no regression can tell from it: in a stratified design every head has some until there are more
    than ``N / size`` masks) and ``accuracy_effect`` (the coefficient when accuracy is regressed
    instead; ``None`` when accuracy never moved). ``extra`` holds ``measurements``, the fitted
    ``estimator``, ``effects`` of the masks, ``size``, ``design`` and ``never_ablated`` (heads that
    no mask had off and nothing is known about).

    Parameters
    ----------
    evaluator : Evaluator
        Model and items.
    k : int
        Heads to name.
    budget : int
        Evaluations: one for the intact baseline, the rest are masks.
    size : int, optional
        Heads in a mask (expected number for the Bernoulli design). By default 2 % of all heads, the
        example of the paper's code: five of 270.
    design : {"stratified", "bernoulli"}
        The paper calls them CSS and CSB.
    seed : int, default 0
        Seed of the masks. A larger budget with the same seed adds masks to the same ones.
    score : str, default "logprob"
        Score to regress. The paper uses accuracy.

    Raises
    ------
    InputError
        For a bad ``k``, size, design, seed or score, or a budget too small to fit or to ablate
        ``k`` different heads, before any mask is measured; for masks that all have the same effect,
        after.
    """
    grid = evaluator.grid
    k = check_count("k", k, high=grid.size)
    masks, size = _paper_masks(grid.size, k, budget, size, design, seed)
    n_masks = masks.sum(axis=0)
    check_score(evaluator, score)
    measured = evaluator.measure(masks)
    effects = measured.effects(score)
    estimator = HeadLasso().fit(masks, effects)
    accuracy = _accuracy_coefficients(masks, measured.effects("accuracy"))
    ranked = estimator.top(grid.size)
    # Nothing is known of a head that no mask had off: it comes after all others.
    order = ranked[np.argsort(n_masks[ranked] == 0, kind="stable")][:k]
    table = [
        {
            "head": str(grid.head(i)),
            "effect": float(estimator.coef_[i]),
            "coef": float(estimator.coef_[i]),
            "selected": bool(estimator.coef_[i] < 0),
            "n_masks": int(n_masks[i]),
            "aliases": [str(grid.head(j)) for j in _aliases(masks, i)],
            "accuracy_effect": None if accuracy is None else float(accuracy[i]),
        }
        for i in order
    ]
    extra = {
        "measurements": measured,
        "effects": effects,
        "estimator": estimator,
        "design": design,
        "size": size,
        "score": score,
        "never_ablated": [grid.head(i) for i in np.flatnonzero(n_masks == 0)],
    }
    heads = [grid.head(i) for i in order]
    return SearchResult("paper", heads, table, k, _evaluations(len(masks)), extra)


def _paper_masks(
    n_heads: int, k: int, budget: int | None, size: int | None, design: str, seed: int
) -> tuple[np.ndarray, int]:
    """Draw the masks of :func:`paper` and check that they can name ``k`` heads."""
    budget = check_count("budget", budget, low=0)
    check_budget(budget, cost("paper", n_heads, k), "a regression")
    size = default_size(n_heads) if size is None else size
    size = check_count("mask size", size, high=n_heads)
    masks = _draw(design, budget - 1, n_heads, size, check_count("seed", seed, low=0))
    seen = np.count_nonzero(masks.any(axis=0))
    if k > seen:
        raise InputError(
            f"{len(masks)} masks of {size} heads ablate only {seen} different heads, "
            f"fewer than k = {k}: raise the budget or the mask size"
        )
    return masks, size


def _draw(design: str, n_masks: int, n_heads: int, size: int, seed: int) -> np.ndarray:
    """Masks of the named design with ``size`` heads each (on average)."""
    if design == "stratified":
        return stratified(n_masks, n_heads, size, seed)
    if design == "bernoulli":
        return bernoulli(n_masks, n_heads, size / n_heads, seed)
    raise InputError(f"unknown design {design!r}: choose one of {', '.join(DESIGNS)}")


def _worst_first(measured: Measurements, score: str) -> np.ndarray:
    """Rows by effect, most negative first; ties by log-probability, then in the order given."""
    tie = "logprob" if "logprob" in measured.scores else score
    return np.lexsort((measured.effects(tie), measured.effects(score)))


def _aliases(masks: np.ndarray, head: int) -> np.ndarray:
    """Heads with the same column as ``head``."""
    same = (masks == masks[:, [head]]).all(axis=0)
    return np.setdiff1d(np.flatnonzero(same), [head])


def _accuracy_coefficients(masks: np.ndarray, effects: np.ndarray) -> np.ndarray | None:
    """Coefficients for accuracy, at no further evaluation; None when it never moved."""
    return HeadLasso().fit(masks, effects).coef_ if np.ptp(effects) > 0 else None


def _evaluations(n_masks: int) -> dict[str, int]:
    """Cost of ``n_masks`` masks and the baseline, forward passes only."""
    return {"forward": n_masks + 1, "backward": 0, "equivalents": n_masks + 1}


def check_budget(budget: int | None, needed: int, what: str) -> None:
    """Raise `InputError` if a search that takes `needed` evaluations is given fewer."""
    if budget is None:
        return
    if check_count("budget", budget, low=0) < needed:
        raise InputError(
            f"a budget of {budget} is too small: {what} takes at least {needed} evaluations, "
            "the intact baseline included"
        )


def check_score(evaluator: Evaluator, score: str) -> None:
    """Raise `InputError` for a score that the evaluator's task does not have."""
    if score not in evaluator.scores:
        raise InputError(f"unknown score {score!r}: this task has {', '.join(evaluator.scores)}")
