"""Conditional screening: let the gradient name candidates, measure only those, and look again.

Greedy search measures every head in every round, to keep one. Here one backward pass, taken *with
the heads found so far off*, guesses what each other head would do, and only the few most promising
ones are measured. Looking again after every find is what catches backups: heads that do nothing
while the head they stand in for is there.

The guess is a slope, and slopes of an intact model mislead: the answer is so certain that the
log-probability is flat, and early heads act through many layers that bend on the way. So every
other round takes the slope with all heads weakened by a quarter: each of the two sees heads that
the other misses. The guess only orders the candidates; what is reported was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from csloc_utils.designs import check_count
from csloc_utils.errors import InputError
from csloc_utils.gradients import SMOOTH_SCORES
from csloc_utils.measurements import SLOPE_COST
from csloc_utils.search import SearchResult, check_budget, check_score, cost

if TYPE_CHECKING:
    from csloc_utils.measure import Evaluator, Measurements

# Heads measured in a round unless a budget says otherwise.
CANDIDATES = 5
# Keep-strength of all heads where slopes are taken, round after round.
STRENGTHS = (0.75, 1.0)


def default_budget(k: int, n_tasks: int = 1) -> int:
    """Evaluation-equivalents for ``k`` rounds of one backward pass and a few candidates."""
    return n_tasks * (1 + k * (SLOPE_COST + CANDIDATES))


def screened(
    evaluator: Evaluator,
    k: int = 5,
    budget: int | None = None,
    score: str = "logprob",
    contrast: Sequence[Evaluator] = (),
    strengths: Sequence[float] = STRENGTHS,
) -> SearchResult:
    """Find ``k`` heads that do much damage together, measuring a few candidates a round.

    Rows of the table: ``head``, ``effect`` (given the earlier ones), ``joint_effect`` (of all heads
    so far), ``accuracy_effect`` and ``joint_accuracy_effect`` likewise, ``predicted`` (the guess
    from the slope) and ``rank`` (its place among all heads by that guess). ``extra["rounds"]``
    holds, for every round, ``slopes`` (guesses for all heads, ``(n_heads,)``), ``candidates`` (flat
    indices, most promising first) and ``measurements``.

    Parameters
    ----------
    evaluator : Evaluator
        Model and items.
    k : int, default 5
        Heads to find.
    budget : int, optional
        Evaluation-equivalents, the baseline included; a backward pass takes two beside its forward.
        By default enough for five candidates a round. What is left after the passes is spent on
        candidates, evenly over the rounds.
    score : str, default "logprob"
        Score to lower. Where it has no slope (accuracy), candidates come from the log-probability.
    contrast : sequence of Evaluator, optional
        The same model on other tasks that the heads should *not* serve. A head then counts for what
        the target loses beyond what these lose on average; where they gain, that is no merit. Each
        costs as much again.
    strengths : sequence of float, default (0.75, 1)
        Keep-strength of all heads at which slopes are taken, in the first round, the second and so
        on, over again when there are more rounds.

    Raises
    ------
    InputError
        For a bad ``k`` or score, or a budget that is too small; no mask is measured then.
    """
    grid, n_tasks = evaluator.grid, 1 + len(contrast)
    k = check_count("k", k, high=grid.size)
    budget = default_budget(k, n_tasks) if budget is None else budget
    needed = n_tasks * cost("screened", grid.size, k)
    check_budget(
        budget, needed, f"screened search for {k} heads" + " beside controls" * (n_tasks > 1)
    )
    check_score(evaluator, score)
    for other in contrast:
        if other.grid != grid:
            raise InputError("a contrast task runs on another model than the target: use one")
    smooth = score if score in SMOOTH_SCORES else "logprob"
    spare = budget // n_tasks - 1 - SLOPE_COST * k
    shares = [min(spare // k + (i < spare % k), grid.size - i) for i in range(k)]

    found: list[int] = []
    table: list[dict[str, Any]] = []
    rounds: list[dict[str, Any]] = []
    joint, joint_accuracy, spent = 0.0, 0.0, 0
    for n_candidates, strength in zip(shares, cycle(strengths)):
        base = np.zeros((1, grid.size), bool)
        base[0, found] = True
        guesses = [e.slopes(base, strength, smooth).effects[0] for e in (evaluator, *contrast)]
        guess = _beyond(guesses[0], guesses[1:])
        guess[found] = np.inf
        ranked = np.argsort(guess, kind="stable")
        candidates = ranked[:n_candidates]
        masks = base.repeat(n_candidates, axis=0)
        masks[np.arange(n_candidates), candidates] = True
        measured = evaluator.measure(masks)
        others = [e.measure(masks) for e in contrast]
        row = _worst(measured, others, score)
        effect, accuracy = measured.effects(score)[row], measured.effects("accuracy")[row]
        head = int(candidates[row])
        table.append(
            {
                "head": str(grid.head(head)),
                "effect": float(effect - joint),
                "joint_effect": float(effect),
                "accuracy_effect": float(accuracy - joint_accuracy),
                "joint_accuracy_effect": float(accuracy),
                "predicted": float(guesses[0][head]),
                "rank": row + 1,
            }
        )
        rounds.append({"slopes": guess, "candidates": candidates, "measurements": measured})
        found.append(head)
        joint, joint_accuracy = effect, accuracy
        spent += n_candidates
    evaluations = {
        "forward": n_tasks * (1 + k + spent),
        "backward": n_tasks * k,
        "equivalents": n_tasks * (1 + SLOPE_COST * k + spent),
    }
    heads = [grid.head(i) for i in found]
    return SearchResult(
        "screened", heads, table, k, evaluations, {"rounds": rounds, "score": score}
    )


def _beyond(target: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    """Return the target's effects less the mean damage of the others; a gain of theirs counts 0."""
    if not others:
        return target.copy()
    return target - np.minimum(others, 0).mean(axis=0)


def _worst(measured: Measurements, others: Sequence[Measurements], score: str) -> int:
    """Row of most damage beyond that of the others; ties by log-probability."""
    beyond = [
        _beyond(measured.effects(s), [m.effects(s) for m in others]) for s in (score, "logprob")
    ]
    return int(np.lexsort(beyond[::-1])[0])
