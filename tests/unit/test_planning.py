"""A plan says what the searches say of their own cost."""

import pytest

from csloc_utils.errors import InputError
from csloc_utils.planning import plan
from csloc_utils.search import cost


def test_costs_are_those_of_the_searches():
    got = plan(270, 5)
    assert got.equivalents["screened"] == 41
    assert got.equivalents["greedy"] == cost("greedy", 270, 5) == 1341
    assert 100 <= got.equivalents["paper"] <= 200  # as the paper says of its own models
    assert 100 <= plan(1024, 5).equivalents["paper"] <= 200
    assert got.minutes is None


def test_minutes_follow_the_time_of_a_mask():
    got = plan(270, 5, seconds=0.75)
    assert got.minutes["sweep"] == pytest.approx(271 * 0.75 / 60)


def test_more_items_and_less_confidence_resolve_more():
    few, many = plan(270, n_items=12), plan(270, n_items=48)
    assert 1.8 < few.resolved / many.resolved < 2.3
    assert plan(270).resolved == pytest.approx(0.52, abs=0.02)  # 24 items, 90 %, power 0.8
    assert plan(270, confidence=0.99).resolved > plan(270).resolved
    assert plan(270, spread=2.0).resolved == pytest.approx(2 * plan(270).resolved)


def test_bad_input():
    for options in (
        dict(k=0),
        dict(k=271),
        dict(n_items=1),
        dict(confidence=1),
        dict(spread=0),
        dict(seconds=-1),
        dict(seconds=float("nan")),
        dict(spread=float("inf")),
    ):
        with pytest.raises(InputError):
            plan(270, **options)
