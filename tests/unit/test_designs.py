import numpy as np
import pytest

from csloc_utils.designs import as_generator, bernoulli, check_heads, layer_matched, stratified
from csloc_utils.errors import InputError
from csloc_utils.heads import Head, HeadGrid

GRID = HeadGrid(n_layers=5, n_heads=4, n_kv_heads=2, head_width=8)


def n_distinct(masks):
    return len(np.unique(masks, axis=0))


def test_bernoulli_rate_shape_and_type():
    masks = bernoulli(2000, 270, 0.1, 0)
    assert masks.dtype == bool and masks.shape == (2000, 270)
    assert abs(masks.mean() - 0.1) < 0.002
    assert np.abs(masks.mean(axis=0) - 0.1).max() < 0.04


def test_bernoulli_masks_are_never_empty_and_follow_the_truncated_distribution():
    n_heads, p = 6, 0.15
    masks = bernoulli(20_000, n_heads, p, 3)
    assert masks.any(axis=1).all()
    expected = p / (1 - (1 - p) ** n_heads)
    assert np.abs(masks.mean(axis=0) - expected).max() < 0.015
    assert abs((masks.sum(axis=1) == 2).mean() - 15 * p**2 * 0.85**4 / (1 - 0.85**6)) < 0.015


def test_bernoulli_with_a_tiny_probability_ends():
    masks = bernoulli(50, 1000, 1e-12, 0)
    assert (masks.sum(axis=1) == 1).all()
    assert n_distinct(masks) > 30


@pytest.mark.parametrize(
    "n_masks, n_heads, size",
    [(150, 270, 5), (149, 270, 5), (7, 10, 3), (10, 5, 2), (31, 270, 200), (1, 4, 2), (13, 6, 5)],
)
def test_stratified_has_exact_size_and_balance_after_every_row(n_masks, n_heads, size):
    masks = stratified(n_masks, n_heads, size, 0)
    assert masks.dtype == bool and masks.shape == (n_masks, n_heads)
    assert (masks.sum(axis=1) == size).all()
    assert (np.ptp(np.cumsum(masks, axis=0), axis=1) <= 1).all()


@pytest.mark.parametrize("n_masks, n_heads, size", [(149, 270, 5), (6, 4, 2), (12, 12, 1)])
def test_stratified_does_not_repeat_masks(n_masks, n_heads, size):
    for seed in range(10):
        assert n_distinct(stratified(n_masks, n_heads, size, seed)) == n_masks


def test_stratified_repeats_when_it_must():
    assert (stratified(3, 4, 4, 0)).all()
    assert (stratified(8, 4, 1, 0).sum(axis=0) == 2).all()


def test_stratified_breaks_ties_at_random():
    first = np.mean([stratified(1, 20, 5, seed)[0] for seed in range(400)], axis=0)
    assert np.abs(first - 0.25).max() < 0.1


@pytest.mark.parametrize(
    "draw",
    [
        lambda n, seed: bernoulli(n, 30, 0.1, seed),
        lambda n, seed: stratified(n, 30, 4, seed),
        lambda n, seed: layer_matched(GRID, [Head(0, 1), Head(3, 2)], n, seed),
    ],
)
def test_seeds(draw):
    assert (draw(20, 5) == draw(20, 5)).all()
    assert (draw(20, 5) == draw(20, np.random.default_rng(5))).all()
    assert (draw(20, 5) != draw(20, 6)).any()
    generator = np.random.default_rng(5)
    assert (draw(20, generator) != draw(20, generator)).any()


def test_more_masks_only_add_rows():
    assert (stratified(40, 30, 4, 1)[:15] == stratified(15, 30, 4, 1)).all()
    assert (bernoulli(400, 30, 0.05, 1)[:150] == bernoulli(150, 30, 0.05, 1)).all()
    heads = [Head(0, 1), Head(3, 2)]
    assert (layer_matched(GRID, heads, 30, 1)[:9] == layer_matched(GRID, heads, 9, 1)).all()


def test_layer_matched_takes_other_heads_of_the_same_layers():
    heads = [Head(1, 0), Head(1, 3), Head(4, 2)]
    masks = layer_matched(GRID, heads, 200, 0)
    per_layer = masks.reshape(-1, *GRID.shape).sum(axis=2)
    assert (per_layer == [0, 2, 0, 0, 1]).all()
    assert not masks[:, GRID.mask(heads)].any()
    used = masks.reshape(-1, *GRID.shape).any(axis=0)
    assert used[1].sum() == 2 and used[4].sum() == 3


def test_layer_matched_borrows_from_the_nearest_layer():
    full_layer = [Head(2, index) for index in range(4)]
    masks = layer_matched(GRID, [*full_layer, Head(1, 0)], 100, 0)
    per_layer = masks.reshape(-1, *GRID.shape).sum(axis=2)
    # Layer 1 lends its two others after its own need, layer 3 (as near) the rest.
    assert (per_layer == [0, 3, 0, 2, 0]).all()
    assert not masks[:, GRID.mask(full_layer)].any()


def test_layer_matched_of_half_the_model_is_its_complement():
    half = GRID.heads[:10]
    assert (layer_matched(GRID, half, 3, 0) == ~GRID.mask(half)).all()


def test_layer_matched_zero_sets():
    assert layer_matched(GRID, [Head(0, 0)], 0).shape == (0, 20)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: stratified(10, 20, 0), "mask size"),
        (lambda: stratified(10, 20, 21), "from 1 to 20"),
        (lambda: stratified(10, 20, 2.5), "mask size"),
        (lambda: stratified(0, 20, 2), "n_masks"),
        (lambda: stratified(True, 20, 2), "n_masks"),
        (lambda: stratified(10, 0, 2), "n_heads"),
        (lambda: bernoulli(10, 20, 0), "p is 0"),
        (lambda: bernoulli(10, 20, 1.0), "between 0 and 1"),
        (lambda: bernoulli(10, 20, float("nan")), "p is nan"),
        (lambda: bernoulli(10, 20, "0.1"), "p is"),
        (lambda: bernoulli(-1, 20, 0.1), "n_masks"),
        (lambda: as_generator(-1), "random_state"),
        (lambda: as_generator("seed"), "random_state"),
        (lambda: layer_matched(GRID, GRID.heads[:11], 3), "at most 10"),
        (lambda: layer_matched(GRID, [], 3), "at least one"),
        (lambda: layer_matched(GRID, [Head(9, 0)], 3), "L9H0"),
        (lambda: check_heads(GRID, [Head(0, 0), Head(0, 0)]), "L0H0 given twice"),
        (lambda: check_heads(GRID, ["L0H0"]), "not a Head"),
    ],
)
def test_bad_input(call, says):
    with pytest.raises(InputError, match=says):
        call()
