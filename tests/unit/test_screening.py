"""Conditional screening: finds what is planted, pays what it says, sees backups, obeys contrast."""

import numpy as np
import pytest

import shown
import tiny
from csloc_utils.errors import InputError
from csloc_utils.gradients import Slopes
from csloc_utils.measure import Evaluator
from csloc_utils.screening import default_budget, screened
from csloc_utils.search import cost, greedy
from fakes import FakeEvaluator, small_grid, tail


class Sloped(FakeEvaluator):
    """A fake whose slopes are its effects given what is off, blurred."""

    blur = 0.2

    def slopes(self, masks, strength=1.0, score="logprob", count=True):
        if count:
            self.evaluations["forward"] += len(masks)
            self.evaluations["backward"] += len(masks)
            self.evaluations["equivalents"] += 3 * len(masks)
        effects = np.repeat(self.head_effects[None], len(masks), axis=0)
        for (i, j), extra in self.interactions.items():
            effects[:, j] += extra * masks[:, i]
            effects[:, i] += extra * masks[:, j]
        noise = np.random.default_rng(int(masks.sum())).normal(scale=self.blur, size=effects.shape)
        return Slopes(masks, strength, effects + noise, score)


def test_planted_heads_are_found_for_41_equivalents():
    fake = Sloped(small_grid(), tail(small_grid()))
    result = screened(fake, 5)
    assert {str(h) for h in result.found} == {"L4H4", "L13H4", "L13H5", "L22H2", "L28H3"}
    assert result.evaluations == {"forward": 31, "backward": 5, "equivalents": 41}
    assert fake.evaluations["equivalents"] == 40  # the baseline is counted by the search
    assert result.table[-1]["joint_effect"] == pytest.approx(
        sum(row["effect"] for row in result.table)
    )
    assert all(row["effect"] < 0 for row in result.table)


def test_a_backup_is_seen_once_its_head_is_off():
    effects = {7: -2.0, 30: -0.9, 31: -0.8, **{i: -0.3 for i in range(100, 130)}}
    fake = Sloped(small_grid(), effects, interactions={(7, 200): -3.0})
    fake.blur = 0.05
    assert [h.layer * 9 + h.index for h in screened(fake, 2).found] == [7, 200]


@pytest.mark.parametrize(
    ("budget", "shares"), [(21, [1] * 5), (24, [2, 2, 2, 1, 1]), (None, [5] * 5)]
)
def test_a_budget_is_spent_evenly_and_never_exceeded(budget, shares):
    fake = Sloped(small_grid(), tail(small_grid()))
    result = screened(fake, 5, budget)
    assert [len(r["candidates"]) for r in result.extra["rounds"]] == shares
    assert result.evaluations["equivalents"] == (budget or default_budget(5))


def test_contrast_passes_over_heads_that_everything_needs():
    grid = small_grid()
    target = Sloped(grid, {5: -3.0, 50: -2.0, 60: -1.5})
    other = Sloped(grid, {5: -3.0, 60: +2.0})
    assert str(screened(target, 1).found[0]) == str(grid.head(5))
    result = screened(target, 2, contrast=[other])
    assert result.found == [grid.head(50), grid.head(60)]  # a gain of the other is no merit
    assert result.evaluations["equivalents"] == default_budget(2, 2) == 2 * 17
    assert result.table[0]["joint_effect"] == pytest.approx(-2.0)


def test_rows_do_not_depend_on_the_scale_of_effects():
    small, large = (
        screened(Sloped(small_grid(), {i: s * e for i, e in tail(small_grid()).items()}), 5)
        for s in (1, 10)
    )
    assert small.found[:2] == large.found[:2]


def test_accuracy_is_lowered_with_candidates_from_the_log_probability():
    fake = Sloped(small_grid(), tail(small_grid()), threshold=-2.0)
    result = screened(fake, 2, score="accuracy")
    assert result.table[-1]["joint_accuracy_effect"] < -0.5


def test_bad_input_is_refused_before_anything_is_measured():
    fake = Sloped(small_grid(), tail(small_grid()))
    other = Sloped(tiny.head_model("llama").grid, {})
    for options in (
        dict(k=0),
        dict(k=271),
        dict(budget=20),
        dict(score="x"),
        dict(contrast=[other]),
        dict(contrast=[Sloped(small_grid(), {})], budget=41),
    ):
        with pytest.raises(InputError):
            screened(fake, **options)
    assert fake.n_measured == 0
    assert cost("screened", 270, 5) == 21


def test_on_a_model_it_finds_what_greedy_finds_when_all_heads_are_candidates():
    model = tiny.head_model("llama")
    run = Evaluator(model, shown.task(model), store=":memory:", progress=False)
    all_of_them = screened(run, 3, budget=1 + 3 * (3 + 12))
    slow = greedy(run, 3)
    assert all_of_them.found == slow.found
    assert all_of_them.table[-1]["joint_effect"] == slow.table[-1]["joint_effect"]
