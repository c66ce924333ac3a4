"""A stand-in for ``Evaluator``: planted head effects instead of a model."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from csloc_utils.heads import HeadGrid


@dataclass
class FakeMeasurements:
    """The part of ``Measurements`` that searches and verification use."""

    masks: np.ndarray
    scores: dict[str, np.ndarray]
    baseline: dict[str, np.ndarray]
    facts: np.ndarray
    grid: HeadGrid

    def item_effects(self, score="logprob"):
        return self.scores[score] - self.baseline[score]

    def effects(self, score="logprob"):
        return self.item_effects(score).mean(axis=1)


@dataclass
class FakeTask:
    name: str


class FakeEvaluator:
    """Scores masks by a formula.

    The log-probability of item i under a mask is ``baseline_i + sensitivity_i * (sum of effects +
    sum of interactions) + noise``; an item is right when it is above ``threshold``. Sensitivities
    have mean 1, the noise depends only on the mask, so measuring again gives the same scores.

    effects: {flat index: effect of ablating it}; interactions: {(i, j): extra effect of both}.
    """

    def __init__(
        self,
        grid,
        effects,
        interactions=None,
        n_items=24,
        items_per_fact=1,
        noise=0.0,
        threshold=-1.0,
        seed=0,
        name="fake",
    ):
        rng = np.random.default_rng(seed)
        self.grid = grid
        self.task = FakeTask(name)
        self.facts = np.array([f"fact {i // items_per_fact}" for i in range(n_items)])
        self.items = tuple(range(n_items))
        self.head_effects = np.zeros(grid.size)
        for head, effect in dict(effects).items():
            self.head_effects[head] = effect
        self.interactions = dict(interactions or {})
        sensitivity = rng.uniform(0.5, 1.5, n_items)
        self.sensitivity = sensitivity / sensitivity.mean()
        self.noise, self.threshold, self.seed = noise, threshold, seed
        logprob = rng.uniform(-0.6, -0.1, n_items)
        self.baseline = {"logprob": logprob, "accuracy": (logprob > threshold).astype(float)}
        self.scores = tuple(self.baseline)
        self.evaluations = {"forward": 0, "backward": 0, "equivalents": 0}
        self.n_measured = 0

    def measure(self, masks, count=True):
        masks = np.asarray(masks)
        assert masks.dtype == bool and masks.shape[1] == self.grid.size
        self.n_measured += len(masks)
        if count:
            for kind in ("forward", "equivalents"):
                self.evaluations[kind] += len(masks)
        shift = masks @ self.head_effects
        for (i, j), extra in self.interactions.items():
            shift = shift + extra * (masks[:, i] & masks[:, j])
        logprob = self.baseline["logprob"] + shift[:, None] * self.sensitivity
        if self.noise:
            logprob = logprob + self.noise * np.array([self._noise(mask) for mask in masks])
        scores = {"logprob": logprob, "accuracy": (logprob > self.threshold).astype(float)}
        return FakeMeasurements(masks, scores, self.baseline, self.facts, self.grid)

    def _noise(self, mask):
        key = zlib.crc32(np.packbits(mask).tobytes())
        return np.random.default_rng([self.seed, key]).normal(size=len(self.items))


def small_grid():
    """30 layers × 9 heads, as in SmolLM2-135M."""
    return HeadGrid(n_layers=30, n_heads=9, n_kv_heads=3, head_width=64)


PLANTED = {40: -3.0, 121: -2.0, 122: -1.5, 200: -1.0, 255: -0.8}


def tail(grid, planted=None, scale=0.03, seed=1):
    """Planted effects over a realistic tail of small ones, as {flat index: effect}."""
    small = np.random.default_rng(seed).normal(-scale / 2, scale, grid.size)
    return {**dict(enumerate(small)), **(PLANTED if planted is None else planted)}
