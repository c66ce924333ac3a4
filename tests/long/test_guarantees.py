"""Do the statements about certainty hold? Hundreds of simulated studies with a known answer.

270 heads: five strong ones, 40 with small effects, the others with none at all. Every fact has its
own effect of each head, and damage saturates: with latent damage ``x`` (the sum over the ablated
heads) the score changes by ``floor * (exp(x / floor) - 1)``, plus noise. `FLOOR` negative turns
saturation into its opposite: heads that back each other up.

What an interval must cover: for regression on a Bernoulli design, the expected change of the score
when a head is switched off while the others are off at random (`coefficients`, in closed form); for
direct confirmation, the mean effect of the head alone over the population of facts.
"""

import os

import numpy as np
import pytest
from sklearn.linear_model import LassoCV

from csloc_utils.confidence import confirmed_effects, cross_fitted_effects
from csloc_utils.designs import bernoulli
from csloc_utils.discoveries import discoveries, selection_frequency
from csloc_utils.heads import HeadGrid
from csloc_utils.measurements import Measurements, Scorer
from csloc_utils.racing import race

pytestmark = pytest.mark.long

# Fewer for a quick look: CSLOC_REPLICATES=40. The margins widen accordingly.
REPLICATES = int(os.environ.get("CSLOC_REPLICATES", 400))
N_HEADS, N_FACTS = 270, 24
STRONG = (-1.5, -1.0, -0.8, -0.6, -0.5)
WEAK = (-0.25,) * 5
SPREAD, FLOOR = 0.5, 3.0


def head_effects(seed, strong=STRONG, n_tail=40, tail=0.05):
    """Latent effect of every head."""
    rng = np.random.default_rng([1, seed])
    effects, heads = np.zeros(N_HEADS), rng.permutation(N_HEADS)
    effects[heads[: len(strong)]] = strong
    effects[heads[len(strong) : len(strong) + n_tail]] = -rng.exponential(tail, n_tail)
    return effects


def saturated(latent, floor):
    return floor * np.expm1(latent / floor)


def study(effects, n_masks, p, seed, noise=0.5, floor=FLOOR, per_fact=1, n_facts=N_FACTS):
    """Masks, item effects and facts of one simulated study."""
    rng = np.random.default_rng([2, seed])
    masks = bernoulli(n_masks, N_HEADS, p, rng)
    by_fact = effects[:, None] * (1 + SPREAD * rng.normal(size=(N_HEADS, n_facts)))
    items = np.repeat(saturated(masks @ by_fact, floor), per_fact, axis=1)
    items += noise * rng.normal(size=items.shape)
    return masks, items, np.repeat(np.arange(n_facts), per_fact)


def growth(effects, floor):
    """Expectation over facts of exp(effect / floor), for normal effects of facts."""
    return np.exp(effects / floor + (SPREAD * effects / floor) ** 2 / 2)


def coefficients(effects, p, floor=FLOOR):
    """Population coefficient of each head: E[effect | head off] - E[effect | head on].

    Independent columns: expectations of exp are products. Empty masks are not drawn, which matters
    for "head on" only.
    """
    factors = 1 - p + p * growth(effects, floor)
    rest = factors.prod() / factors
    off = growth(effects, floor) * rest - 1
    on = (rest - 1) / (1 - (1 - p) ** (N_HEADS - 1))
    return floor * (off - on)


def share(name, hits, target, lowest, highest, weights=None):
    """Print a measured share with its simulation error; check it against its limits."""
    hits = np.asarray(hits, dtype=float)
    weights = np.ones(len(hits)) if weights is None else np.asarray(weights)
    value = np.average(hits, weights=weights)
    error = np.sqrt(np.sum(weights**2 * (hits - value) ** 2)) / weights.sum()
    print(f"{name}: {value:.3f} ± {error:.3f} (n = {len(hits)}, nominal {target})")
    assert lowest - 3 * error <= value <= highest + 3 * error, name
    return value


def test_closed_form_of_the_estimand_agrees_with_a_huge_design():
    effects = head_effects(0)
    heads = np.argsort(effects)[:5]
    cells = []
    for seed in range(12):
        masks, items, _ = study(effects, 20_000, 0.05, seed, noise=0.0, n_facts=200)
        design = np.column_stack([np.ones(len(masks)), masks[:, heads]])
        cells.append(np.linalg.lstsq(design, items.mean(axis=1), rcond=None)[0][1:])
    error = np.std(cells, axis=0, ddof=1) / np.sqrt(len(cells))
    gap = np.mean(cells, axis=0) - coefficients(effects, 0.05)[heads]
    assert (np.abs(gap) < 4 * error + 0.002).all()


CASES = {
    "usual": dict(n_masks=300, p=0.02),
    "few masks": dict(n_masks=150, p=0.02),
    "large masks": dict(n_masks=250, p=0.05),
    "twelve facts, two items each": dict(n_masks=300, p=0.03, n_facts=12, per_fact=2),
    "heads that back each other up": dict(n_masks=200, p=0.03, floor=-3.0),
    "weak heads in much noise": dict(n_masks=200, p=0.03, strong=WEAK, n_tail=0, noise=1.0),
    "no head at all": dict(n_masks=200, p=0.02, strong=(), n_tail=0),
}


@pytest.mark.parametrize("n_splits", [1, 10])
@pytest.mark.parametrize("case", CASES)
def test_cross_fitted_intervals_cover(case, n_splits):
    options = dict(CASES[case])
    planted = {name: options.pop(name) for name in ("strong", "n_tail") if name in options}
    rows = []
    for seed in range(REPLICATES):
        effects = head_effects(seed, **planted)
        masks, items, facts = study(effects, seed=seed, **options)
        truth = coefficients(effects, options["p"], options.get("floor", FLOOR))
        table = cross_fitted_effects(masks, items, facts, 5, n_splits, confidence=0.9, seed=seed)
        for row in table.itertuples():
            covered = row.low <= truth[row.head] <= row.high
            rows.append((effects[row.head], covered, row.frequency, row.high - row.low))
    planted_effect, covered, frequency, width = np.array(rows).T
    name = f"{case}, {n_splits} splits"
    share(name, covered, 0.9, 0.85, 0.95, frequency)
    print(f"  mean width {np.average(width, weights=frequency):.3f}")
    strong, null = planted_effect <= -0.2, planted_effect == 0
    if strong.sum() > 50:
        share("  strong heads", covered[strong], 0.9, 0.85, 0.95, frequency[strong])
    if null.sum() > 50:  # where the variance errs, it errs upwards
        share("  heads without effect", covered[null], 0.9, 0.85, 1.0, frequency[null])


@pytest.mark.parametrize("n_facts", [12, 24])
def test_confirmed_intervals_cover(n_facts):
    rng = np.random.default_rng(0)
    for effect in STRONG:
        latent = effect * (1 + SPREAD * rng.normal(size=(5000, n_facts)))
        items = saturated(latent, FLOOR) + 0.1 * rng.normal(size=latent.shape)
        table = confirmed_effects(items, np.arange(n_facts), 0.9)
        truth = FLOOR * (growth(np.array(effect), FLOOR) - 1)
        covered = (table["low"] <= truth) & (truth <= table["high"])
        share(f"confirmed, {n_facts} facts, {effect}", covered, 0.9, 0.88, 0.92)


def claims(n_masks, p, level=0.1, knockoffs=False, **planted):
    """Per study: claimed heads, those without effect, those of effect -0.2 or stronger."""
    counts = []
    for seed in range(REPLICATES // 10 if knockoffs else REPLICATES):
        effects = head_effects(seed, **planted)
        masks, items, _ = study(effects, n_masks, p, seed)
        if knockoffs:
            heads = knockoff_claims(masks, items.mean(axis=1), p, level, seed)
        else:
            heads = discoveries(
                masks, items.mean(axis=1), level, n_resamples=int(N_HEADS / level), seed=seed
            ).heads
        found = effects[heads]
        counts.append((len(heads), (found == 0).sum(), (found <= -0.2).sum()))
    return np.array(counts).T


@pytest.mark.parametrize(
    "n_masks, p, planted, least",
    [
        (150, 0.02, {}, 2.5),
        (250, 0.02, {}, 4.0),
        (400, 0.02, {}, 4.5),
        (250, 0.05, {}, 4.5),
        (250, 0.02, dict(n_tail=0), 4.0),
    ],
)
def test_false_discovery_rate_stays_below_its_level(n_masks, p, planted, least):
    claimed, false, strong = claims(n_masks, p, **planted)
    proportion = false / np.maximum(claimed, 1)
    name = f"{n_masks} masks, p = {p}, {planted or 'tail of 40'}"
    share(f"false discovery rate, {name}", proportion, 0.1, 0.0, 0.1)
    print(f"  claims {claimed.mean():.2f} heads a study, {strong.mean():.2f} of -0.2 or stronger")
    assert strong.mean() > least


def test_without_any_head_nothing_is_claimed():
    claimed, *_ = claims(250, 0.02, strong=(), n_tail=0)
    share("studies without heads and without claims", claimed == 0, 0.9, 0.9, 1.0)


def knockoff_claims(masks, effects, p, level, seed):
    """Model-X knockoffs (independent columns: fresh draws) with Lasso differences, knockoff+."""
    fresh = np.random.default_rng([3, seed]).random(masks.shape) < p
    fit = LassoCV(cv=5, alphas=20, max_iter=3000).fit(np.hstack([masks, fresh]) * 1.0, effects)
    needed = np.maximum(-fit.coef_, 0)
    difference = needed[:N_HEADS] - needed[N_HEADS:]
    for cut in np.unique(np.abs(difference[difference != 0])):
        if 1 + (difference <= -cut).sum() <= level * (difference >= cut).sum():
            return np.flatnonzero(difference >= cut)
    return np.array([], dtype=int)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_knockoffs_find_fewer_heads_at_the_same_level():
    """Why `discoveries` does not use them: they need ten claims to make any."""
    _, _, by_test = claims(250, 0.02)
    _, _, by_knockoffs = claims(250, 0.02, knockoffs=True)
    print(
        f"heads of effect -0.2 or stronger found: tests {by_test.mean():.2f}, "
        f"knockoffs {by_knockoffs.mean():.2f}"
    )
    assert by_test.mean() > by_knockoffs.mean() + 1


def test_stability_bounds_hold():
    q, threshold = 8, 0.75
    wrong, right = [], []
    for seed in range(REPLICATES // 5):
        effects = head_effects(seed, n_tail=0)
        masks, items, _ = study(effects, 250, 0.02, seed)
        stable = selection_frequency(masks, items.mean(axis=1), q, threshold, 25, seed)
        kept = effects[stable.heads]
        wrong.append((kept == 0).sum())
        right.append((kept < 0).sum())
    error = np.std(wrong) / np.sqrt(len(wrong))
    print(
        f"stability, q = {q}: {np.mean(wrong):.3f} ± {error:.3f} heads without effect kept "
        f"(bounds {stable.bound:.3f}, {stable.bound_unimodal:.3f}), {np.mean(right):.2f} of 5 kept"
    )
    assert np.mean(wrong) <= stable.bound_unimodal + 3 * error
    assert np.mean(right) > 2


@pytest.mark.parametrize("gap", [0.0, 0.05, 0.3])
def test_races_that_settle_seldom_end_wrongly(gap):
    """The fifth and the sixth of 20 candidates differ by `gap` nats; 60 facts, confidence 90 %.

    The promise is about all races: at most one in ten settles *and* names a wrong head. Of those
    that settle, few may be wrong as long as there is a difference worth finding; between equal
    heads, half of the rare settled ones must be.
    """
    ended, wrong, cost = 0, 0, []
    for seed in range(REPLICATES):
        means = np.array([-1.5, -1.2, -1.1, -1.0, -0.8, -0.8 + gap - 1e-9, *[-0.1] * 14])
        spread = SPREAD * np.sqrt(np.abs(means))[:, None]
        rng = np.random.default_rng([4, seed])
        values = saturated(means[:, None] + spread * rng.normal(size=(20, 60)), FLOOR)
        table = ItemEffects(values)
        result = race(table, table.grid.single_masks(), 5, tolerance=0.0, seed=seed)
        cost.append(result.equivalents)
        ended += result.settled
        truth = np.array([FLOOR * (growth_alone(m) - 1) for m in means])
        best_out = np.delete(truth, result.found).min()
        wrong += result.settled and truth[result.found].max() > best_out + 1e-12
    print(
        f"races, gap {gap}: {ended / REPLICATES:.0%} settled, {wrong / REPLICATES:.1%} wrongly, "
        f"{np.mean(cost):.1f} of 21 evaluations"
    )
    assert wrong <= 0.1 * REPLICATES
    if gap >= 0.3:
        assert ended > REPLICATES / 2
        assert wrong <= 0.1 * ended


def growth_alone(mean):
    """Expectation over facts of exp(effect / FLOOR) in the study of races."""
    return np.exp(mean / FLOOR + (SPREAD / FLOOR) ** 2 * np.abs(mean) / 2)


class ItemEffects(Scorer):
    """Item effects of single heads, given as a table."""

    scores = ("logprob",)

    def __init__(self, values):
        self.values, self.grid = values, HeadGrid(1, len(values), len(values), 4)
        self.facts = np.arange(values.shape[1])
        super().__init__()

    def measure(self, masks, count=True):
        effects = masks @ self.values
        return Measurements(
            self.grid, masks, {"logprob": effects}, {"logprob": 0 * effects}, self.facts
        )
