"""Slopes as a prior of random masks: agreement with algebra, trust in good slopes only, cost."""

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from csloc_utils import fusion
from csloc_utils.designs import stratified
from csloc_utils.errors import InputError
from csloc_utils.fusion import fuse, fused
from csloc_utils.recovery import HeadLasso, recall
from csloc_utils.search import paper
from csloc_utils.simulate import SimulatedEvaluator
from csloc_utils.worlds import World

ROOT = Path(__file__).resolve().parents[2]
N, TRUE = 120, [3, 17, 40, 77, 110]


@pytest.fixture
def planted():
    """Masks, their noisy effects, the truth and slopes that know it roughly."""
    rng = np.random.default_rng(0)
    effects = rng.normal(scale=0.05, size=N)
    effects[TRUE] = [-3.0, -2.5, -2.0, -1.5, -1.2]
    masks = stratified(60, N, 4, 0)
    slopes = effects * rng.uniform(0.3, 1.0, N) + rng.normal(scale=0.1, size=N)
    slopes[TRUE[0]] = -0.2  # the head that matters most hardly shows
    return masks, masks @ effects + rng.normal(scale=0.1, size=60), effects, slopes


def test_masks_correct_the_slopes_and_slopes_help_the_masks(planted):
    masks, effects, truth, slopes = planted
    found = np.argsort(fuse(masks, effects, [slopes]).effects)[:5]
    assert set(found) == set(TRUE)
    assert TRUE[0] not in np.argsort(slopes)[:5]
    assert recall(HeadLasso().fit(masks[:30], effects[:30]).top(5).tolist(), TRUE) < 1


def test_the_posterior_is_that_of_the_gaussian_model(planted, monkeypatch):
    masks, effects, _, slopes = planted
    monkeypatch.setattr(fusion, "_FLOORS", (0.2,))
    monkeypatch.setattr(fusion, "_NOISES", (0.5,))
    got, design = fuse(masks, effects, [slopes]), masks.astype(float)
    prior = 0.2 + np.abs(slopes) / np.abs(slopes).mean()
    prior *= len(design) / np.trace((design * prior) @ design.T)
    covariance = (design * prior) @ design.T + 0.5 * np.eye(len(design))
    left = effects - got.intercept - design @ slopes * got.weights[0]
    gain = prior[:, None] * design.T @ np.linalg.inv(covariance)
    assert got.effects == pytest.approx(got.weights[0] * slopes + gain @ left)
    scale = left @ np.linalg.solve(covariance, left) / len(left)
    spread = np.sqrt(scale * (prior - np.einsum("hm,mh->h", gain, design * prior)))
    assert got.spreads == pytest.approx(spread)

    def likelihood(weight):
        mean = got.intercept + design @ slopes * weight
        return multivariate_normal.logpdf(effects, mean, scale * covariance)

    assert all(likelihood(got.weights[0]) > likelihood(got.weights[0] + d) for d in (-0.1, 0.1))


def test_slopes_that_say_nothing_or_the_reverse_get_no_weight(planted):
    masks, effects, truth, slopes = planted
    good, reverse = fuse(masks, effects, [slopes, -slopes]).weights
    assert good > 0.3 and reverse == 0
    empty = fuse(masks, effects, [np.zeros(N)])
    assert np.isfinite(empty.effects).all() and np.corrcoef(empty.effects, truth)[0, 1] > 0.5


def test_units_of_effects_and_of_slopes_do_not_matter(planted):
    masks, effects, _, slopes = planted
    one, other = fuse(masks, effects, [slopes]), fuse(masks, 10 * effects, [slopes / 7])
    assert other.effects == pytest.approx(10 * one.effects)
    assert other.weights == pytest.approx(70 * one.weights)
    order = np.random.default_rng(1).permutation(len(masks))
    shuffled = fuse(masks[order], effects[order], [slopes])
    assert shuffled.effects == pytest.approx(one.effects)


@pytest.mark.parametrize("budget", [14, 45, 100])
def test_a_search_costs_what_it_says(budget):
    world = SimulatedEvaluator(world=World(heads=60, seed=1))
    result = fused(world, 5, budget)
    assert result.evaluations == {"forward": budget - 4, "backward": 2, "equivalents": budget}
    # The baseline is counted by the search.
    assert world.evaluations["equivalents"] == budget - 1
    assert len(result.extra["candidates"]) >= 5
    alone = world.measure(world.grid.mask(result.found[:1])[None]).effects()[0]
    assert result.table[0]["effect"] == alone == min(r["effect"] for r in result.table)


def test_in_simulated_worlds_it_names_the_single_effects_that_the_lasso_misses():
    shares = {"fused": [], "paper": []}
    for seed in range(200, 208):
        world = SimulatedEvaluator(world=World(seed=seed))
        single = world.measure(world.grid.single_masks(), count=False).effects()
        for name, result in (
            ("fused", fused(world, 5, 100, seed=seed)),
            ("paper", paper(world, 5, 100, seed=seed)),
        ):
            heads = [world.grid.flat(h) for h in result.found]
            shares[name].append(single[heads].sum() / np.sort(single)[:5].sum())
    assert np.mean(shares["fused"]) > 0.97 > 0.9 > np.mean(shares["paper"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 13}, "at least 14"),
        ({"size": 0}, "mask size"),
        ({"score": "beauty"}, "beauty"),
        ({"k": 0}, "k"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(options, said):
    world = SimulatedEvaluator(world=World(heads=60))
    with pytest.raises(InputError, match=said):
        fused(world, **options)
    assert world.evaluations["equivalents"] == 0


def test_slopes_of_another_length_are_refused(planted):
    masks, effects, _, slopes = planted
    for bad in ([slopes[1:]], slopes, [slopes * np.nan]):
        with pytest.raises(InputError, match="slopes"):
            fuse(masks, effects, bad)


def test_every_variant_of_the_benchmark_keeps_its_budget(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "benchmarks"))
    import fusion as benchmark

    world = SimulatedEvaluator(world=World(heads=60, seed=2))
    for name in benchmark.VARIANTS:
        for budget in benchmark.BUDGETS:
            heads = benchmark.run(name, world, budget, 0)  # raises where it costs too much
            assert benchmark.single_share(world, heads) <= 1 + 1e-9
    monkeypatch.setitem(benchmark.VARIANTS, "spendthrift", lambda e, b, s: confirm_all(e))
    with pytest.raises(AssertionError, match="spendthrift spent 61 of 45"):
        benchmark.run("spendthrift", world, 45, 0)
    for module in ("search", "fusion"):
        sys.modules.pop(module, None)


def confirm_all(evaluator):
    return np.argsort(evaluator.measure(evaluator.grid.single_masks()).effects())[:5]
