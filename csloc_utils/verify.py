"""Are these really the heads? A check on items that did not choose them.

A set of heads is ablated on held-out items of the target task, next to two comparisons. *Random
heads* from the same layers show what losing any such heads costs: layers differ, and early heads
hurt everything. *Control tasks* show what else is lost: a head that breaks everything is not a head
for this capability. What remains is the *specific damage*, the target's drop minus the mean drop of
the controls.

Here everything is a **drop**, score(intact) - score(ablated), so positive = damage. (An effect, as
the searches report it, has the opposite sign.) Intervals are percentile bootstraps over *facts*:
items that ask for the same fact move together and are no independent evidence. They cover the
choice of facts, not the choice of heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from csloc_utils.designs import check_count, check_heads, layer_matched
from csloc_utils.errors import InputError
from csloc_utils.heads import Head
from csloc_utils.intervals import Interval, bootstrap

if TYPE_CHECKING:
    from csloc_utils.measure import Evaluator

SCORES = ("logprob", "accuracy")


@dataclass(frozen=True)
class Drop:
    """Mean score intact and ablated, and the drop with its interval (positive = damage)."""

    intact: float
    ablated: float
    drop: float
    low: float
    high: float


@dataclass(frozen=True)
class Damage:
    """What ablating the heads, and random heads instead, does to one task.

    Attributes
    ----------
    task : str
        Name of the task.
    n_items, n_facts : int
        Items scored, and different facts among them.
    drops : dict of str to Drop
        Per score.
    random : dict of str to ndarray, shape (n_draws,)
        Drop under every random head set, per score.
    """

    task: str
    n_items: int
    n_facts: int
    drops: dict[str, Drop]
    random: dict[str, np.ndarray]

    @property
    def n_random(self) -> int:
        """Number of random head sets."""
        return len(next(iter(self.random.values())))

    def beaten(self, score: str) -> int:
        """How many random sets do strictly less damage; a tie is not beaten."""
        return int((self.random[score] < self.drops[score].drop).sum())

    def beats(self, score: str) -> float | None:
        """Share of random sets that do strictly less damage; None without random sets."""
        return self.beaten(score) / self.n_random if self.n_random else None

    def p_value(self, score: str) -> float:
        """Chance of so much damage from random heads: (1 + sets at least as damaging) / (1 + sets).

        Monte Carlo p-value that counts the located set as one of the draws, hence never 0 (Davison
        and Hinkley 1997, section 4.2).
        """
        return (1 + self.n_random - self.beaten(score)) / (1 + self.n_random)


@dataclass(frozen=True)
class HeadDrop:
    """What one located head costs the target on items that did not choose it.

    In log-probability; in accuracy where answers are written.

    Attributes
    ----------
    head : str
    single : Interval
        Drop when this head alone is off.
    given_others : Interval
        Drop when it is off in addition to all other located heads.
    """

    head: str
    single: Interval
    given_others: Interval


@dataclass(frozen=True)
class Verification:
    """The result of :func:`verify`.

    Attributes
    ----------
    heads : tuple of Head
        The heads that were checked.
    target : Damage
        Damage to the target task.
    controls : dict of str to Damage
        Damage to each control task, by the name it was given.
    specific : dict of str to Interval, or None
        Target drop minus mean control drop, per score; None without controls.
    random_heads : list of list of Head
        The random head sets; controls use the first of them.
    settings : dict
        ``seed``, ``n_boot`` and ``confidence``.
    each : tuple of HeadDrop
        One a located head. Alone and beside the others are two questions: a backup does nothing
        alone, and of two heads in a row the second adds nothing.
    """

    heads: tuple[Head, ...]
    target: Damage
    controls: dict[str, Damage]
    specific: dict[str, Interval] | None
    random_heads: list[list[Head]]
    settings: dict[str, Any]
    each: tuple[HeadDrop, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts, lists, strings and numbers, ready for JSON."""
        sets = [[str(head) for head in heads] for heads in self.random_heads]
        random = _random_to_dict(self.target)
        random["n_distinct"] = len({tuple(heads) for heads in sets})
        random["rule"] = "as many random heads of the same layers, none of them located"
        random["heads"] = sets
        specific = self.specific
        return {
            "heads": [str(head) for head in self.heads],
            "target": _damage_to_dict(self.target),
            "random": random,
            "controls": {
                name: {**_damage_to_dict(control), "random": _random_to_dict(control)}
                for name, control in self.controls.items()
            },
            "specific": specific and {score: asdict(specific[score]) for score in specific},
            "each": [asdict(head) for head in self.each],
            "settings": dict(self.settings),
        }

    def table(self) -> pd.DataFrame:
        """One row a task and score.

        Columns: ``task``, ``role`` (target or control), ``score``, ``intact``, ``ablated``,
        ``drop``, ``low``, ``high``, ``random_mean`` and ``random_max`` (drop under the random
        sets), ``n_random`` and ``beats`` (share of them that do less damage).
        """
        damages = [("target", self.target.task, self.target)]
        damages += [("control", name, control) for name, control in self.controls.items()]
        rows = []
        for role, name, damage in damages:
            for score, drop in damage.drops.items():
                draws = damage.random[score]
                row = {"task": name, "role": role, "score": score, **asdict(drop)}
                row["random_mean"] = draws.mean() if len(draws) else np.nan
                row["random_max"] = draws.max() if len(draws) else np.nan
                row["n_random"] = len(draws)
                row["beats"] = damage.beats(score) if len(draws) else np.nan
                rows.append(row)
        return pd.DataFrame(rows)


def verify(
    target: Evaluator,
    heads: Sequence[Head],
    controls: Mapping[str, Evaluator] | None = None,
    n_random: int = 100,
    n_random_control: int = 10,
    seed: int = 0,
    n_boot: int = 2000,
    confidence: float = 0.95,
) -> Verification:
    """Check a set of heads on held-out items, beside random heads and control tasks.

    Parameters
    ----------
    target : Evaluator
        Model and *verify* items of the capability.
    heads : sequence of Head
        The set to check; ablated together.
    controls : mapping of str to Evaluator, optional
        The same model on items of other tasks.
    n_random, n_random_control : int, default 100 and 10
        Random head sets on the target and on each control; see
        :func:`csloc_utils.designs.layer_matched`. The controls use the first of the target's sets,
        so ``n_random_control`` is cut to ``n_random``.
    seed : int, default 0
        Seed of the random sets and of the bootstrap.
    n_boot : int, default 2000
        Bootstrap resamples of facts.
    confidence : float, default 0.95
        Level of the intervals.

    Returns
    -------
    Verification

    Raises
    ------
    InputError
        For heads that are missing, repeated, outside the model or more than half of it; for counts,
        seed or confidence out of range; for a control on another head grid.

    Notes
    -----
    These evaluations are not counted as the cost of a search. Where all facts agree, an interval
    has width zero: that says nothing about other facts. For the specific damage, tasks are
    resampled independently; when a control asks about the target's own facts, its interval is on
    the wide side.
    """
    controls = dict(controls or {})
    heads = check_heads(target.grid, heads)
    n_random = check_count("n_random", n_random, low=0)
    n_random_control = check_count("n_random_control", n_random_control, low=0)
    n_boot = check_count("n_boot", n_boot, low=2)
    seed = check_count("seed", seed, low=0)
    if not 0 < confidence < 1:
        raise InputError(f"confidence is {confidence!r}: give a level between 0 and 1, like 0.95")
    for name, control in controls.items():
        if control.grid != target.grid:
            raise InputError(
                f"control task {name!r} runs on another model than the target: use one"
            )
    scores = [s for s in SCORES if all(s in e.scores for e in (target, *controls.values()))]
    sets = layer_matched(target.grid, heads, n_random, seed)
    located = target.grid.mask(heads)
    resampling = {"n_boot": n_boot, "confidence": confidence, "seed": seed}

    task = getattr(getattr(target, "task", None), "name", "target")
    on_target, target_items = _damage(task, target, located, sets, resampling)
    on_controls, items = {}, [target_items]
    for name, control in controls.items():
        on_controls[name], control_items = _damage(
            name, control, located, sets[:n_random_control], resampling
        )
        items.append(control_items)
    specific = None
    if controls:
        specific = {
            score: bootstrap([task_items[score] for task_items in items], _contrast, **resampling)
            for score in scores
        }
    random_heads = [[target.grid.head(i) for i in np.flatnonzero(row)] for row in sets]
    each = _one_by_one(target, heads, resampling)
    return Verification(
        tuple(heads), on_target, on_controls, specific, random_heads, dict(resampling), each
    )


def _one_by_one(target: Evaluator, heads: Sequence[Head], resampling: dict) -> tuple[HeadDrop, ...]:
    """Measure every head alone, and the set without it beside the whole set."""
    grid = target.grid
    whole = grid.mask(heads)
    alone = np.array([grid.mask([head]) for head in heads])
    score = next(score for score in SCORES if score in target.scores)
    masks = np.vstack([whole, alone, whole & ~alone])
    effects = target.measure(masks, count=False).item_effects(score)
    singles, without = effects[1 : len(heads) + 1], effects[len(heads) + 1 :]
    facts = np.asarray(target.facts)
    return tuple(
        HeadDrop(
            str(head),
            bootstrap([(-single, facts)], **resampling),
            bootstrap([(rest - effects[0], facts)], **resampling),
        )
        for head, single, rest in zip(heads, singles, without, strict=True)
    )


def _contrast(target: np.ndarray, *controls: np.ndarray) -> np.ndarray:
    """Specific damage: the target's drop minus the mean drop of the controls."""
    return target - sum(controls) / len(controls)


def _damage(
    task: str, evaluator: Evaluator, located: np.ndarray, sets: np.ndarray, resampling: dict
) -> tuple[Damage, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Measure the located set and the random ones; also give the located set's item drops."""
    # Sets that coincide (few heads in a layer) are measured once.
    distinct, which = np.unique(sets, axis=0, return_inverse=True)
    measured = evaluator.measure(np.vstack([located, distinct]), count=False)
    facts = np.asarray(evaluator.facts)
    drops, random, items = {}, {}, {}
    for score in (score for score in SCORES if score in evaluator.scores):
        item_drops = -measured.item_effects(score)
        items[score] = (item_drops[0], facts)
        interval = bootstrap([items[score]], **resampling)
        intact = float(np.mean(measured.baseline[score]))
        ablated = float(np.mean(measured.scores[score][0]))
        # One formula for located and random sets, so that equal item scores compare as a tie.
        means = item_drops.mean(axis=1)
        drops[score] = Drop(intact, ablated, float(means[0]), interval.low, interval.high)
        random[score] = means[1:][which.reshape(-1)]
    return Damage(task, len(facts), len(np.unique(facts)), drops, random), items


def _damage_to_dict(damage: Damage) -> dict[str, Any]:
    scores = {score: asdict(drop) for score, drop in damage.drops.items()}
    return {"task": damage.task, "n_items": damage.n_items, "n_facts": damage.n_facts, **scores}


def _random_to_dict(damage: Damage) -> dict[str, Any]:
    """Summary of the random draws, and how the located set compares with them."""
    if not damage.n_random:
        return {"n": 0}
    result: dict[str, Any] = {"n": damage.n_random}
    for score, draws in damage.random.items():
        result[score] = {
            "mean": float(draws.mean()),
            "max": float(draws.max()),
            "beaten": damage.beaten(score),
            "beats": damage.beats(score),
            "p_value": damage.p_value(score),
            "drops": [float(drop) for drop in draws],
        }
    return result
