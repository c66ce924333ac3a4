"""Worlds: models that exist only as numbers, so that the truth about their heads is known.

Whether a search finds the right heads, or an interval covers the right number, can only be checked
where the right answer is known. A `World` states what every head does and what items are like. An
item has a *lead*, how far its answer is ahead of the best rival. Ablated heads lower it, some pairs
more or less than each alone; its score follows from the lead as a probability would: flat where the
answer is certain, falling with the lead beyond, and bending once more to a floor. Tuned so that
what can be seen from outside looks like a small language model, a world proves no method, but it
can disprove one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np
from scipy import stats
from scipy.special import expit

from csloc_utils.designs import check_count
from csloc_utils.errors import InputError
from csloc_utils.heads import HeadGrid

_MOST_LAYERS = 32
_CROSSTALK_RANK = 8
# Noise is cut off here, in standard deviations, so that it never lifts a probability above 1.
NOISE_CUT = 3.0
# Other effects than the planted ones lie between these shares of the weakest planted one.
_TAIL_LOSS, _TAIL_GAIN = 0.9, 0.3
# Changes of the lead at which mean effects are tabled, densest around 0; nats.
_STEPS = np.sinh(np.linspace(-7, 5, 480)) / 5
_RANGES = {
    "tail_scale": (0, 10),
    "tail_shift": (-100, 100),
    "tail_df": (0.5, 1e6),
    "tail_spread": (0, 100),
    "backup_effect": (-100, 0),
    "overlap": (-10, 10),
    "interactions": (0, 10),
    "crosstalk": (0, 10),
    "lead_mean": (-100, 100),
    "lead_sd": (0, 100),
    "sensitivity": (0, 2),
    "fact_share": (0, 1),
    "floor": (-100, -1),
    "bend": (1, 100),
    "curvature": (0, 10),
    "misleading": (0, 1),
    "noise": (0, 1 / NOISE_CUT),
}


def power_law(n: int, strongest: float = -3.5, decay: float = 0.7) -> tuple[float, ...]:
    """Effects that fall with their rank: ``strongest / rank ** decay``, in nats."""
    return tuple(float(strongest / rank**decay) for rank in range(1, check_count("n", n) + 1))


def geometric(n: int, strongest: float = -3.5, ratio: float = 0.75) -> tuple[float, ...]:
    """Effects each of which is `ratio` times the one before, in nats."""
    return tuple(float(strongest * ratio**step) for step in range(check_count("n", n)))


def _quadrature(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights for means over a standard normal distribution (Gauss and Hermite)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(n)
    return nodes, weights / weights.sum()


@dataclass(frozen=True, kw_only=True)
class World:
    """What the heads of an imagined model do, and what its items are like.

    Effects are stated in nats of log-probability, as a sweep over infinitely many items would
    measure them. Defaults imitate what was measured on a model of 135M parameters (30 × 9 heads).

    Parameters
    ----------
    heads : int or HeadGrid
        Number of heads, laid out in as many layers as divide it (at most 32); or their grid.
    strong : tuple of float
        Effects of the planted heads, most negative first: the few heads that carry the capability.
    tail : {"t", "laplace"}
        Distribution of all other effects. Real tails are heavier than a bell curve: most heads
        hardly matter, some matter a little, and some are better switched off. Cut off so that no
        other head does as much as a planted one, and gains stay small.
    tail_scale : float, optional
        Scale of the tail in nats. By default ``20 / heads`` (0.07 at 270 heads), so that the tail
        as a whole weighs as much in a larger model.
    tail_shift : float
        Centre of the tail in units of its scale; negative because most heads help a little.
    tail_df : float
        Degrees of freedom of Student's t: the smaller, the heavier the tail.
    tail_spread : float
        How differently items react to a tail head, in units of the tail's scale. Makes effects on
        one sample of items differ from those on another.
    n_backups : int
        Heads that stand in for the strongest planted ones, one each. A backup does nothing while
        its head is there.
    backup_effect : float
        Lead lost when head and backup are both off, beyond the head's own effect; nats, negative.
    overlap : float
        How far planted heads do the same work, so that together they do less damage than their sum:
        lead spared by a pair, in units of the geometric mean of its effects on the lead. Negative:
        they need each other's absence to do damage.
    interactions : float
        How much pairs of planted heads differ in that: standard deviation, in the same units.
    crosstalk : float
        Standard deviation of the same between any two heads, backups excepted. Many small terms,
        felt when many heads are off or weakened: why sums of single effects predict masks of five
        heads better than masks of thirteen, and why slopes far from the intact model say little.
    lead_mean, lead_sd : float
        Leads of the items in the intact model, normally distributed, in nats. Large leads are
        certain items, whose score hardly moves at first; negative ones are failed from the start.
    sensitivity : float
        Spread of the items' (positive, log-normal) sensitivities to each planted head.
    fact_share : float
        Share of items' variance, in all of this and in the noise, that a fact's items have in
        common, from 0 to 1: why items of one fact are no independent evidence.
    floor, bend : float
        Log-probability that no damage goes below, and over how many nats (at least 1) damage fades
        out above it: a broken model still gives every answer some probability.
    curvature : float
        How late, and how differently, heads act as they are weakened step by step: makes slopes
        differ from the effects of full ablation.
    misleading : float
        Share of heads (of the planted ones, rounded up) whose effect has at first the wrong sign,
        so that the slope at full strength misplaces them.
    noise : float
        Standard deviation of what no rule above explains, in nats of the lead, at most 1/3. It
        belongs to mask and item, as all that a deterministic model does: measuring again repeats
        it. Its mean over masks is zero in log-probability and margin.
    null : bool
        No head does anything: none is planted, and only noise is left.
    seed : int
        Of everything that belongs to heads.

    Raises
    ------
    InputError
        For a value out of range, or more planted heads and backups than heads.
    """

    heads: int | HeadGrid = 270
    strong: tuple[float, ...] = power_law(8)
    tail: str = "t"
    tail_scale: float | None = None
    tail_shift: float = -0.25
    tail_df: float = 2.0
    tail_spread: float = 3.0
    n_backups: int = 2
    backup_effect: float = -2.5
    overlap: float = 0.25
    interactions: float = 0.15
    crosstalk: float = 0.35
    lead_mean: float = 2.0
    lead_sd: float = 3.0
    sensitivity: float = 0.6
    fact_share: float = 0.5
    floor: float = -12.0
    bend: float = 1.5
    curvature: float = 0.3
    misleading: float = 0.1
    noise: float = 0.2
    null: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("seed", self.seed, low=0)
        object.__setattr__(self, "strong", tuple(float(effect) for effect in self.strong))
        strong, size = self.strong, self.grid.size
        if not strong or list(strong) != sorted(strong) or not strong[-1] < 0:
            raise InputError(
                "strong holds the planted effects: give negative numbers, most negative first"
            )
        check_count("n_backups", self.n_backups, low=0, high=len(strong))
        if len(strong) + self.n_backups > size:
            raise InputError(
                f"{len(strong)} planted heads and {self.n_backups} backups do not fit into {size} "
                "heads: plant fewer"
            )
        if self.tail not in ("t", "laplace"):
            raise InputError(f"unknown tail {self.tail!r}: choose t or laplace")
        if self.tail_scale is None:
            object.__setattr__(self, "tail_scale", 20 / size)
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not isinstance(value, Real) or not low <= value <= high:
                raise InputError(f"{name} is {value!r}: give a number from {low:g} to {high:.3g}")
        if strong[0] <= self._planted_curve[0]:
            raise InputError(
                f"no head can do {strong[0]:g} nats of damage above a floor of {self.floor:g}: "
                "lower the floor or plant weaker heads"
            )

    @cached_property
    def grid(self) -> HeadGrid:
        """Layout of the heads."""
        if isinstance(self.heads, HeadGrid):
            return self.heads
        size = check_count("heads", self.heads)
        layers = max(d for d in range(1, _MOST_LAYERS + 1) if size % d == 0)
        return HeadGrid(layers, size // layers, size // layers, head_width=64)

    @cached_property
    def planted(self) -> np.ndarray:
        """Flat indices of the planted heads, most important first."""
        return self._places[: 0 if self.null else len(self.strong)]

    @cached_property
    def backups(self) -> np.ndarray:
        """Flat indices of planted heads and their backups, ``(n_backups, 2)``."""
        heads = self.planted[: self.n_backups]
        return np.stack([heads, self._places[len(self.strong) :][: len(heads)]], axis=1)

    @cached_property
    def effects(self) -> np.ndarray:
        """Each head's single effect on the log-probability, over all possible items, (n_heads,)."""
        if self.null:
            return np.zeros(self.grid.size)
        law = stats.t(self.tail_df) if self.tail == "t" else stats.laplace()
        draws = law.rvs(self.grid.size, random_state=self._rng("tail")) + self.tail_shift
        weakest = -self.strong[-1]
        # Certain items leave little to gain.
        most = min(_TAIL_GAIN * weakest, 0.5 * self._tail_curve[-1])
        effects = (draws * self.tail_scale).clip(-_TAIL_LOSS * weakest, most)
        effects[self.planted] = self.strong
        effects[self.backups[:, 1]] = 0.0
        return effects

    @cached_property
    def leads(self) -> np.ndarray:
        """What ablating each head alone does to an average item's lead, in nats, ``(n_heads,)``."""
        leads = np.interp(self.effects, self._tail_curve, _STEPS)
        leads[self.planted] = np.interp(self.effects[self.planted], self._planted_curve, _STEPS)
        return np.where(self.effects == 0, 0.0, leads)

    @cached_property
    def spreads(self) -> np.ndarray:
        """Standard deviation over items of each tail head's effect on the lead, ``(n_heads,)``."""
        spreads = np.full(self.grid.size, 0.0 if self.null else self.tail_spread * self.tail_scale)
        spreads[self.planted] = spreads[self.backups[:, 1]] = 0.0
        return spreads

    @cached_property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Two factors ``(n_heads, rank)`` of what pairs of heads do to the lead beyond their sum.

        With ``off`` how far each head is off, from 0 to 1, that is
        ``((off @ left) * (off @ right)).sum(axis=1)`` nats.
        """
        rng, size, root = self._rng("pairs"), self.grid.size, np.sqrt(np.abs(self.leads))
        left, right = rng.normal(size=(2, size, _CROSSTALK_RANK))
        # No head interacts with itself.
        right -= left * ((left * right).sum(1) / (left**2).sum(1))[:, None]
        weight = np.sqrt(self.crosstalk) * (2 * _CROSSTALK_RANK) ** -0.25 * root[:, None]
        # Planted heads and backups: an entry of its own for each pair.
        own, n = np.concatenate([self.planted, self.backups[:, 1]]), len(self.planted)
        extra = np.zeros((size, len(own)))
        scale = self.overlap + self.interactions * rng.normal(size=(n, n))
        extra[self.planted, :n] = np.triu(scale * np.outer(root, root)[np.ix_(own[:n], own[:n])], 1)
        extra[self.backups[:, 1], : len(self.backups)] = np.eye(len(self.backups)) * (
            self.backup_effect
        )
        picked = np.zeros((size, len(own)))
        picked[own, np.arange(len(own))] = 1.0
        return np.hstack([left * weight, picked]), np.hstack([right * weight, extra])

    @cached_property
    def curvatures(self) -> np.ndarray:
        """How unevenly each head acts when weakened, ``(n_heads,)``; see `weakened`."""
        rng, size = self._rng("curvature"), self.grid.size
        curved = (self.curvature * (1 + rng.normal(size=size))).clip(-0.9, 0.9)
        wrong = rng.random(size) < self.misleading
        n_wrong = int(np.ceil(self.misleading * len(self.planted)))
        wrong[self.planted] = rng.permutation(len(self.planted)) < n_wrong
        return np.where(wrong, rng.uniform(1.2, 2.0, size), curved)

    def weakened(self, off: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Share of each head's own effect at ``off`` = 1 − keep-strength, and its derivative.

        The share is ``off − curvature * off * (1 − off)``: 0 intact, 1 ablated, a straight line
        for curvature 0, at first of the wrong sign for a curvature above 1.
        """
        bow = self.curvatures
        return off - bow * off * (1 - off), 1 - bow * (1 - 2 * off)

    def logprob(self, lead: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log-probability at a lead, in nats, and its derivative.

        The answer competes with one rival, ``−log(1 + exp(−lead))``, and bends to the floor.
        """
        above = (-np.logaddexp(0, -lead) - self.floor) / self.bend
        top = np.logaddexp(0, -self.floor / self.bend)
        value = -self.floor / top * (np.logaddexp(0, above) - top)
        return value, -self.floor / (self.bend * top) * expit(-lead) * expit(above)

    @cached_property
    def _planted_curve(self) -> np.ndarray:
        """Mean effect over all possible items of each of `_STEPS` by a planted head."""
        nodes, weights = _quadrature(16)
        factors = np.exp(self.sensitivity * nodes - self.sensitivity**2 / 2)
        return self._mean_scores(np.outer(_STEPS, factors), self.lead_sd) @ weights - self._intact

    @cached_property
    def _tail_curve(self) -> np.ndarray:
        """The same by a tail head, whose effects on items add to the spread of their leads."""
        spread = np.hypot(self.lead_sd, self.tail_spread * self.tail_scale)
        return self._mean_scores(_STEPS, spread) - self._intact

    @cached_property
    def _intact(self) -> float:
        return float(self._mean_scores(np.zeros(1), self.lead_sd)[0])

    def _mean_scores(self, moves: np.ndarray, lead_sd: float) -> np.ndarray:
        """Mean log-probability over normally distributed leads, each moved by `moves`."""
        nodes, weights = _quadrature(40)
        return self.logprob(self.lead_mean + lead_sd * nodes + moves[..., None])[0] @ weights

    @cached_property
    def _places(self) -> np.ndarray:
        return self._rng("places").permutation(self.grid.size)

    def _rng(self, purpose: str) -> np.random.Generator:
        """Independent streams: changing one parameter leaves the other draws alone."""
        return np.random.default_rng([self.seed, *purpose.encode()])


def fit_world(
    sweep_effects: np.ndarray,
    n_planted: int = 8,
    tail: str = "t",
    intact_margins: np.ndarray | None = None,
    **parameters: Any,
) -> World:
    """Return a world whose effects look like those of a measured sweep.

    The most negative effects become the planted heads as they are; the distribution of all others
    is fitted by maximum likelihood (`scipy.stats`). What one sweep cannot tell (pairs, curvature,
    floor) keeps its default.

    Parameters
    ----------
    sweep_effects : float array (n_heads,)
        Each head's single effect on the log-probability, in nats.
    n_planted : int, default 8
        How many of them to plant.
    tail : {"t", "laplace"}
        Distribution to fit to the rest.
    intact_margins : float array (n_items,), optional
        Margins of the intact model, to imitate its items as well.
    **parameters
        Further parameters of `World`, which come before the fitted ones.

    Raises
    ------
    InputError
        If the effects are not finite, too few, or fewer than `n_planted` of them negative.
    """
    effects = np.sort(np.asarray(sweep_effects, float).ravel())
    n_planted = check_count("n_planted", n_planted)
    if len(effects) < n_planted + 10 or not np.isfinite(effects).all():
        raise InputError(
            f"{len(effects)} effects cannot tell {n_planted} planted heads from the others: give "
            f"finite effects of at least {n_planted + 10} heads"
        )
    if effects[n_planted - 1] >= 0:
        raise InputError(f"fewer than {n_planted} effects are negative: plant fewer heads")
    rest = effects[n_planted:]
    fitted: dict[str, Any] = {"heads": len(effects), "strong": effects[:n_planted], "tail": tail}
    if tail == "laplace":
        centre, scale = stats.laplace.fit(rest)
    else:
        fitted["tail_df"], centre, scale = map(float, stats.t.fit(rest))
    fitted |= {"tail_scale": float(scale), "tail_shift": float(centre / scale)}
    if intact_margins is not None:
        fitted["lead_mean"] = float(np.mean(intact_margins))
        fitted["lead_sd"] = float(np.std(intact_margins))
    return World(**fitted | parameters)
