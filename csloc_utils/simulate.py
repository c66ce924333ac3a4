"""Asking a simulated world as one asks a model, thousands of masks a second.

A `SimulatedEvaluator` answers `measure` and `slopes` as an `Evaluator` does, so every search and
every interval runs on it unchanged; and it knows the truth, to be compared with what they say.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
from scipy import sparse

from csloc_utils.designs import check_count
from csloc_utils.errors import InputError
from csloc_utils.gradients import SMOOTH_SCORES, Slopes
from csloc_utils.measurements import Measurements, Scorer
from csloc_utils.worlds import NOISE_CUT, World

SCORES = ("logprob", "accuracy", "margin")
_BLOCK = 4096  # masks at a time, for memory


class SimulatedEvaluator(Scorer):
    """Answers from a `World` what `csloc_utils.measure.Evaluator` measures on a model.

    Parameters
    ----------
    world : World, optional
        What the heads do; ``World()`` by default.
    n_items : int
        Items, drawn at random.
    items_per_fact : int
        Items in a row that ask for the same fact; the last fact may have fewer.
    seed : int
        Of items and noise; `World.seed` is that of the heads.

    Attributes
    ----------
    grid, scores, items, facts, task, split, baseline, evaluations
        As of an `Evaluator`; an item's accuracy is 1 where its margin, the lead, is positive.
    planted, backups : int arrays
        As of the world.
    """

    def __init__(
        self,
        *,
        world: World | None = None,
        n_items: int = 24,
        items_per_fact: int = 1,
        seed: int = 0,
    ) -> None:
        self.world = world = World() if world is None else world
        self.items_per_fact = check_count("items_per_fact", items_per_fact)
        self.seed = check_count("seed", seed, low=0)
        self.grid, self.planted, self.backups = world.grid, world.planted, world.backups
        self.scores, self.split = SCORES, "all"
        self.task = SimpleNamespace(name="simulated", scoring="continuation")
        self._fact = np.arange(check_count("n_items", n_items)) // items_per_fact
        self.facts = np.array([f"fact {seed}.{fact}" for fact in self._fact])
        self.items = tuple(f"{fact}, item {i}" for i, fact in enumerate(self.facts))
        super().__init__()
        rng = np.random.default_rng([world.seed, seed])
        self._lead = world.lead_mean + world.lead_sd * self._normal(rng)[0]
        # Half the variance of a sensitivity belongs to the item, half to item and head.
        half = world.sensitivity / np.sqrt(2)
        self._fragility = np.exp(half * self._normal(rng)[0] - half**2 / 2)
        own = np.exp(half * self._normal(rng, len(self.planted)) - half**2 / 2)
        each = world.leads[:, None] + world.spreads[:, None] * self._normal(rng, self.grid.size)
        each[self.planted] = world.leads[self.planted, None] * self._fragility * own
        self._each = each

    @cached_property
    def single_effects(self) -> np.ndarray:
        """The truth about these items: each head's mean effect on the log-probability, no noise.

        ``world.effects`` is the truth about all possible items.
        """
        return self.expected_effects(self.grid.single_masks())

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the numbers come from, JSON-ready."""
        return {
            "model": {"name": "simulated", "world": repr(self.world)},
            "task": self.task.name,
            "split": self.split,
            "n_items": len(self.items),
            "seed": self.seed,
        }

    def fresh(self, seed: int) -> SimulatedEvaluator:
        """Return the same heads on new items, for verification."""
        return SimulatedEvaluator(
            world=self.world,
            n_items=len(self.items),
            items_per_fact=self.items_per_fact,
            seed=seed,
        )

    def measure(self, masks: np.ndarray, count: bool = True) -> Measurements:
        """Score masks; see `Evaluator.measure`."""
        masks = self.grid.check_masks(masks)
        if count:
            self._count(len(masks))
        noise = np.stack([self._noise(mask) for mask in masks])
        scores = self._score(self._leads(masks), noise)
        intact = self._score(np.repeat(self._lead[None], len(masks), axis=0))
        return Measurements(self.grid, masks, scores, intact, self.facts, self.provenance)

    def slopes(
        self, masks: np.ndarray, strength: float = 1.0, score: str = "logprob", count: bool = True
    ) -> Slopes:
        """Differentiate the mean score without noise; see `Evaluator.slopes`."""
        masks = self.grid.check_masks(masks)
        if not 0 <= strength <= 1:
            raise InputError(f"strength is {strength!r}: give a keep-strength from 0 to 1")
        if score not in SMOOTH_SCORES:
            raise InputError(
                f"the score {score!r} has no gradient: use {' or '.join(SMOOTH_SCORES)}"
            )
        if count:
            self._count(len(masks), backward=True)
        off = np.where(masks, 1.0, 1.0 - strength)
        share, steepness = self.world.weakened(off)
        left, right = self.world.pairs
        moves = np.ones((len(masks), len(self.items)))
        if score == "logprob":
            moves = self.world.logprob(self._lead_at(share, off))[1]
        pairs = (off @ left) @ right.T + (off @ right) @ left.T
        slopes = steepness * (moves @ self._each.T) + pairs * (moves @ self._fragility)[:, None]
        return Slopes(masks, float(strength), slopes / len(self.items), score)

    def expected_effects(self, masks: np.ndarray, score: str = "logprob") -> np.ndarray:
        """Mean effect of masks on these items without noise, ``(n_masks,)``; counts nothing."""
        lead = self._leads(self.grid.check_masks(masks))
        return (self._score(lead)[score] - self._score(self._lead)[score]).mean(axis=1)

    def mean_score(self, keep: np.ndarray, score: str = "logprob") -> np.ndarray:
        """Mean score without noise at keep-strengths ``(n_points, n_heads)`` from 0 to 1."""
        off = 1.0 - np.atleast_2d(np.asarray(keep, float))
        lead = self._lead_at(self.world.weakened(off)[0], off)
        return self._score(lead)[score].mean(axis=1)

    def _leads(self, masks: np.ndarray) -> np.ndarray:
        """Leads under masks, ``(n_masks, n_items)``."""
        parts = []
        for start in range(0, len(masks), _BLOCK):
            # Sparse products go row by row: a mask's scores do not depend on those beside it.
            off = sparse.csr_array(masks[start : start + _BLOCK].astype(float))
            parts.append(self._lead_at(off, off))
        return np.concatenate(parts)

    def _lead_at(self, share: Any, off: Any) -> np.ndarray:
        """Leads with this share of each head's own effect, and heads this far off for pairs."""
        left, right = self.world.pairs
        pairs = ((off @ left) * (off @ right)).sum(axis=1)
        return self._lead + share @ self._each + pairs[:, None] * self._fragility

    def _score(self, lead: np.ndarray, noise: np.ndarray | float = 0.0) -> dict[str, np.ndarray]:
        value, slope = self.world.logprob(lead)
        margin = lead + noise
        # Noise to first order, so that its mean stays zero where the log-probability bends.
        return dict(zip(SCORES, (value + slope * noise, (margin > 0).astype(float), margin)))

    def _noise(self, mask: np.ndarray) -> np.ndarray:
        """Noise of a mask on all items; none for the intact model."""
        if not self.world.noise or not mask.any():
            return np.zeros(len(self.items))
        key = hashlib.blake2b(np.packbits(mask).tobytes(), digest_size=8).digest()
        rng = np.random.default_rng([self.world.seed, self.seed, int.from_bytes(key, "little")])
        return self.world.noise * self._normal(rng)[0].clip(-NOISE_CUT, NOISE_CUT)

    def _normal(self, rng: np.random.Generator, rows: int = 1) -> np.ndarray:
        """Normal numbers ``(rows, n_items)`` that a fact's items have partly in common."""
        common = rng.normal(size=(rows, self._fact[-1] + 1))[:, self._fact]
        own = rng.normal(size=(rows, len(self._fact)))
        share = self.world.fact_share
        return np.sqrt(share) * common + np.sqrt(1 - share) * own
