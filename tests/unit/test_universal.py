"""Universal heads: planted ones are claimed and confirmed, a null world claims nothing."""

import numpy as np
import pytest

from csloc_utils.designs import bernoulli
from csloc_utils.errors import InputError
from csloc_utils.heads import Head, HeadGrid
from csloc_utils.simulate import SimulatedEvaluator
from csloc_utils.universal import (
    active_heads,
    confirm_alone,
    confirmed,
    mask_p_values,
    placement,
    single_p_values,
)
from csloc_utils.worlds import World
from fakes import FakeEvaluator, small_grid

TASKS = ["sums", "towns", "text"]
EVERYWHERE, TWO, ONE = [12, 14], 121, 200


def planted(noise=0.0):
    """Two heads that every task needs, one that two need, one that one needs; small gains."""
    grid = small_grid()
    strong = [{ONE: -2.5, TWO: -2.0}, {TWO: -2.0}, {}]
    shared = dict.fromkeys(EVERYWHERE, -2.0) | {30: 0.5}
    return {
        name: FakeEvaluator(grid, shared | own, noise=noise, seed=seed, name=name)
        for seed, (name, own) in enumerate(zip(TASKS, strong))
    }


def joint_effects(judges, masks):
    return np.column_stack([j.measure(masks).effects() for j in judges.values()])


def test_planted_universal_heads_are_claimed_by_masks_and_by_single_heads():
    judges = planted(noise=0.3)
    grid = judges["sums"].grid
    masks = bernoulli(150, grid.size, 0.03, 1)
    routes = (
        mask_p_values(masks, joint_effects(judges, masks)),
        single_p_values([j.measure(grid.single_masks()) for j in judges.values()]),
    )
    for p_values in routes:
        assert p_values.shape == (3, grid.size) and ((p_values >= 0) & (p_values <= 1)).all()
        assert sorted(active_heads(p_values, TASKS, level=0.05).heads) == EVERYWHERE
        shared = active_heads(p_values, TASKS, level=0.05, at_least=2)
        assert sorted(shared.heads) == [*EVERYWHERE, TWO]
        table = active_heads(p_values, TASKS).table(grid, 3)
        assert table["claimed"].tolist()[:2] == [True, True]
        assert set(table["head"][:2]) == {"L1H3", "L1H5"} and set(table["kv_group"][:2]) == {1}


def test_a_null_world_claims_nothing():
    claims = 0
    for seed in range(6):
        worlds = [
            SimulatedEvaluator(world=World(heads=60, null=True, seed=9 * seed + i)) for i in (0, 1)
        ]
        grid = worlds[0].grid
        masks = bernoulli(60, grid.size, 0.05, seed)
        effects = np.column_stack([w.measure(masks).effects() for w in worlds])
        by_masks = mask_p_values(masks, effects, n_resamples=1000)
        alone = single_p_values([w.measure(grid.single_masks()) for w in worlds])
        claims += len(active_heads(by_masks, "ab").heads) + len(active_heads(alone, "ab").heads)
        assert (by_masks.max(axis=0) <= 0.2).mean() < 0.15  # cautious: 0.04 in the long run
    assert claims == 0


def test_a_head_of_one_task_only_is_claimed_no_more_often_than_the_level():
    rng, hits = np.random.default_rng(0), 0
    for _ in range(400):
        p = np.vstack([rng.uniform(size=20), np.full(20, 1e-6)])
        hits += bool(active_heads(p, "ab", level=0.1).heads)
    assert hits / 400 < 0.14
    assert hits  # the other task's certainty is used: not everything is swallowed


def test_combined_p_values_follow_the_stated_formula():
    p = np.array([[0.01, 0.2], [0.03, 0.001], [0.5, 0.04]])
    combined = [active_heads(p, TASKS, at_least=u).combined.tolist() for u in (1, 2, 3)]
    assert np.allclose(combined, [[0.03, 0.003], [0.06, 0.08], [0.5, 0.2]])
    same = active_heads(p[[2, 0, 1]], TASKS)  # the order of the tasks does not matter
    assert np.allclose(same.combined, combined[2])
    assert active_heads(p, TASKS).table(small_grid(), 2)["worst_task"].tolist() == ["sums", "text"]


def test_items_of_one_fact_are_one_piece_of_evidence():
    grid = small_grid()
    few = FakeEvaluator(grid, {0: -1.0}, n_items=4, seed=3)
    sweep = few.measure(grid.single_masks())
    doubled = few.measure(grid.single_masks())
    for name, values in doubled.scores.items():
        doubled.scores[name] = np.repeat(values, 5, axis=1)
    doubled.baseline = {n: np.repeat(v, 5) for n, v in doubled.baseline.items()}
    doubled.facts = np.repeat(doubled.facts, 5)
    assert np.allclose(single_p_values([sweep]), single_p_values([doubled]))
    assert single_p_values([sweep])[0, 1] == 1  # changes no item


def test_confirmation_needs_every_task_and_says_how_far():
    judges = planted()
    grid = judges["sums"].grid
    alone = confirm_alone(judges, [grid.head(i) for i in (*EVERYWHERE, TWO, ONE, 30)])
    assert confirmed(alone) == ["L1H3", "L1H5"]
    assert confirmed(alone, at_least=2) == ["L1H3", "L1H5", str(grid.head(TWO))]
    row = alone.set_index(["head", "task"]).loc[("L1H3", "text")]
    assert row["low"] < row["drop"] < row["high"] and row["drop"] == pytest.approx(2.0)
    gain = alone[alone["head"] == str(grid.head(30))]
    assert (gain["drop"] < 0).all() and not gain["needed"].any()


def test_where_heads_sit_beside_chance():
    grid = small_grid()
    group = placement(grid, [Head(1, 3), Head(1, 4), Head(1, 5)])
    assert (group.n_early, group.n_sharing) == (3, 3)
    assert group.expected_early == pytest.approx(3 * 18 / 270)
    assert group.p_early == pytest.approx(18 * 17 * 16 / (270 * 269 * 268))
    assert group.p_sharing == pytest.approx(3 / 84, abs=0.01)  # 3 groups of C(9, 3) choices
    assert group.expected_sharing == pytest.approx(3 * 2 / 8, abs=0.03)
    apart = placement(grid, [Head(0, 3), Head(1, 4), Head(29, 5)])
    assert (apart.n_early, apart.n_sharing, apart.p_sharing) == (2, 0, 1.0)
    mqa = placement(HeadGrid(4, 6, 1, 8), [Head(0, 1), Head(0, 4)])
    assert mqa.n_sharing == 1 and mqa.p_sharing == 1  # one group: sharing says nothing


def test_what_makes_no_sense_is_refused():
    grid = small_grid()
    judges = planted()
    p = np.full((2, 5), 0.5)
    for bad in (p[0], p * 3, np.full((2, 5), np.nan), np.zeros((2, 0))):
        with pytest.raises(InputError):
            active_heads(bad, "ab")
    for bad in (["a"], ["a", "a"], "abc"):
        with pytest.raises(InputError):
            active_heads(p, bad)
    with pytest.raises(InputError, match="one task"):
        active_heads(p[:1], "a")
    with pytest.raises(InputError):
        active_heads(p, "ab", level=0)
    with pytest.raises(InputError):
        active_heads(p, "ab", at_least=3)
    with pytest.raises(InputError, match="n_tasks"):
        mask_p_values(np.eye(4, dtype=bool), np.zeros(4))
    with pytest.raises(InputError, match="single_masks"):
        single_p_values([judges["sums"].measure(grid.single_masks()[:3])])
    with pytest.raises(InputError):
        confirm_alone({}, [Head(0, 0)])
    with pytest.raises(InputError):
        confirm_alone(judges, [])
    with pytest.raises(InputError):
        confirm_alone(judges, [Head(99, 0)])
