"""The simulated world: it keeps the rules it states, and looks like what was measured."""

import time

import numpy as np
import pytest
from scipy import stats

from csloc_utils.designs import bernoulli, stratified
from csloc_utils.errors import InputError
from csloc_utils.heads import HeadGrid
from csloc_utils.measurements import Measurements
from csloc_utils.recovery import HeadLasso
from csloc_utils.screening import screened
from csloc_utils.search import greedy, paper, sweep
from csloc_utils.simulate import SimulatedEvaluator
from csloc_utils.verify import verify
from csloc_utils.worlds import World, fit_world, geometric, power_law

# Without pairs every head's effect on the lead adds up.
ALONE = dict(overlap=0.0, interactions=0.0, crosstalk=0.0, noise=0.0)


def simulated(n_items=24, items_per_fact=1, seed=0, **world):
    return SimulatedEvaluator(
        world=World(**world), n_items=n_items, items_per_fact=items_per_fact, seed=seed
    )


def mask(evaluator, *heads):
    row = np.zeros((1, evaluator.grid.size), bool)
    row[0, list(heads)] = True
    return row


def test_a_mask_has_the_same_scores_whatever_is_measured_beside_it():
    run = simulated()
    masks = stratified(60, 270, 13, 0)
    whole, backwards = run.measure(masks), simulated().measure(masks[::-1])
    for name in run.scores:
        assert (whole.scores[name] == backwards.scores[name][::-1]).all()
        assert (run.measure(masks[7]).scores[name][0] == whole.scores[name][7]).all()
    assert (simulated(seed=1).measure(masks).scores["margin"] != whole.scores["margin"]).all()


def test_the_empty_mask_has_no_effect():
    measured = simulated(noise=0.3).measure(mask(simulated()))
    assert all((measured.item_effects(score) == 0).all() for score in measured.scores)


def test_planted_heads_do_the_stated_damage_and_no_other_head_does_as_much():
    world = World(noise=0.0)
    run = SimulatedEvaluator(world=world, n_items=4000)
    assert world.effects[world.planted].tolist() == list(power_law(8)) == list(world.strong)
    assert np.delete(world.effects, world.planted).min() > world.strong[-1]
    single = run.measure(run.grid.single_masks()).effects()
    assert single == pytest.approx(run.single_effects, abs=1e-12)
    # Item effects of the strongest heads have standard deviations of about 3 nats.
    assert np.abs(single - world.effects).max() < 4 * 3 / np.sqrt(4000)
    assert 0.5 < (world.effects < 0).mean() < 0.7


def test_a_fresh_evaluator_has_the_same_heads_and_other_facts():
    run = simulated(items_per_fact=3)
    other = run.fresh(5)
    assert (other.planted == run.planted).all() and len(other.items) == len(run.items)
    assert len(set(run.facts)) == 8 and not set(run.facts) & set(other.facts)
    assert (run.baseline["margin"] != other.baseline["margin"]).all()
    assert stats.spearmanr(run.single_effects, other.single_effects)[0] > 0.5


def test_a_backup_matters_only_when_its_head_is_off():
    run = simulated(**ALONE, n_backups=2, backup_effect=-2.5)
    assert len(run.backups) == 2
    for head, backup in run.backups:
        one, other, both = (
            run.measure(mask(run, *heads)).effects("margin")[0]
            for heads in ([head], [backup], [head, backup])
        )
        assert other == 0 and run.single_effects[backup] == 0
        assert both - one == pytest.approx(-2.5 * run._fragility.mean())


def test_overlapping_heads_do_less_together_than_their_sum():
    def extra(**pairs):
        run = simulated(**ALONE | pairs)
        both = run.planted[:2]
        effects = run.measure(np.vstack([mask(run, *both), mask(run, both[0]), mask(run, both[1])]))
        return effects.effects("margin") @ [1, -1, -1]

    assert extra() == pytest.approx(0, abs=1e-9)
    assert extra(overlap=0.3) > 1 and extra(overlap=-0.3) < -1
    assert abs(extra(interactions=0.3)) > 0.1 and abs(extra(crosstalk=0.3)) > 0.1


def test_damage_stops_at_the_floor_in_log_probability_only():
    run = simulated(n_items=200, noise=0.3, floor=-12.0, overlap=0.0, crosstalk=0.0)
    worst = run.measure(mask(run, *run.planted)).scores
    assert worst["logprob"].min() >= -12 and worst["margin"].min() < -30
    everything = run.measure(bernoulli(300, 270, 0.5, 0)).scores["logprob"]
    assert everything.min() >= -12 and everything.max() <= 0
    assert np.quantile(worst["logprob"], 0.2) < -11  # it is reached


def test_scores_go_together():
    scores = simulated().measure(stratified(100, 270, 13, 0)).scores
    assert (scores["accuracy"] == (scores["margin"] > 0)).all()
    quiet = simulated(noise=0.0).measure(stratified(100, 270, 13, 0)).scores
    order = quiet["margin"].ravel().argsort()
    assert (np.diff(quiet["logprob"].ravel()[order]) >= 0).all()


@pytest.mark.parametrize("score", ["logprob", "margin"])
@pytest.mark.parametrize("strength", [1.0, 0.7])
def test_slopes_are_those_of_finite_differences(strength, score):
    run = simulated(heads=36, strong=power_law(5))
    off = mask(run, run.planted[0], 7)
    got = run.slopes(off, strength, score).effects[0]
    steps = 1e-5 * np.eye(36)
    keep = np.where(off, 0.0, strength)
    rise = run.mean_score(keep + steps, score) - run.mean_score(keep - steps, score)
    assert got == pytest.approx(-rise / 2e-5, rel=1e-5, abs=1e-7)
    assert got @ got > 1


def test_full_and_no_strength_are_the_intact_and_the_ablated_model():
    run = simulated(noise=0.0)
    off = stratified(3, 270, 13, 0)
    for score in run.scores:
        ends = run.mean_score(1.0 - off, score) - run.mean_score(np.ones(270), score)
        assert ends == pytest.approx(run.expected_effects(off, score), abs=1e-12)
        assert ends == pytest.approx(run.measure(off).effects(score), abs=1e-12)


def test_slopes_order_the_heads_but_misplace_some_strong_ones():
    ranks, correlations = [], []
    for seed in range(8):
        run = simulated(seed=seed)
        slopes = run.slopes(mask(run)).effects[0]
        correlations.append(stats.spearmanr(slopes, run.single_effects)[0])
        ranks.append(slopes.argsort().argsort()[run.planted])
        run = simulated(seed=seed, misleading=0.0, curvature=0.0)
        straight = run.slopes(mask(run), score="margin").effects[0]
        single = run.expected_effects(run.grid.single_masks(), "margin")
        assert straight == pytest.approx(single)
    assert 0.7 < np.median(correlations) < 0.9
    assert all((row > 135).sum() == 1 for row in ranks)  # a tenth of eight, rounded up


def test_defaults_look_like_the_measured_model():
    additive, many, share, together = [], [], [], []
    for seed in range(8):
        run = SimulatedEvaluator(world=World(seed=seed), seed=seed)
        single = run.measure(run.grid.single_masks()).effects()
        for size, fits in ((5, additive), (13, many)):
            masks = stratified(150, 270, size, seed)
            fits.append(np.corrcoef(masks @ single, run.measure(masks).effects())[0, 1])
        largest = np.sort(np.abs(single))[::-1]
        share.append(largest[:5].sum() / largest.sum())
        top = single.argsort()[:5]
        together.append(run.expected_effects(mask(run, *top))[0] / single[top].sum())
    assert 0.9 < min(additive) and max(additive) < 0.98
    assert 0.75 < np.median(many) < np.median(additive) - 0.03
    assert 0.15 < np.median(share) < 0.32 and 0.1 < min(share) and max(share) < 0.4
    assert np.median(together) < 0.9


def test_a_null_world_has_noise_only_and_it_averages_out():
    run = simulated(null=True, n_items=50, items_per_fact=2, noise=0.3)
    assert len(run.planted) == len(run.backups) == 0 and (run.world.effects == 0).all()
    assert (run.slopes(mask(run)).effects == 0).all()
    masks = bernoulli(2000, 270, 0.1, 0)
    assert (run.expected_effects(masks) == 0).all()
    for score, spread in (("margin", 0.3), ("logprob", 0.15)):
        effects = run.measure(masks).item_effects(score)
        assert np.abs(effects.mean()) < 4 * spread / np.sqrt(2000 * 25)
    assert effects.std() > 0.03


def test_noise_is_shared_within_a_fact_as_stated():
    run = simulated(null=True, n_items=40, items_per_fact=2, noise=0.3, fact_share=0.5)
    noise = run.measure(bernoulli(2000, 270, 0.1, 0)).item_effects("margin")
    within = np.corrcoef(noise[:, 0], noise[:, 1])[0, 1]
    assert within == pytest.approx(0.5, abs=0.08)
    assert np.corrcoef(noise[:, 1], noise[:, 2])[0, 1] == pytest.approx(0, abs=0.1)
    assert noise.std() == pytest.approx(0.3, rel=0.05)


def test_evaluations_are_counted_as_of_a_model():
    run = simulated()
    run.measure(stratified(10, 270, 5, 0))
    run.measure(stratified(10, 270, 5, 0), count=False)
    assert run.evaluations == {"forward": 10, "backward": 0, "equivalents": 10}
    assert run.baseline is run.baseline
    assert run.evaluations["forward"] == 11
    run.slopes(stratified(2, 270, 5, 0))
    assert run.evaluations == {"forward": 13, "backward": 2, "equivalents": 17}
    assert run.expected_effects(mask(run)) == 0 and run.evaluations["forward"] == 13


def test_searches_and_verification_run_on_it():
    run = simulated(noise=0.05)
    strongest = {str(run.grid.head(i)) for i in run.planted[:3]}
    assert strongest <= {str(h) for h in sweep(run, k=5).found}
    assert len(strongest & {str(h) for h in paper(run, 5, 150).found}) >= 2
    best = greedy(run, 3)
    assert best.table[-1]["joint_effect"] <= screened(run, 3).table[-1]["joint_effect"] < -4
    assert verify(run.fresh(1), best.found).target.p_value("logprob") < 0.05
    frame = run.measure(stratified(3, 270, 5, 0)).frame()
    assert isinstance(Measurements.from_frame(frame, run.grid), Measurements)


def test_it_is_quick():
    run = simulated()
    masks = stratified(200, 270, 5, 0)
    run.measure(masks[:1])
    started = time.perf_counter()
    run.measure(masks)
    assert time.perf_counter() - started < 1
    large = simulated(heads=4096)
    assert large.grid.shape == (32, 128)
    assert large.measure(bernoulli(200, 4096, 0.02, 0)).effects().std() > 0.1


@pytest.mark.parametrize("tail", ["t", "laplace"])
def test_a_fitted_world_repeats_the_sweep(tail):
    true = World(tail=tail, tail_scale=0.09, tail_shift=-0.4, tail_df=3, n_backups=0, seed=3)
    lead = np.random.default_rng(0).normal(1.0, 2.0, 500)
    fitted = fit_world(true.effects, 8, tail, intact_margins=lead, seed=9, noise=0.0)
    assert fitted.strong == pytest.approx(true.strong) and fitted.grid.size == 270
    assert fitted.tail_scale == pytest.approx(0.09, rel=0.3)
    assert fitted.tail_shift == pytest.approx(-0.4, abs=0.25)
    assert (fitted.lead_mean, fitted.lead_sd) == pytest.approx((1, 2), abs=0.2)
    assert (fitted.seed, fitted.noise) == (9, 0)
    total = [np.abs(world.effects).sum() for world in (true, fitted)]
    assert total[1] == pytest.approx(total[0], rel=0.2)
    assert (true.planted != fitted.planted).any()


def test_the_grid_is_exact():
    assert World(heads=270).grid.shape == (30, 9)
    assert World(heads=HeadGrid(6, 4, 2, 8)).grid.n_kv_heads == 2
    assert World(heads=37).grid.shape == (1, 37)


def test_laws_decrease_as_stated():
    assert power_law(3, -4, 1.0) == pytest.approx((-4, -2, -4 / 3))
    assert geometric(3, -4, 0.5) == (-4, -2, -1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(strong=()), "most negative first"),
        (dict(strong=(-1, -2)), "most negative first"),
        (dict(strong=(-30,)), "lower the floor"),
        (dict(n_backups=9), "n_backups"),
        (dict(heads=7), "do not fit"),
        (dict(tail="normal"), "choose t or laplace"),
        (dict(noise=0.5), "noise is 0.5"),
        (dict(lead_sd=float("nan")), "lead_sd is nan"),
        (dict(crosstalk="much"), "crosstalk is 'much'"),
        (dict(seed=-1), "seed"),
    ],
)
def test_impossible_worlds_are_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        World(**{"n_backups": 0, **wrong})


def test_bad_questions_are_refused():
    run = simulated()
    with pytest.raises(InputError, match="no gradient"):
        run.slopes(mask(run), score="accuracy")
    with pytest.raises(InputError, match="from 0 to 1"):
        run.slopes(mask(run), 1.5)
    with pytest.raises(InputError, match="columns?"):
        run.measure(np.zeros((1, 5), bool))
    with pytest.raises(InputError, match="at least 18"):
        fit_world(np.ones(10))
    with pytest.raises(InputError, match="plant fewer"):
        fit_world(np.ones(30))


def test_recovery_from_a_thousand_masks_of_4096_heads_takes_no_time():
    run = simulated(heads=4096)
    masks = stratified(1000, 4096, 82, 0)
    effects = run.measure(masks).effects()
    start = time.perf_counter()
    found = HeadLasso().fit(masks, effects).top(len(run.planted))
    assert time.perf_counter() - start < 5
    assert len(set(found) & set(run.planted)) >= len(run.planted) - 1
