"""Heads of every task, measured on every task: what is a task's own, and what many tasks share.

The heads found for one task are switched off and *all* tasks are scored: a matrix, "heads of A,
loss on B". A strong diagonal means heads of their own; a column that every row damages is a fragile
task; a row that damages every column holds universal heads. Each cell stands beside a band: what
random heads of the same layers cost the same task.

As in `csloc_utils.verify`, a *drop* is score(intact) - score(ablated), so positive = damage, on
items that did not choose the heads. Intervals are bootstraps over facts; they cover the choice of
facts, not the choice of heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from csloc_utils.designs import check_count, check_heads, layer_matched
from csloc_utils.errors import InputError
from csloc_utils.heads import Head, HeadGrid
from csloc_utils.intervals import bootstrap
from csloc_utils.verify import SCORES

if TYPE_CHECKING:
    from csloc_utils.measurements import Scorer

_ARRAYS = ("intact", "drops", "low", "high", "random")


@dataclass(frozen=True, eq=False)
class Atlas:
    """What ablating each head set does to each task.

    Dicts are keyed by score (``logprob`` in nats, ``accuracy`` from 0 to 1).

    Attributes
    ----------
    heads : dict of str to tuple of Head
        The head sets; those found for a task bear its name.
    tasks : tuple of str
        The tasks that were scored.
    intact : dict of str to float array (n_tasks,)
        Mean score of the intact model.
    drops, low, high : dict of str to float array (n_sets, n_tasks)
        Mean drop and its interval; positive = damage.
    random : dict of str to float array (n_sets, n_random, n_tasks)
        Mean drop under random heads from the layers of each set.
    random_heads : dict of str to list of tuple of Head
        Those random heads, by the name of the set they are matched to; they hold none of its heads,
        but may hold heads of another task.
    item_drops : dict of str to tuple of float array (n_sets, n_items)
        Drop of every item, an array a task.
    facts : tuple of str array (n_items,)
        Fact of every item, an array a task.
    settings : dict
        ``n_random``, ``seed``, ``n_boot`` and ``confidence``.
    provenance : dict
        Where each task's scores come from.
    """

    heads: dict[str, tuple[Head, ...]]
    tasks: tuple[str, ...]
    intact: dict[str, np.ndarray]
    drops: dict[str, np.ndarray]
    low: dict[str, np.ndarray]
    high: dict[str, np.ndarray]
    random: dict[str, np.ndarray]
    random_heads: dict[str, list[tuple[Head, ...]]]
    item_drops: dict[str, tuple[np.ndarray, ...]]
    facts: tuple[np.ndarray, ...]
    settings: dict[str, Any]
    provenance: dict[str, Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Atlas) and self.to_dict() == other.to_dict()

    @property
    def sets(self) -> tuple[str, ...]:
        """Names of the head sets, in the order of the arrays' rows."""
        return tuple(self.heads)

    @property
    def scores(self) -> tuple[str, ...]:
        """Scores that all tasks have."""
        return tuple(self.drops)

    @property
    def n_items(self) -> tuple[int, ...]:
        """Items of each task."""
        return tuple(map(len, self.facts))

    @property
    def n_facts(self) -> tuple[int, ...]:
        """Different facts of each task."""
        return tuple(len(np.unique(facts)) for facts in self.facts)

    @property
    def own(self) -> np.ndarray:
        """Whether a cell is a task under its own heads, bool ``(n_sets, n_tasks)``."""
        return np.array([[name == task for task in self.tasks] for name in self.heads])

    @property
    def resampling(self) -> dict[str, Any]:
        """Options of the bootstrap: ``seed``, ``n_boot`` and ``confidence``."""
        return {name: self.settings[name] for name in ("seed", "n_boot", "confidence")}

    def cell(self, score: str, a: int, b: int) -> tuple[np.ndarray, np.ndarray]:
        """Item drops of one cell, and the items' facts; both ``(n_items,)``."""
        return self.item_drops[score][b][a], self.facts[b]

    def check_score(self, score: str) -> str:
        """Return `score` if the atlas has it, or raise `InputError`."""
        if score not in self.scores:
            raise InputError(f"unknown score {score!r}: choose from {', '.join(self.scores)}")
        return score

    def band(self, score: str) -> tuple[np.ndarray, np.ndarray]:
        """Band of the random sets' drops, two arrays ``(n_sets, n_tasks)``; NaN without sets.

        Ends are draws, the outermost ones unless more than ``1 / (1 - confidence)`` sets were
        drawn: the lowest and highest that are still exceeded by at most that share of the sets.
        """
        draws, confidence = self.random[self.check_score(score)], self.settings["confidence"]
        if not draws.shape[1]:
            nothing = np.full(self.own.shape, np.nan)
            return nothing, nothing.copy()
        low = np.quantile(draws, 1 - confidence, axis=1, method="lower")
        return low, np.quantile(draws, confidence, axis=1, method="higher")

    def within(self, score: str) -> np.ndarray:
        """Whether a cell lies in the band of random heads, bool ``(n_sets, n_tasks)``."""
        low, high = self.band(score)
        return (low <= self.drops[score]) & (self.drops[score] <= high)

    def table(self) -> pd.DataFrame:
        """One row a head set, task and score.

        Columns: ``heads_of``, ``task``, ``own``, ``score``, ``n_items``, ``n_facts``, ``intact``,
        ``ablated``, ``drop``, ``low``, ``high``, and of the random sets ``random_mean``,
        ``random_low`` and ``random_high`` (see `band`), ``n_random`` and ``beats`` (share of them
        that do strictly less damage).
        """
        rows = []
        for score, drops in self.drops.items():
            draws, (band_low, band_high) = self.random[score], self.band(score)
            for (a, b), drop in np.ndenumerate(drops):
                intact, beside = self.intact[score][b], draws[a, :, b]
                rows.append(
                    {
                        "heads_of": self.sets[a],
                        "task": self.tasks[b],
                        "own": self.sets[a] == self.tasks[b],
                        "score": score,
                        "n_items": self.n_items[b],
                        "n_facts": self.n_facts[b],
                        "intact": intact,
                        "ablated": intact - drop,
                        "drop": drop,
                        "low": self.low[score][a, b],
                        "high": self.high[score][a, b],
                        "random_mean": beside.mean() if len(beside) else np.nan,
                        "random_low": band_low[a, b],
                        "random_high": band_high[a, b],
                        "n_random": len(beside),
                        "beats": (beside < drop).mean() if len(beside) else np.nan,
                    }
                )
        return pd.DataFrame(rows)

    def specificity(self) -> pd.DataFrame:
        """Own drop minus the mean drop of the other tasks, a row a task with heads of its own.

        Columns: ``task``, ``score``, ``own`` (drop), ``others`` (mean drop), ``specific`` (the
        difference), ``low``, ``high``. Tasks are resampled independently: where two ask about the
        same facts, the interval is on the wide side. Empty when there is one task.
        """
        columns = ["task", "score", "own", "others", "specific", "low", "high"]
        rows = []
        for score in self.scores:
            for a, b in np.argwhere(self.own):
                order = [b, *(other for other in range(len(self.tasks)) if other != b)]
                if len(order) == 1:
                    continue
                drops = self.drops[score][a, order]
                items = [self.cell(score, a, i) for i in order]
                made = bootstrap(items, _beyond, **self.resampling)
                ends = (made.value, made.low, made.high)
                rows.append((self.tasks[b], score, drops[0], drops[1:].mean(), *ends))
        return pd.DataFrame(rows, columns=columns)

    def only(self, tasks: Sequence[str]) -> Atlas:
        """Return the atlas of these tasks and of the head sets that bear their names.

        Nothing is computed anew: cells, intervals and random sets stay what they are.

        Raises
        ------
        InputError
            For a task that the atlas does not have, or none with heads of its own.
        """
        missing = [task for task in tasks if task not in self.tasks]
        if missing:
            raise InputError(f"no task {', '.join(missing)}: choose from {', '.join(self.tasks)}")
        kept = [name for name in tasks if name in self.heads]
        if not kept:
            raise InputError("none of these tasks has heads of its own: name one that has")
        rows, columns = [self.sets.index(n) for n in kept], [self.tasks.index(t) for t in tasks]

        def part(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {score: v[rows][..., columns] for score, v in values.items()}

        return replace(
            self,
            heads={name: self.heads[name] for name in kept},
            tasks=tuple(tasks),
            intact={score: v[columns] for score, v in self.intact.items()},
            **{name: part(getattr(self, name)) for name in _ARRAYS if name != "intact"},
            random_heads={name: self.random_heads[name] for name in kept},
            item_drops={s: tuple(v[b][rows] for b in columns) for s, v in self.item_drops.items()},
            facts=tuple(self.facts[b] for b in columns),
            provenance={task: self.provenance[task] for task in tasks if task in self.provenance},
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts, lists, strings and numbers, ready for JSON."""
        arrays = {
            name: {score: values.tolist() for score, values in getattr(self, name).items()}
            for name in _ARRAYS
        }
        return {
            "heads": {name: _names(heads) for name, heads in self.heads.items()},
            "tasks": list(self.tasks),
            **arrays,
            "random_heads": {n: [_names(s) for s in sets] for n, sets in self.random_heads.items()},
            "item_drops": {
                s: [v.tolist() for v in values] for s, values in self.item_drops.items()
            },
            "facts": [facts.tolist() for facts in self.facts],
            "settings": dict(self.settings),
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Atlas:
        """Rebuild an atlas from `to_dict`, also after a journey through JSON."""
        n_sets, n_tasks = len(data["heads"]), len(data["tasks"])
        arrays = {name: {s: np.array(v, float) for s, v in data[name].items()} for name in _ARRAYS}
        shape = (n_sets, data["settings"]["n_random"], n_tasks)
        arrays["random"] = {s: v.reshape(shape) for s, v in arrays["random"].items()}
        return cls(
            heads={name: _parse(heads) for name, heads in data["heads"].items()},
            tasks=tuple(data["tasks"]),
            random_heads={n: [_parse(s) for s in sets] for n, sets in data["random_heads"].items()},
            item_drops={
                score: tuple(np.array(v, float) for v in values)
                for score, values in data["item_drops"].items()
            },
            facts=tuple(np.array(facts) for facts in data["facts"]),
            settings=dict(data["settings"]),
            provenance=dict(data["provenance"]),
            **arrays,
        )


def atlas(
    judges: Mapping[str, Scorer],
    heads: Mapping[str, Sequence[Head]],
    n_random: int = 10,
    seed: int = 0,
    n_boot: int = 2000,
    confidence: float = 0.95,
) -> Atlas:
    """Ablate every head set and score every task.

    Costs ``n_sets * (1 + n_random)`` masks and the intact model on each task, in one call a task;
    they do not count as evaluations of a search.

    Parameters
    ----------
    judges : mapping of str to Evaluator
        The same model on *verify* items of each task; recorded and simulated ones serve as well.
    heads : mapping of str to sequence of Head
        Head sets; one found for a task bears that task's name. For other sets (a union, heads of
        another prompt) the atlas is a table of transfer.
    n_random : int, default 10
        Random head sets for each set; see `csloc_utils.designs.layer_matched`. They depend on the
        set and the seed alone, not on what else is in the atlas.
    seed : int, default 0
        Seed of the random sets and of the bootstrap.
    n_boot : int, default 2000
        Bootstrap resamples of facts.
    confidence : float, default 0.95
        Level of the intervals and of the random bands.

    Returns
    -------
    Atlas

    Raises
    ------
    InputError
        When there is no task or no head set; for heads that are missing, repeated, outside the
        model or more than half of it; for tasks on different models or without a common score; for
        counts or levels out of range. Nothing is measured then.
    """
    grid, scores, resampling = check_judges(judges, seed, n_boot, confidence)
    n_random = check_count("n_random", n_random, low=0)
    if not heads:
        raise InputError("there is no head set to switch off: give one a task")
    sets = {name: tuple(check_heads(grid, chosen)) for name, chosen in heads.items()}
    drawn = {name: layer_matched(grid, chosen, n_random, seed) for name, chosen in sets.items()}
    masks = np.vstack([*(grid.mask(chosen) for chosen in sets.values()), *drawn.values()])

    intact: dict[str, list] = {score: [] for score in scores}
    item_drops: dict[str, list] = {score: [] for score in scores}
    random: dict[str, list] = {score: [] for score in scores}
    facts, provenance = [], {}
    for task, judge in judges.items():
        measured = judge.measure(masks, count=False)
        facts.append(np.asarray(judge.facts))
        provenance[task] = getattr(measured, "provenance", {})
        for score in scores:
            drops = -measured.item_effects(score)
            intact[score].append(measured.baseline[score].mean())
            item_drops[score].append(drops[: len(sets)])
            random[score].append(drops[len(sets) :].mean(axis=1).reshape(len(sets), n_random))
    cells = {
        score: [[bootstrap([(row, f)], **resampling) for row in v] for v, f in zip(values, facts)]
        for score, values in item_drops.items()
    }
    return Atlas(
        heads=sets,
        tasks=tuple(judges),
        intact={score: np.array(values) for score, values in intact.items()},
        # One formula for located and random sets, so that equal item scores compare as a tie.
        drops={
            s: np.transpose([v.mean(axis=1) for v in values]) for s, values in item_drops.items()
        },
        low={s: np.array([[c.low for c in column] for column in v]).T for s, v in cells.items()},
        high={s: np.array([[c.high for c in column] for column in v]).T for s, v in cells.items()},
        random={score: np.stack(values, axis=2) for score, values in random.items()},
        random_heads={
            name: [tuple(grid.head(i) for i in np.flatnonzero(row)) for row in rows]
            for name, rows in drawn.items()
        },
        item_drops={score: tuple(values) for score, values in item_drops.items()},
        facts=tuple(facts),
        settings={"n_random": n_random, **resampling},
        provenance=provenance,
    )


def check_judges(
    judges: Mapping[str, Scorer], seed: int, n_boot: int, confidence: float
) -> tuple[HeadGrid, list[str], dict[str, Any]]:
    """Check what atlas and dose need; return grid, common scores and the bootstrap's options.

    Raises
    ------
    InputError
        Without tasks; for tasks on different models or without a common score; for a seed, number
        of resamples or level out of range.
    """
    if not judges:
        raise InputError("there is no task to score: give one or more evaluators by name")
    grid = next(iter(judges.values())).grid
    for name, judge in judges.items():
        if judge.grid != grid:
            raise InputError(f"task {name!r} runs on another model than the others: use one")
    scores = [s for s in SCORES if all(s in judge.scores for judge in judges.values())]
    if not scores:
        raise InputError("the tasks have no score in common: use tasks that are judged alike")
    if not 0 < confidence < 1:
        raise InputError(f"confidence is {confidence!r}: give a level between 0 and 1, like 0.95")
    seed, n_boot = check_count("seed", seed, low=0), check_count("n_boot", n_boot, low=2)
    return grid, scores, {"seed": seed, "n_boot": n_boot, "confidence": confidence}


def _beyond(own: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """Own drop minus the mean drop of the others."""
    return own - sum(others) / len(others)


def _names(heads: Sequence[Head]) -> list[str]:
    return [str(head) for head in heads]


def _parse(names: Sequence[str]) -> tuple[Head, ...]:
    return tuple(Head.parse(name) for name in names)
