from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.optimize import linprog
from sklearn.base import BaseEstimator

from csloc_utils.confidence import confirmed_effects, cross_fitted_effects
from csloc_utils.designs import bernoulli, stratified
from csloc_utils.discoveries import discoveries, selection_frequency
from csloc_utils.errors import InputError
from csloc_utils.recovery import HeadLasso

N_HEADS = 60
TRUTH = np.zeros(N_HEADS)
TRUTH[[7, 20, 41]] = [-2.0, -1.0, -0.8]
TRUTH[33] = +1.5  # a head in the way: the score rises without it
FACTS = [f"fact {i // 2}" for i in range(16)]


def measured(n_masks=150, noise=0.3, seed=0, truth=TRUTH):
    rng = np.random.default_rng(seed)
    masks = bernoulli(n_masks, N_HEADS, 0.05, rng)
    return masks, (masks @ truth)[:, None] + rng.normal(0, noise, (n_masks, len(FACTS)))


MASKS, ITEMS = measured()
EFFECTS = ITEMS.mean(axis=1)
NULL = measured(truth=np.zeros(N_HEADS), noise=1.0, seed=5)


class Fixed(BaseEstimator):
    """Selects the heads it is told to."""

    def __init__(self, heads=()):
        self.heads = heads

    def fit(self, masks, effects):
        self.coef_ = np.zeros(np.shape(masks)[1])
        self.coef_[list(self.heads)] = -1.0
        return self

    def top(self, k):
        return np.argsort(self.coef_, kind="stable")[:k]


# --- intervals on fresh items


def test_confirmed_intervals_are_student_t_on_fact_means():
    values = np.random.default_rng(0).normal(-1, 1, (3, 16))
    table = confirmed_effects(values, FACTS, confidence=0.8, heads=[4, 9, 2])
    means = values.reshape(3, 8, 2).mean(axis=2)
    expected = [stats.ttest_1samp(m, 0).confidence_interval(0.8) for m in means]
    assert table["head"].tolist() == [4, 9, 2]
    np.testing.assert_allclose(table["effect"], values.mean(axis=1))
    np.testing.assert_allclose(table[["low", "high"]], [(e.low, e.high) for e in expected])


def test_confirmed_intervals_do_not_shrink_when_items_are_repeated():
    values = np.random.default_rng(0).normal(-1, 1, (1, 16))
    once = confirmed_effects(values, FACTS)
    thrice = confirmed_effects(np.repeat(values, 3, axis=1), np.repeat(FACTS, 3))
    pd.testing.assert_frame_equal(once, thrice)


# --- cross-fitted effects


def test_cross_fitting_finds_the_needed_heads_and_their_effects():
    table = cross_fitted_effects(MASKS, ITEMS, FACTS, k=3).set_index("head")
    assert set(table.index[:3]) == {7, 20, 41}
    assert (table["frequency"][:3] > 0.9).all()
    rows = table.loc[[7, 20, 41]]
    assert (rows["low"] < TRUTH[rows.index]).all() and (TRUTH[rows.index] < rows["high"]).all()
    assert (rows["high"] < 0).all()
    assert 33 not in table.index


def test_without_noise_the_estimates_are_exact():
    needed = np.minimum(TRUTH, 0)
    masks, items = measured(noise=0.0, truth=needed)
    table = cross_fitted_effects(masks, items, FACTS, k=3, estimator=Fixed((7, 20, 41)))
    assert sorted(table["head"]) == [7, 20, 41] and (table["frequency"] == 1).all()
    for column in ("effect", "low", "high"):
        np.testing.assert_allclose(table[column], needed[table["head"]], atol=1e-9)


def test_effects_of_chance_are_centred_on_zero_unlike_a_refit():
    masks, items = NULL
    table = cross_fitted_effects(masks, items, FACTS, k=5, n_splits=20)
    honest = np.average(table["effect"], weights=table["frequency"])
    heads = HeadLasso().fit(masks, items.mean(axis=1)).top(5)
    design = np.column_stack([np.ones(len(masks)), masks[:, heads]])
    refit = np.linalg.lstsq(design, items.mean(axis=1), rcond=None)[0][1:].mean()
    assert refit < -0.1
    assert abs(honest) < abs(refit) / 3


def test_a_fact_more_or_less_counts_not_an_item():
    once = cross_fitted_effects(MASKS, ITEMS, FACTS, k=3)
    again = cross_fitted_effects(MASKS, np.repeat(ITEMS, 2, axis=1), np.repeat(FACTS, 2), k=3)
    pd.testing.assert_frame_equal(once, again)


def test_facts_that_disagree_widen_the_interval():
    masks, items = measured(truth=np.minimum(TRUTH, 0))
    apart = masks[:, [7]] * np.repeat(np.linspace(-2, 2, 8), 2)
    agreed, widened = (
        cross_fitted_effects(masks, values, FACTS, 3, estimator=Fixed((7, 20, 41)))
        .set_index("head")
        .eval("high - low")
        for values in (items, items + apart)
    )
    assert widened[20] < 2 * agreed[20]
    confirmed = confirmed_effects([TRUTH[7] + apart[masks[:, 7]][0]], FACTS)
    assert widened[7] == pytest.approx((confirmed["high"] - confirmed["low"])[0], rel=0.25)


def test_noise_of_single_measurements_is_counted_once():
    tables = []
    for seed in range(60):
        masks, items = measured(60, noise=1.0, seed=seed, truth=np.zeros(N_HEADS))
        tables.append(cross_fitted_effects(masks, items, FACTS, 1, 3, estimator=Fixed((7,))))
    table = pd.concat(tables)
    error = (table["high"] - table["low"]) / 2 / stats.t.ppf(0.95, 7)
    assert 0.7 < np.mean(error**2) / np.mean(table["effect"] ** 2) < 1.5


def test_a_higher_level_gives_wider_intervals_and_the_seed_decides():
    first = cross_fitted_effects(MASKS, ITEMS, FACTS, 3, confidence=0.5)
    again = cross_fitted_effects(MASKS, ITEMS, FACTS, 3, confidence=0.5)
    wider = cross_fitted_effects(MASKS, ITEMS, FACTS, 3, confidence=0.95)
    other = cross_fitted_effects(MASKS, ITEMS, FACTS, 3, confidence=0.5, seed=1)
    pd.testing.assert_frame_equal(first, again)
    assert (wider["low"] < first["low"]).all() and (wider["high"] > first["high"]).all()
    assert not first.equals(other)


def test_rescaling_the_effects_rescales_the_intervals():
    table, scaled = (cross_fitted_effects(MASKS, c * ITEMS, FACTS, 3) for c in (1, 10))
    assert table["head"].tolist() == scaled["head"].tolist()
    columns = ["effect", "low", "high"]
    np.testing.assert_allclose(10 * table[columns], scaled[columns], rtol=1e-6)


def test_heads_that_cannot_be_told_apart_get_no_estimate():
    masks = MASKS.copy()
    masks[:, 8] = masks[:, 7]
    masks[:, 9] = False
    table = cross_fitted_effects(masks, ITEMS, FACTS, 4, estimator=Fixed((7, 8, 9, 20)))
    assert table["head"].tolist() == [20]


# --- false discoveries


def test_discovers_the_needed_heads_and_on_two_sides_the_harmful_one():
    found = discoveries(MASKS, EFFECTS, level=0.1, n_resamples=2000)
    assert set(found.heads[:3]) == {7, 20, 41} and 33 not in found.heads
    assert (found.adjusted[found.heads] <= 0.1).all()
    both = discoveries(MASKS, EFFECTS, level=0.1, n_resamples=2000, two_sided=True)
    assert {7, 20, 41, 33} <= set(both.heads)
    assert 33 in discoveries(MASKS, -EFFECTS, n_resamples=2000).heads


def test_chance_gives_no_discoveries_and_uniform_p_values():
    rng = np.random.default_rng(0)
    effects = rng.normal(size=(12, len(MASKS)))
    claims = [discoveries(MASKS, e, n_resamples=600).heads for e in effects]
    assert sum(map(bool, claims)) <= 3  # one in ten is allowed
    p_values = []
    for _ in range(60):
        design = bernoulli(30, 10, 0.2, rng)
        effects = rng.normal(size=30) - 3.0 * design[:, 0]
        p_values += discoveries(design, effects, n_resamples=199, seed=rng).p_values[1:].tolist()
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


@pytest.mark.parametrize("two_sided", [False, True])
def test_p_value_is_the_share_of_all_deals_of_the_column(two_sided):
    rng = np.random.default_rng(2)
    masks = np.ones((12, 2), dtype=bool)
    masks[:, 0] = np.arange(12) < 3
    effects = rng.normal(size=12) - 0.8 * masks[:, 0]
    sums = np.array([effects[list(rows)].sum() for rows in combinations(range(12), 3)])
    observed = effects[:3].sum() + 1e-12
    low, high = np.mean(sums <= observed), np.mean(sums >= observed - 2e-12)
    expected = min(1, 2 * min(low, high)) if two_sided else low
    found = discoveries(masks, effects, n_resamples=20_000, two_sided=two_sided)
    assert found.p_values[0] == pytest.approx(expected, abs=0.01)
    assert found.p_values[1] == 1  # always ablated: every deal is the same


def test_masks_with_one_head_and_heads_without_masks_prove_nothing():
    masks = MASKS.copy()
    masks[:, 11] = masks[:, 12] = False
    masks[:5] = False
    masks[:5, 11] = True  # only ever ablated alone: the design had no choice
    effects = EFFECTS - 50.0 * masks[:, 11]
    found = discoveries(masks, effects, n_resamples=2000)
    assert found.p_values[11] == found.p_values[12] == 1


def test_discoveries_do_not_depend_on_units_or_on_the_order_of_masks():
    found = discoveries(MASKS, EFFECTS, seed=3, n_resamples=2000)
    scaled = discoveries(MASKS, 100 * EFFECTS + 7, seed=3, n_resamples=2000)
    np.testing.assert_allclose(scaled.p_values, found.p_values, atol=1e-3)
    rows = np.random.default_rng(0).permutation(len(MASKS))
    moved = discoveries(MASKS[rows], EFFECTS[rows], seed=3, n_resamples=2000)
    assert set(moved.heads[:3]) == set(found.heads[:3])
    np.testing.assert_allclose(moved.p_values, found.p_values, atol=0.06)
    again, other = (discoveries(MASKS, EFFECTS, seed=s, n_resamples=2000) for s in (3, 4))
    np.testing.assert_array_equal(again.p_values, found.p_values)
    assert (other.p_values != found.p_values).any()


# --- stability selection


def test_planted_heads_are_selected_again_and_chance_is_not():
    stable = selection_frequency(MASKS, EFFECTS, q=5, n_pairs=20)
    assert set(stable.heads) == {7, 20, 41}
    assert stable.frequencies.sum() <= 5 and stable.frequencies[33] == 0
    assert (np.diff(stable.frequencies[stable.heads]) <= 0).all()
    masks, items = NULL
    chance = selection_frequency(masks, items.mean(axis=1), q=5, n_pairs=20)
    assert chance.heads == []


def test_stability_reproduces_with_the_seed_and_in_other_units():
    first, again, scaled, other = (
        selection_frequency(MASKS, c * EFFECTS, q=6, n_pairs=5, seed=seed).frequencies
        for c, seed in ((1, 0), (1, 0), (10, 0), (1, 1))
    )
    np.testing.assert_array_equal(first, again)
    np.testing.assert_allclose(first, scaled)
    assert (first != other).any()


def test_threshold_is_reached_not_passed():
    found = selection_frequency(MASKS, EFFECTS, 3, 1.0, 5, estimator=Fixed((2, 5)))
    assert found.heads == [2, 5] and found.frequencies[[2, 5]].tolist() == [1, 1]


def test_worst_case_bound_is_that_of_the_papers():
    found = selection_frequency(MASKS, EFFECTS, 6, 0.8, 2, estimator=Fixed((2,)))
    assert found.bound == pytest.approx(6**2 / ((2 * 0.8 - 1) * N_HEADS))


@pytest.mark.parametrize("threshold", [0.6, 0.75, 0.9])
def test_unimodal_bound_holds_for_the_worst_unimodal_distribution(threshold):
    """Linear program: the most probable passing of a head selected with probability theta."""
    n_pairs, q = 20, 12
    theta = q / N_HEADS
    shares = np.arange(n_pairs + 1) / n_pairs  # of pairs in which both halves select the head
    passing = (shares >= 2 * threshold - 1 - 1e-9).astype(float)
    worst = 0.0
    for mode in range(n_pairs + 1):
        steps = np.diff(np.eye(n_pairs + 1), axis=0)
        steps[:mode] *= -1  # rises up to the mode, falls after it
        result = linprog(
            -passing,
            A_ub=np.vstack([steps, shares]),
            b_ub=np.r_[np.zeros(n_pairs), theta**2],
            A_eq=np.ones((1, n_pairs + 1)),
            b_eq=[1],
        )
        worst = max(worst, -result.fun) if result.success else worst
    found = selection_frequency(MASKS, EFFECTS, q, threshold, n_pairs, estimator=Fixed((2,)))
    assert N_HEADS * worst <= found.bound_unimodal + 1e-9 <= 1.25 * N_HEADS * worst
    assert found.bound_unimodal < found.bound


# --- bad input

FIXED = stratified(100, N_HEADS, 3, 0)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: confirmed_effects(ITEMS[0], FACTS), "shape"),
        (lambda: confirmed_effects(ITEMS, FACTS[:-1]), "one fact an item"),
        (lambda: confirmed_effects(ITEMS * np.nan, FACTS), "NaN"),
        (lambda: confirmed_effects([["x"]], ["a"]), "numbers"),
        (lambda: confirmed_effects(ITEMS, ["same"] * 16), "1 different facts"),
        (lambda: confirmed_effects(ITEMS, FACTS, 90), "confidence is 90"),
        (lambda: confirmed_effects(ITEMS, FACTS, heads=[1]), "one row a head"),
        (lambda: cross_fitted_effects(MASKS[:-1], ITEMS, FACTS, 3), "every mask"),
        (lambda: cross_fitted_effects(MASKS, ITEMS, ["a", "b"] * 8, 3), "at least 4"),
        (lambda: cross_fitted_effects(MASKS, ITEMS, FACTS, 0), "k is 0"),
        (lambda: cross_fitted_effects(MASKS, ITEMS, FACTS, 61), "from 1 to 60"),
        (lambda: cross_fitted_effects(MASKS[:15], ITEMS[:15], FACTS, 5), "lower k"),
        (lambda: cross_fitted_effects(MASKS, ITEMS, FACTS, 3, n_splits=0), "n_splits"),
        (lambda: cross_fitted_effects(MASKS, 0 * ITEMS, FACTS, 3), "same effect"),
        (lambda: cross_fitted_effects(MASKS, ITEMS, FACTS, 3, seed=-1), "random_state"),
        (lambda: discoveries(FIXED, FIXED @ TRUTH), "every mask ablates 3 heads"),
        (lambda: discoveries(MASKS, EFFECTS, design="stratified"), "stratified design"),
        (lambda: discoveries(MASKS, EFFECTS, level=10), "level is 10"),
        (lambda: discoveries(MASKS, EFFECTS, n_resamples=100), "at least 600"),
        (lambda: discoveries(MASKS, EFFECTS[:-1]), "every mask"),
        (lambda: discoveries(MASKS, np.zeros(150)), "same effect"),
        (lambda: selection_frequency(MASKS, EFFECTS, 0), "q is 0"),
        (lambda: selection_frequency(MASKS, EFFECTS, 61), "from 1 to 60"),
        (lambda: selection_frequency(MASKS, EFFECTS, 5, 0.5), "threshold is 0.5"),
        (lambda: selection_frequency(MASKS[:3], EFFECTS[:3], 1), "cut in half"),
    ],
)
def test_bad_input(call, says):
    with pytest.raises(InputError, match=says):
        call()
