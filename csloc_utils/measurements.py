"""Measured scores: masks × items, beside the intact model's; and what they cost."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from csloc_utils.errors import InputError
from csloc_utils.heads import HeadGrid


@dataclass
class Measurements:
    """Scores of masks on items.

    Attributes
    ----------
    grid : HeadGrid
    masks : bool array (n_masks, n_heads)
        True = ablated.
    scores : dict of str to float array (n_masks, n_items)
        ``logprob`` in nats, ``accuracy`` from 0 to 1; see `csloc_utils.scoring.combine`.
    intact : dict of str to float array (n_masks, n_items)
        The intact model's scores, measured in each mask's own chunk shape.
    facts : str array (n_items,)
        Items with the same fact are not independent.
    provenance : dict
        Model, task, ablation, chunk shapes, versions, date.
    """

    grid: HeadGrid
    masks: np.ndarray
    scores: dict[str, np.ndarray]
    intact: dict[str, np.ndarray]
    facts: np.ndarray
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def baseline(self) -> dict[str, np.ndarray]:
        """The intact model's item scores, ``(n_items,)`` each."""
        return {name: values[-1] for name, values in self.intact.items()}

    def item_effects(self, score: str = "logprob") -> np.ndarray:
        """Return score(ablated) − score(intact) for every mask and item, ``(n_masks, n_items)``."""
        if score not in self.scores:
            raise InputError(f"unknown score {score!r}: choose from {', '.join(self.scores)}")
        return self.scores[score] - self.intact[score]

    def effects(self, score: str = "logprob") -> np.ndarray:
        """Return each mask's mean effect over items, ``(n_masks,)``; negative = damage."""
        return self.item_effects(score).mean(axis=1)

    def frame(self) -> pd.DataFrame:
        """Return a tidy frame: one row per mask and item.

        Columns: ``mask`` (its number), ``heads`` (names, comma-separated), ``item``, ``fact``,
        every score, and every score's ``<score>_intact``. Provenance stands in ``attrs``.
        """
        n_masks, n_items = next(iter(self.scores.values())).shape
        names = [",".join(str(self.grid.head(i)) for i in np.flatnonzero(m)) for m in self.masks]
        columns: dict[str, Any] = {
            "mask": np.repeat(np.arange(n_masks), n_items),
            "heads": np.repeat(np.array(names, dtype=object), n_items),
            "item": np.tile(np.arange(n_items), n_masks),
            "fact": np.tile(self.facts, n_masks),
        }
        for name, values in self.scores.items():
            columns[name] = values.ravel()
            columns[f"{name}_intact"] = self.intact[name].ravel()
        frame = pd.DataFrame(columns)
        frame.attrs["provenance"] = self.provenance
        return frame

    @classmethod
    def from_frame(cls, frame: pd.DataFrame, grid: HeadGrid) -> Measurements:
        """Rebuild measurements from `frame`."""
        frame = frame.sort_values(["mask", "item"])
        first = frame.drop_duplicates("mask")
        masks = [grid.mask(grid.parse(h) if h else []) for h in first["heads"].fillna("")]
        names = [c.removesuffix("_intact") for c in frame.columns if c.endswith("_intact")]

        def table(column: str) -> np.ndarray:
            return frame[column].to_numpy(float).reshape(len(first), -1)

        return cls(
            grid,
            np.array(masks),
            {name: table(name) for name in names},
            {name: table(f"{name}_intact") for name in names},
            frame["fact"].to_numpy(str)[: len(frame) // len(first)],
            frame.attrs.get("provenance", {}),
        )


# A backward pass does about the work of two forwards beside its own.
SLOPE_COST = 3


class Scorer:
    """What everything that scores masks shares: the intact model's scores, and a count.

    Attributes
    ----------
    grid : HeadGrid
    evaluations : dict
        ``forward``, ``backward`` and ``equivalents`` (a backward counts two) asked for so far.
    """

    grid: HeadGrid

    def __init__(self) -> None:
        self.evaluations = {"forward": 0, "backward": 0, "equivalents": 0}

    @cached_property
    def baseline(self) -> dict[str, np.ndarray]:
        """The intact model's item scores; counts as one evaluation the first time."""
        return self.measure(np.zeros((1, self.grid.size), bool)).baseline

    def measure(self, masks: np.ndarray, count: bool = True) -> Measurements:
        """Score masks; see the subclasses."""
        raise NotImplementedError

    def part(self, rows: np.ndarray) -> Scorer:
        """Return what scores masks on these of the items only, and counts by itself."""
        return _Part(self, rows)

    def _about(self, items: str, **more: Any) -> dict[str, Any]:
        """Where the scores of a model come from, JSON-ready; `items` is their fingerprint."""
        return {
            "model": {"name": self.model.name, **self.model.fingerprint},
            "task": self.task.name,
            "split": self.split,
            "n_items": len(self.items),
            "seed": self.task.seed,
            "ablation": self.ablation,
            "items": items,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "platform": platform.platform(),
            **more,
        }

    def _count(self, n: int, backward: bool = False) -> None:
        self.evaluations["forward"] += n
        self.evaluations["backward"] += n * backward
        self.evaluations["equivalents"] += n * (SLOPE_COST if backward else 1)


class _Part(Scorer):
    """Some of the items of something that answers for all of them at no cost."""

    def __init__(self, whole: Scorer, rows: np.ndarray) -> None:
        self.grid, self._whole, self._rows = whole.grid, whole, rows
        super().__init__()

    def measure(self, masks: np.ndarray, count: bool = True) -> Measurements:
        """Score masks; see the subclasses of `Scorer`."""
        whole = self._whole.measure(masks, count=False)
        if count:
            self._count(len(whole.masks))
        rows = self._rows
        return replace(
            whole,
            scores={name: values[:, rows] for name, values in whole.scores.items()},
            intact={name: values[:, rows] for name, values in whole.intact.items()},
            facts=whole.facts[rows],
        )
