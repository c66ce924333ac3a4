"""Sparsity and additivity: known answers where they can be worked out by hand."""

import numpy as np
import pytest

from csloc_utils.assumptions import (
    additivity,
    coherence,
    diagnose,
    effective_heads,
    gini,
    held_out_r2,
    pair_coverage,
    pair_masks,
    pairs,
    sparsity,
)
from csloc_utils.designs import bernoulli, stratified
from csloc_utils.errors import InputError
from fakes import FakeEvaluator, small_grid

FACTS = np.array([f"f{i}" for i in range(12)])


def test_equal_heads_and_one_head():
    equal, one = np.full(10, -2.0), np.eye(10)[3]
    assert effective_heads(equal) == pytest.approx(10) and gini(equal) == pytest.approx(0)
    assert effective_heads(one) == pytest.approx(1) and gini(one) == pytest.approx(0.9)
    for measure in (effective_heads, gini):  # neither sign nor unit matters
        assert measure(-3 * one + 0.1) == pytest.approx(measure(3 * one - 0.1))


@pytest.mark.parametrize(
    ("tail", "verdict"), [(0.001, "strong"), (0.03, "moderate"), (0.2, "weak")]
)
def test_sparsity_is_called_by_its_name(tail, verdict):
    rng = np.random.default_rng(0)
    effects = np.full(100, -tail)
    effects[[3, 20, 50]] = [-3, -2, -1]
    items = effects[:, None] * rng.uniform(0.8, 1.2, 12)
    got = sparsity(items, FACTS, k=3)
    assert got.verdict == verdict
    exact = 6 / (6 + 97 * tail)
    assert got.top_share.low <= exact + 0.02 and got.top_share.high >= exact - 0.02
    assert 1 <= got.effective_heads.value <= 100


def test_facts_that_disagree_widen_the_interval():
    effects = np.full((50, 12), -0.1)
    effects[7] = -np.linspace(0, 8, 12)
    alike = sparsity(np.repeat(effects.mean(1, keepdims=True), 12, 1), FACTS, k=1).top_share
    differ = sparsity(effects, FACTS, k=1).top_share
    assert alike.value == pytest.approx(differ.value)
    assert differ.high - differ.low > 0.05 > alike.high - alike.low


def test_additivity_by_mask_size():
    fake = FakeEvaluator(small_grid(), {i: -0.1 * (i % 7) for i in range(270)})
    masks = np.vstack([stratified(20, 270, size, 0) for size in (2, 13)])
    table = additivity(masks, fake.measure(masks).effects(), fake.head_effects)
    assert table["size"].tolist() == [2, 13] and table["n_masks"].tolist() == [20, 20]
    assert np.allclose(table[["r", "slope", "r2"]], 1)
    halved = additivity(masks, fake.measure(masks).effects() / 2, fake.head_effects)
    assert np.allclose(halved["slope"], 0.5) and (halved["r2"] < 0.8).all()
    assert np.allclose(halved["r"], 1)


def test_pairs_tell_backups_from_chains():
    effects = {4: -1.0, 9: -1.0, 30: -1.0}
    fake = FakeEvaluator(small_grid(), effects, {(4, 9): -2.0, (4, 30): +0.8})
    masks = pair_masks([4, 9, 30], 270)
    single = fake.measure(fake.grid.single_masks()).item_effects()
    table = pairs(fake.grid, masks, fake.measure(masks).item_effects(), single, fake.facts)
    assert table["kind"].tolist() == ["backups", "chain", "additive"]
    assert np.allclose(table["interaction"], [-2.0, 0.8, 0.0], atol=1e-9)
    assert table["a"].tolist() == ["L0H4", "L0H4", "L1H0"]
    with pytest.raises(InputError, match="exactly two"):
        pairs(fake.grid, fake.grid.single_masks(), single, single, fake.facts)


def test_random_masks_hardly_ever_hold_a_given_pair():
    masks = stratified(149, 270, 5, 0)
    together = sum(masks[:, i] & masks[:, j] for i in range(40) for j in range(i)).mean()
    assert pair_coverage(masks) == pytest.approx(149 * 20 / (270 * 269))
    assert 0 <= together < 1


def test_coherence():
    masks = bernoulli(200, 6, 0.4, 0)
    masks[:, 5] = masks[:, 2]
    assert coherence(masks) == pytest.approx(1)
    assert coherence(masks[:, :5]) < 0.3


def test_held_out_r2_is_no_in_sample_r2():
    masks = stratified(60, 270, 5, 0)
    noise = np.random.default_rng(1).normal(size=60)
    assert held_out_r2(masks, noise) < 0.1
    fake = FakeEvaluator(small_grid(), {40: -3.0, 121: -2.0, 122: -1.5})
    masks = stratified(150, 270, 13, 0)
    assert held_out_r2(masks, fake.measure(masks).effects()) > 0.9


def test_a_diagnosis_says_what_does_not_hold():
    masks = stratified(40, 270, 5, 0)
    effects = np.random.default_rng(1).normal(size=40)
    got = diagnose(masks, effects)
    assert (got.least, got.most) == (0, 1) and len(got.warnings) == 3
    fake = FakeEvaluator(small_grid(), {40: -3.0, 121: -2.0, 122: -1.5})
    masks = stratified(150, 270, 13, 0)
    assert diagnose(masks, fake.measure(masks).effects()).warnings == ()


def test_bad_input_is_explained():
    for effects in (np.ones(5), np.ones((5, 11))):
        with pytest.raises(InputError, match="one fact an item"):
            sparsity(effects, FACTS, k=2)
    for value in (0, np.nan):
        with pytest.raises(InputError, match="all 0"):
            sparsity(np.full((5, 12), value), FACTS, k=2)
    for effects, single in ((np.ones(3), np.ones(4)), (np.ones(4), np.ones(3))):
        with pytest.raises(InputError, match="do not go with"):
            additivity(np.eye(4, dtype=bool), effects, single)
    for masks in (np.ones((3, 3)), np.array([[1, 0], [0, 0]])):
        with pytest.raises(InputError, match="other masks"):
            coherence(masks)
