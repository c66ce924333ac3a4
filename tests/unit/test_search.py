import numpy as np
import pytest

from csloc_utils import search
from csloc_utils.errors import InputError
from csloc_utils.heads import HeadGrid
from fakes import PLANTED, FakeEvaluator, small_grid, tail

GRID = small_grid()
TINY = HeadGrid(n_layers=4, n_heads=5, n_kv_heads=5, head_width=8)
PLANTED_HEADS = [GRID.head(i) for i in PLANTED]


def with_backups():
    """Head 3 hides its backups 8 and 12: they matter, more than 15 and 16, once it is off."""
    effects = {3: -2.0, 8: -0.1, 12: -0.1, 15: -0.6, 16: -0.5}
    return FakeEvaluator(TINY, effects, interactions={(3, 8): -3.0, (3, 12): -2.5})


def damage(evaluator, heads):
    return -evaluator.measure(evaluator.grid.mask(heads)[None], count=False).effects()[0]


def test_sweep_sorts_all_heads_by_single_effect():
    evaluator = FakeEvaluator(GRID, tail(GRID))
    result = search.sweep(evaluator, k=5)
    assert result.method == "sweep" and result.k == 5
    assert result.found == PLANTED_HEADS
    assert len(result.heads) == len(result.table) == 270 == len(set(result.heads))
    effects = [row["effect"] for row in result.table]
    assert effects == sorted(effects) and effects[0] == pytest.approx(-3.0)
    assert [row["head"] for row in result.table] == [str(head) for head in result.heads]
    assert result.table[0]["accuracy_effect"] == -1.0
    assert result.evaluations == {"forward": 271, "backward": 0, "equivalents": 271}
    assert evaluator.evaluations["forward"] == 270
    assert search.sweep(evaluator).found == result.heads


def test_sweep_puts_a_harmful_head_last():
    result = search.sweep(FakeEvaluator(TINY, {2: -1.0, 6: +2.0}))
    assert (str(result.heads[0]), str(result.heads[-1])) == ("L0H2", "L1H1")


def test_equal_accuracy_is_ordered_by_log_probability():
    result = search.sweep(FakeEvaluator(TINY, {4: -0.1, 9: -0.2, 1: -5.0}), score="accuracy")
    assert [row["accuracy_effect"] for row in result.table[1:]] == [0.0] * 19
    assert [str(head) for head in result.heads[:4]] == ["L0H1", "L1H4", "L0H4", "L0H0"]


def test_greedy_finds_backups_that_single_effects_miss():
    evaluator = with_backups()
    greedy = search.greedy(evaluator, 3)
    singles = search.sweep(evaluator, k=3)
    assert [str(head) for head in greedy.heads] == ["L0H3", "L1H3", "L2H2"]
    assert [str(head) for head in singles.found] == ["L0H3", "L3H0", "L3H1"]
    assert damage(evaluator, greedy.heads) > 2 * damage(evaluator, singles.found)


def test_greedy_table_adds_up():
    evaluator = with_backups()
    result = search.greedy(evaluator, 4)
    effects = np.array([row["effect"] for row in result.table])
    joint = np.array([row["joint_effect"] for row in result.table])
    np.testing.assert_allclose(np.cumsum(effects), joint)
    assert joint[-1] == pytest.approx(-damage(evaluator, result.heads))
    assert [row["single_effect"] for row in result.table] == pytest.approx([-2.0, -0.1, -0.1, -0.6])
    accuracy = [row["accuracy_effect"] for row in result.table]
    np.testing.assert_allclose(
        np.cumsum(accuracy), [row["joint_accuracy_effect"] for row in result.table]
    )
    assert result.evaluations["forward"] == 1 + 20 + 19 + 18 + 17 == search.cost("greedy", 20, 4)
    assert evaluator.evaluations["forward"] == 20 + 19 + 18 + 17
    assert [len(measured.masks) for measured in result.extra["rounds"]] == [20, 19, 18, 17]


def test_greedy_keeps_what_it_found_and_never_measures_it_twice():
    rounds = search.greedy(with_backups(), 3).extra["rounds"]
    for number, measured in enumerate(rounds, start=1):
        assert (measured.masks.sum(axis=1) == number).all()
        assert len(np.unique(measured.masks, axis=0)) == len(measured.masks)


def test_greedy_without_damage_left_goes_on_with_the_least_bad_head():
    evaluator = FakeEvaluator(TINY, {i: 1.0 + i for i in range(20)} | {7: -1.0})
    result = search.greedy(evaluator, 2)
    assert [str(head) for head in result.heads] == ["L1H2", "L0H0"]
    assert result.table[1]["effect"] == pytest.approx(1.0)


def test_greedy_on_accuracy_goes_on_below_the_floor():
    evaluator = FakeEvaluator(TINY, {3: -5.0, 8: -0.2, 9: -0.4})
    result = search.greedy(evaluator, 3, score="accuracy")
    assert [str(head) for head in result.heads] == ["L0H3", "L1H4", "L1H3"]
    assert [row["effect"] for row in result.table] == [-1.0, 0.0, 0.0]


def test_greedy_can_take_every_head():
    result = search.greedy(FakeEvaluator(TINY, {3: -1.0}), 20)
    assert sorted(result.heads) == TINY.heads
    assert result.evaluations["forward"] == 1 + 20 * 21 // 2


def test_paper_finds_planted_heads_within_the_budget():
    evaluator = FakeEvaluator(GRID, tail(GRID, scale=0.02), noise=0.2)
    result = search.paper(evaluator, k=5, budget=150)
    assert set(result.heads) == set(PLANTED_HEADS)
    assert result.heads[0] == PLANTED_HEADS[0]
    assert result.evaluations == {"forward": 150, "backward": 0, "equivalents": 150}
    assert evaluator.evaluations["forward"] == 149
    assert len(result.table) == 5 and all(row["effect"] < 0 for row in result.table)
    assert all(row["selected"] and row["n_masks"] in (2, 3) for row in result.table)
    assert all(row["accuracy_effect"] <= 0 for row in result.table[:2])
    assert all(row["aliases"] == [] for row in result.table)
    assert result.extra["size"] == 5 and result.extra["never_ablated"] == []
    assert (result.extra["measurements"].masks.sum(axis=1) == 5).all()


def test_paper_on_bernoulli_masks():
    result = search.paper(FakeEvaluator(GRID, PLANTED), k=5, budget=400, design="bernoulli")
    assert set(result.heads) == set(PLANTED_HEADS)
    assert len(set(result.extra["measurements"].masks.sum(axis=1))) > 1


def test_paper_seed_and_budget():
    def masks(**options):
        evaluator = FakeEvaluator(GRID, PLANTED)
        return search.paper(evaluator, k=5, **options).extra["measurements"].masks

    assert (masks(budget=60, seed=3) == masks(budget=60, seed=3)).all()
    assert (masks(budget=60, seed=3) != masks(budget=60, seed=4)).any()
    assert (masks(budget=90, seed=3)[:59] == masks(budget=60, seed=3)).all()
    assert (masks(budget=60, size=13).sum(axis=1) == 13).all()


def test_paper_says_which_heads_are_fill_and_which_unseen():
    result = search.paper(FakeEvaluator(GRID, {40: -3.0}), k=5, budget=40, size=5)
    assert "L4H4" in [result.table[0]["head"], *result.table[0]["aliases"]]
    assert not all(row["selected"] for row in result.table)
    assert all(row["n_masks"] > 0 for row in result.table if row["selected"])
    # 39 masks of 5 in 270 heads: every head was off at most once, its mask-mates cannot be told
    # from it.
    first = result.table[0]
    assert first["n_masks"] == 1 and len(first["aliases"]) == 4
    assert first["head"] not in first["aliases"]
    assert len(result.extra["never_ablated"]) == 270 - 39 * 5


def test_paper_without_any_accuracy_change():
    result = search.paper(FakeEvaluator(GRID, {40: -0.01}), k=1, budget=150)
    assert result.table[0]["head"] == "L4H4" and result.table[0]["accuracy_effect"] is None


def test_paper_with_effects_shuffled_between_masks_finds_nothing_planted():
    class Shuffled(FakeEvaluator):
        def measure(self, masks, count=True):
            measured = super().measure(masks, count)
            order = np.random.default_rng(self.seed).permutation(len(masks))
            measured.scores = {name: values[order] for name, values in measured.scores.items()}
            return measured

    hits = [
        len(set(search.paper(Shuffled(GRID, PLANTED, seed=s), 5, 150).heads) & set(PLANTED_HEADS))
        for s in range(10)
    ]
    assert np.mean(hits) < 0.5


@pytest.mark.parametrize("n_heads, size", [(270, 5), (1024, 20), (20, 1), (1, 1), (4096, 82)])
def test_default_mask_size(n_heads, size):
    assert search.default_size(n_heads) == size


def test_cost():
    assert search.cost("sweep", 270, 5) == 271
    assert search.cost("greedy", 1024, 5) == 1 + 5 * 1024 - 10
    assert search.cost("paper", 270, 5) == 3


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda e: search.sweep(e, k=0), "k is 0"),
        (lambda e: search.sweep(e, budget=20), "at least 21 evaluations"),
        (lambda e: search.sweep(e, score="bleu"), "logprob, accuracy"),
        (lambda e: search.greedy(e, 0), "k is 0"),
        (lambda e: search.greedy(e, 21), "from 1 to 20"),
        (lambda e: search.greedy(e, 2, budget=39), "at least 40 evaluations"),
        (lambda e: search.greedy(e, 2, score="bleu"), "unknown score"),
        (lambda e: search.paper(e, 0, 50), "k is 0"),
        (lambda e: search.paper(e, 21, 50), "from 1 to 20"),
        (lambda e: search.paper(e, 1.0, 50), "whole number"),
        (lambda e: search.paper(e, 1, 0), "budget of 0"),
        (lambda e: search.paper(e, 1, 2), "at least 3 evaluations"),
        (lambda e: search.paper(e, 1, -5), "budget is -5"),
        (lambda e: search.paper(e, 5, 4), "only 3 different heads"),
        (lambda e: search.paper(e, 2, 50, size=0), "mask size"),
        (lambda e: search.paper(e, 2, 50, size=21), "mask size"),
        (lambda e: search.paper(e, 2, 50, design="latin"), "stratified, bernoulli"),
        (lambda e: search.paper(e, 2, 50, seed=-1), "seed is -1"),
        (lambda e: search.paper(e, 2, 50, score="bleu"), "unknown score"),
        (lambda e: search.cost("magic", 10, 1), "sweep, race, greedy"),
    ],
)
def test_bad_input_measures_nothing(call, says):
    evaluator = FakeEvaluator(TINY, {3: -1.0})
    with pytest.raises(InputError, match=says):
        call(evaluator)
    assert evaluator.n_measured == 0


def test_paper_with_constant_effects_is_an_error():
    with pytest.raises(InputError, match="same effect"):
        search.paper(FakeEvaluator(TINY, {}), 2, 20)
