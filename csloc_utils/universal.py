"""Universal heads: needed by every task, plain text included. Found, then confirmed one by one.

"Every task" is a demanding word. A head counts only when *each* task by itself shows that it needs
the head, so the evidence for a head is as good as its worst task: the largest of its p-values. A
bound on the share of false claims over all heads comes on top. Two routes lead to p-values:

- `mask_p_values`: the same random masks measured on several tasks, a head's column dealt anew;
- `single_p_values`: every head switched off alone, items as evidence.

Whoever is claimed is then switched off alone on items that did not choose it (`confirm_alone`), and
one can ask where such heads sit (`placement`). What their loss breaks is for
`csloc_utils.degeneration`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import stats

from csloc_utils.designs import as_generator, check_count, check_heads
from csloc_utils.discoveries import discoveries
from csloc_utils.errors import InputError
from csloc_utils.heads import Head, HeadGrid
from csloc_utils.intervals import bootstrap

if TYPE_CHECKING:
    from csloc_utils.measurements import Measurements, Scorer


@dataclass(frozen=True, eq=False)
class Active:
    """Which heads enough tasks need; the result of `active_heads`.

    Attributes
    ----------
    tasks : tuple of str
    p_values : float array (n_tasks, n_heads)
        Of each head on each task alone.
    combined : float array (n_heads,)
        Of "at least so many tasks need the head"; with all tasks, the largest of its p-values.
    adjusted : float array (n_heads,)
        The smallest level at which the head would be claimed.
    heads : list of int
        Flat indices of the claimed heads, smallest p-value first.
    at_least : int
        Tasks that must need the head.
    level : float
        False discovery rate asked for.
    """

    tasks: tuple[str, ...]
    p_values: np.ndarray
    combined: np.ndarray
    adjusted: np.ndarray
    heads: list[int]
    at_least: int
    level: float

    def table(self, grid: HeadGrid, n: int | None = None) -> pd.DataFrame:
        """The heads with the smallest combined p-values, the claimed ones by default.

        Columns: ``head``, ``layer``, ``kv_group``, ``claimed``, ``combined``, ``adjusted``,
        ``worst_task`` (that of the largest p-value), ``n_small`` (tasks with p at most 0.05).
        """
        order = np.argsort(self.combined, kind="stable")[: len(self.heads) if n is None else n]
        rows = []
        for flat in order:
            head, p = grid.head(int(flat)), self.p_values[:, flat]
            rows.append(
                {
                    "head": str(head),
                    "layer": head.layer,
                    "kv_group": grid.kv_group(head),
                    "claimed": bool(self.adjusted[flat] <= self.level),
                    "combined": float(self.combined[flat]),
                    "adjusted": float(self.adjusted[flat]),
                    "worst_task": self.tasks[int(p.argmax())],
                    "n_small": int((p <= 0.05).sum()),
                }
            )
        names = "head layer kv_group claimed combined adjusted worst_task n_small"
        return pd.DataFrame(rows, columns=names.split())


def active_heads(
    p_values: np.ndarray,
    tasks: Sequence[str],
    level: float = 0.1,
    at_least: int | None = None,
) -> Active:
    r"""Claim heads that all tasks, or at least so many of them, need.

    Parameters
    ----------
    p_values : float array, shape (n_tasks, n_heads)
        Of "this task does not need this head"; see `mask_p_values` and `single_p_values`.
    tasks : sequence of str
        Names, in the order of the rows.
    level : float, default 0.1
        False discovery rate over heads.
    at_least : int, optional
        Tasks that must need a head; all of them by default: a universal head.

    Returns
    -------
    Active

    Raises
    ------
    InputError
        For p-values of another shape or range, fewer than two tasks, names that do not go with
        them, or a count or level out of range.

    Notes
    -----
    The combined p-value for :math:`u` of :math:`T` tasks is :math:`(T-u+1)\,p_{(u)}` with
    :math:`p_{(u)}` the u-th smallest (Benjamini and Heller 2008, the Bonferroni form). For
    :math:`u = T` it is the largest p-value, the intersection-union test (Berger 1982). Both hold
    for tasks that depend on each other, as tasks measured on the same masks do. They are cautious:
    a head that one task does not need is claimed much less often than the level allows. Benjamini
    and Hochberg's rule over heads assumes independent or positively dependent tests.
    """
    p_values = np.asarray(p_values, dtype=float)
    names = tuple(tasks)
    if p_values.ndim != 2 or not p_values.size or not ((p_values >= 0) & (p_values <= 1)).all():
        raise InputError("give p-values from 0 to 1, shape (n_tasks, n_heads)")
    if len(names) != len(p_values) or len(set(names)) != len(names):
        raise InputError(
            f"{len(names)} names for {len(p_values)} tasks: give each its own, in the rows' order"
        )
    if len(names) < 2:
        raise InputError("one task cannot show that a head is universal: give two or more")
    if not 0 < level < 1:
        raise InputError(f"level is {level!r}: give a rate between 0 and 1, like 0.1")
    least = check_count("at_least", len(names) if at_least is None else at_least, 1, len(names))
    ordered = np.sort(p_values, axis=0)
    combined = np.minimum(1.0, (len(names) - least + 1) * ordered[least - 1])
    adjusted = stats.false_discovery_control(combined)
    order = np.argsort(combined, kind="stable")
    claimed = [int(head) for head in order if adjusted[head] <= level]
    return Active(names, p_values, combined, adjusted, claimed, least, level)


def mask_p_values(
    masks: np.ndarray, effects: np.ndarray, n_resamples: int = 10_000, seed: int = 0
) -> np.ndarray:
    """P-value of every head on every task, from the same random masks.

    Each head's ablations are dealt to other masks: an exact conditional randomization test, see
    `csloc_utils.discoveries.discoveries`. It asks whether the head does damage *on these items*,
    among random others that are off.

    Parameters
    ----------
    masks : bool array, shape (n_masks, n_heads)
        A Bernoulli design.
    effects : float array, shape (n_masks, n_tasks)
        score(ablated) - score(intact) of every mask on every task.
    n_resamples, seed : int
        As for `discoveries`.

    Returns
    -------
    float array, shape (n_tasks, n_heads)

    Raises
    ------
    InputError
        For effects of another shape, and as `discoveries` does.
    """
    effects = np.asarray(effects, dtype=float)
    if effects.ndim != 2 or len(effects) != len(masks) or not effects.shape[1]:
        raise InputError(
            f"the effects have shape {effects.shape} but there are {len(masks)} masks: "
            "give (n_masks, n_tasks)"
        )
    settings = {"n_resamples": n_resamples, "seed": seed}
    return np.array([discoveries(masks, column, **settings).p_values for column in effects.T])


def single_p_values(sweeps: Sequence[Measurements], score: str = "logprob") -> np.ndarray:
    """P-value of every head on every task, from switching each head off alone.

    A one-sided t-test that the mean drop over *facts* (items of a fact are averaged first) is above
    0. It asks whether the head alone does damage *on items like these*.

    Parameters
    ----------
    sweeps : sequence of Measurements
        One a task, of the same ``grid.single_masks()``, row h = head h alone.
    score : str, default "logprob"

    Returns
    -------
    float array, shape (n_tasks, n_heads)
        1 where a head changes no item; NaN-free.

    Raises
    ------
    InputError
        For masks other than every head alone, or fewer than two facts.
    """
    rows = []
    for sweep in sweeps:
        if not np.array_equal(sweep.masks, np.eye(sweep.grid.size, dtype=bool)):
            raise InputError("these are not the masks of every head alone: use grid.single_masks()")
        drops = -sweep.item_effects(score)
        _, fact = np.unique(sweep.facts, return_inverse=True)
        if fact.max() < 1:
            raise InputError("one fact shows no spread: measure items of two facts or more")
        sums = np.zeros((fact.max() + 1, len(drops)))
        np.add.at(sums, fact.reshape(-1), drops.T)
        means = sums / np.bincount(fact.reshape(-1))[:, None]
        spread = means.std(axis=0)
        moves = spread > 1e-12
        p = np.where(means.mean(axis=0) > 1e-12, 0.0, 1.0)  # the same for all facts
        if moves.any():
            tested = stats.ttest_1samp(means[:, moves], 0.0, axis=0, alternative="greater")
            p[moves] = tested.pvalue
        rows.append(p)
    return np.array(rows)


def confirm_alone(
    judges: Mapping[str, Scorer],
    heads: Sequence[Head],
    score: str = "logprob",
    confidence: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Switch each head off alone on every task.

    Parameters
    ----------
    judges : mapping of str to Evaluator
        The same model on *verify* items of every task.
    heads : sequence of Head
        Candidates.
    score : str, default "logprob"
    confidence, n_boot, seed
        Of the bootstrap over facts.

    Returns
    -------
    DataFrame
        A row a head and task: ``head``, ``task``, ``drop``, ``low``, ``high`` (positive = damage),
        ``needed`` (``low`` above 0), ``n_items``, ``n_facts``. A head is confirmed as universal
        when every task needs it (`confirmed`).

    Raises
    ------
    InputError
        When there is no task, or no head, or one outside the model.
    """
    grid = same_grid(judges)
    heads = check_heads(grid, heads)
    masks, rows = np.array([grid.mask([head]) for head in heads]), []
    for task, judge in judges.items():
        measured = judge.measure(masks, count=False)
        drops = -measured.item_effects(score)
        for head, items in zip(heads, drops):
            made = bootstrap(
                [(items, measured.facts)], n_boot=n_boot, confidence=confidence, seed=seed
            )
            rows.append(
                {
                    "head": str(head),
                    "task": task,
                    "drop": made.value,
                    "low": made.low,
                    "high": made.high,
                    "needed": made.low > 0,
                    "n_items": len(items),
                    "n_facts": len(np.unique(measured.facts)),
                }
            )
    return pd.DataFrame(rows)


def confirmed(alone: pd.DataFrame, at_least: int | None = None) -> list[str]:
    """Names of the heads that every task needs, or at least so many, by `confirm_alone`."""
    needing = alone.groupby("head", sort=False)["needed"].sum()
    least = alone["task"].nunique() if at_least is None else at_least
    return list(needing.index[needing >= least])


@dataclass(frozen=True)
class Placement:
    """Where heads sit, beside chance.

    Attributes
    ----------
    n_heads, n_early : int
        Heads, and those of them in the first `first_layers` layers.
    expected_early : float
        How many would sit there if heads were drawn blindly.
    p_early : float
        Chance that blind drawing gives at least as many (hypergeometric).
    first_layers : int
    n_sharing : int
        Pairs of the heads that share a key-value group.
    expected_sharing, p_sharing : float
        The mean number, and the chance of at least as many, when in each layer as many heads are
        drawn blindly; 1 where nothing can be drawn otherwise.
    """

    n_heads: int
    n_early: int
    expected_early: float
    p_early: float
    first_layers: int
    n_sharing: int
    expected_sharing: float
    p_sharing: float


def placement(
    grid: HeadGrid,
    heads: Sequence[Head],
    first_layers: int = 2,
    n_draws: int = 10_000,
    seed: int = 0,
) -> Placement:
    """Say whether heads sit early, and whether they share key-value groups more than by chance.

    Parameters
    ----------
    grid : HeadGrid
    heads : sequence of Head
    first_layers : int, default 2
        What "early" means; the paper speaks of layers 0 and 1.
    n_draws, seed : int
        Of the blind draws for the groups.
    """
    heads = check_heads(grid, heads)
    check_count("first_layers", first_layers, high=grid.n_layers)
    check_count("n_draws", n_draws)
    rng = as_generator(seed)
    early = sum(head.layer < first_layers for head in heads)
    pool = first_layers * grid.n_heads
    layers = np.bincount([head.layer for head in heads], minlength=grid.n_layers)
    group_of = np.array([grid.kv_group(Head(0, index)) for index in range(grid.n_heads)])
    drawn = np.zeros(n_draws, dtype=int)
    for n in layers[layers > 1]:
        picks = rng.random((n_draws, grid.n_heads)).argsort(axis=1)[:, :n]
        drawn += _pairs(group_of[picks], grid.n_kv_heads)
    sharing = sum(
        int(_pairs(np.array([[grid.kv_group(h) for h in heads if h.layer == layer]]), None)[0])
        for layer in np.flatnonzero(layers)
    )
    return Placement(
        n_heads=len(heads),
        n_early=early,
        expected_early=len(heads) * pool / grid.size,
        p_early=float(stats.hypergeom.sf(early - 1, grid.size, pool, len(heads))),
        first_layers=first_layers,
        n_sharing=sharing,
        expected_sharing=float(drawn.mean()),
        p_sharing=float((1 + np.count_nonzero(drawn >= sharing)) / (1 + n_draws)),
    )


def same_grid(judges: Mapping[str, Scorer]) -> HeadGrid:
    """Return the one grid of all evaluators, or raise `InputError`."""
    grids = [judge.grid for judge in judges.values()]
    if not grids:
        raise InputError("there is no task: give at least one evaluator")
    if any(grid != grids[0] for grid in grids):
        raise InputError("the tasks are measured on different models: use one model for all")
    return grids[0]


def _pairs(groups: np.ndarray, n_groups: int | None) -> np.ndarray:
    """Pairs in the same group, for every row of group numbers ``(n_rows, n)``."""
    n_groups = int(groups.max()) + 1 if n_groups is None else n_groups
    counts = (groups[:, :, None] == np.arange(n_groups)).sum(axis=1)
    return (counts * (counts - 1) // 2).sum(axis=1)
