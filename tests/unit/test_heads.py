"""Heads and grids: names, flat order, key/value groups, bad input."""

import numpy as np
import pytest

from csloc_utils.errors import InputError
from csloc_utils.heads import Head, HeadGrid

GRID = HeadGrid(n_layers=3, n_heads=6, n_kv_heads=2, head_width=4)


def test_names_and_flat_order_round_trip():
    assert str(Head(16, 21)) == "L16H21"
    assert Head.parse("L16H21") == Head(16, 21)
    assert [GRID.flat(h) for h in GRID.heads] == list(range(GRID.size))
    assert [GRID.head(i) for i in range(GRID.size)] == GRID.heads
    assert GRID.flat(Head(1, 0)) == 6


def test_consecutive_query_heads_share_a_kv_head():
    assert [GRID.kv_group(Head(0, i)) for i in range(6)] == [0, 0, 0, 1, 1, 1]


def test_masks_are_true_where_ablated():
    mask = GRID.mask(GRID.parse("L2H5,L0H1"))
    assert mask.dtype == bool and list(np.flatnonzero(mask)) == [1, 17]
    assert (GRID.single_masks().sum(1) == 1).all()


@pytest.mark.parametrize("text", ["L1H", "1H2", "L1H2x", "L-1H2", "l1h2", "", "L1.0H2", "L١H٢"])
def test_malformed_names(text):
    with pytest.raises(InputError, match="like L16H21"):
        Head.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [("L3H0", "layers 0 … 2"), ("L0H6", "heads 0 … 5"), ("L1H1,L1H1", "twice"), ([], "no head")],
)
def test_bad_lists_of_heads(text, message):
    with pytest.raises(InputError, match=message):
        GRID.parse(text)


@pytest.mark.parametrize("sizes", [(0, 4, 2, 8), (2, 4, 3, 8), (2, 4, 2, 0)])
def test_impossible_grids(sizes):
    with pytest.raises(InputError):
        HeadGrid(*sizes)


@pytest.mark.parametrize("masks", [np.zeros((2, 17)), np.zeros((0, 18)), np.full((1, 18), 0.5)])
def test_bad_masks(masks):
    with pytest.raises(InputError, match="masks"):
        GRID.check_masks(masks)


def test_zero_one_masks_become_bool():
    assert GRID.check_masks(np.ones(18, int)).dtype == bool
