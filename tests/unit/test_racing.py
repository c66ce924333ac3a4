"""Races: who is settled, at what cost, and how often wrongly."""

import numpy as np
import pytest

from csloc_utils.errors import InputError
from csloc_utils.heads import HeadGrid
from csloc_utils.measurements import Measurements, Scorer
from csloc_utils.racing import race, raced
from csloc_utils.simulate import SimulatedEvaluator
from csloc_utils.worlds import World


class Table(Scorer):
    """Adds up given item effects of single heads."""

    def __init__(self, item_effects, facts=None):
        self.values = np.asarray(item_effects, float)
        n_heads, n_items = self.values.shape
        self.grid = HeadGrid(1, n_heads, n_heads, 4)
        self.scores = ("logprob", "accuracy")
        self.facts = np.arange(n_items).astype(str) if facts is None else np.asarray(facts)
        super().__init__()

    def measure(self, masks, count=True):
        masks = self.grid.check_masks(masks)
        scores = {
            "logprob": masks @ self.values,
            "accuracy": np.zeros((len(masks), len(self.facts))),
        }
        intact = {name: np.zeros_like(v) for name, v in scores.items()}
        return Measurements(self.grid, masks, scores, intact, self.facts)


def noisy(means, n_items, spread=0.5, seed=0):
    rng = np.random.default_rng(seed)
    return np.asarray(means)[:, None] + spread * rng.normal(size=(len(means), n_items))


CLEAR = [0.0] * 10 + [-4.0, -3.0] + [0.0] * 8


def test_a_clear_race_settles_on_the_first_batch_and_costs_a_part():
    table = Table(noisy(CLEAR, 48))
    result = race(table, table.grid.single_masks(), 2)
    assert result.settled
    assert result.found.tolist() == [10, 11]
    assert (result.n_items == 8).all()
    assert result.equivalents == pytest.approx(1 + 20 * 8 / 48)
    assert (result.status[[10, 11]] == "in").all()
    assert np.count_nonzero(result.status == "out") == 18


def test_only_what_is_open_is_scored_on():
    means = np.array(CLEAR)
    means[0] = -2.8  # close to the second of the two
    table = Table(noisy(means, 48))
    result = race(table, table.grid.single_masks(), 2)
    assert result.n_items[10] < result.n_items[11] == result.n_items[0]
    assert result.n_items[5] == 8
    assert result.found[0] == 10


def test_equal_candidates_stay_open_and_a_tolerance_settles_them():
    table = Table(noisy([-1.0, -1.0, 0.0, 0.0], 24, 0.05))
    masks = table.grid.single_masks()
    tie = race(table, masks, 1, seed=3)
    assert not tie.settled
    assert set(tie.status[:2]) == {"open"} and set(tie.status[2:]) == {"out"}
    assert race(table, masks, 1, tolerance=0.3, seed=3).settled


def test_items_are_compared_pairwise():
    # Items differ a hundred times more than heads do, but alike for both heads.
    table = Table(
        noisy([-1.0, -0.5, 0.0], 16, 0.02) + 50 * np.random.default_rng(1).normal(size=16)
    )
    assert race(table, table.grid.single_masks(), 1).found.tolist() == [0]
    assert race(table, table.grid.single_masks(), 1).settled


def test_items_of_one_fact_are_one_observation():
    # Four facts that agree by luck, each asked eight times: not thirty-two observations.
    values = np.repeat(noisy([-1.0, 0.0], 4, 0.01), 8, axis=1)
    many = Table(values)
    few = Table(values, np.repeat(["a", "b", "c", "d"], 8))
    assert race(many, many.grid.single_masks(), 1).settled
    assert not race(few, few.grid.single_masks(), 1).settled


def test_a_facts_items_stay_in_one_batch():
    facts = np.repeat([f"fact {i}" for i in range(12)], 3)
    table = Table(noisy(CLEAR, 36), facts)
    result = race(table, table.grid.single_masks(), 2, batch=7)
    assert set(result.n_items) <= {9, 18, 27, 36}


def test_a_budget_ends_the_race():
    table = Table(noisy(np.linspace(-1, 0, 20), 48, 3.0))
    masks = table.grid.single_masks()
    long = race(table, masks, 5)
    short = race(table, masks, 5, budget=8)
    assert short.equivalents <= 8 < long.equivalents
    assert not short.settled
    with pytest.raises(InputError, match="at least 5 evaluations"):
        race(table, masks, 5, budget=3)


@pytest.mark.parametrize(
    ("k", "options", "message"),
    [
        (20, {}, "k"),
        (0, {}, "k"),
        (2, {"confidence": 1.0}, "between 0 and 1"),
        (2, {"tolerance": -0.1}, "0 or more"),
        (2, {"score": "bleu"}, "unknown score"),
        (2, {"batch": 0}, "batch"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(k, options, message):
    table = Table(noisy(CLEAR, 24))
    table.measure = None
    with pytest.raises(InputError, match=message):
        race(table, np.eye(20, dtype=bool), k, **options)


def test_the_chance_of_a_wrong_end_keeps_its_level():
    """Two heads of which one is hardly worse: the race may stay open, but seldom ends wrongly."""
    wrong = ended = 0
    for seed in range(200):
        table = Table(noisy([-1.02, -1.0], 40, 0.5, seed))
        result = race(table, table.grid.single_masks(), 1, confidence=0.8, seed=seed)
        ended += result.settled
        wrong += result.settled and result.found[0] == 1
    assert ended > 20  # or the test says nothing
    assert wrong <= 0.2 * 200 / 2 + 12  # of an end to either side, the wrong one is at most half


def test_raced_names_heads_in_the_race_among_those_that_are_asked():
    world = World(strong=(-3.0, -2.5, -2.2), n_backups=0, tail_scale=0.02, heads=60, seed=1)
    evaluator = SimulatedEvaluator(world=world, n_items=48)
    result = raced(evaluator, 3)
    assert {world.grid.flat(h) for h in result.found} == set(world.planted)
    assert [row["status"] for row in result.table[:3]] == ["in"] * 3
    assert result.evaluations["equivalents"] < 61
    first = int(world.planted[0])
    others = raced(evaluator, 2, off=[first])
    assert world.grid.head(first) not in others.heads
    some = raced(evaluator, 1, candidates=[first, 5, 7, 9])
    assert len(some.heads) == 4 and some.found == [world.grid.head(first)]
