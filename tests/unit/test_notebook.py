"""Numbers for the prose, and the time of a block."""

from __future__ import annotations

import sys
import time
import types

import numpy as np
import pytest
import torch

from csloc_utils.notebook import glue, timed


@pytest.fixture
def stored(monkeypatch):
    values = {}
    fake = types.ModuleType("myst_nb")
    fake.glue = lambda name, value, display: values.update({name: (value, display)})
    monkeypatch.setitem(sys.modules, "myst_nb", fake)
    return values


@pytest.mark.parametrize(
    "value", [np.float64(0.25), np.float32(0.25), np.array(0.25), torch.tensor(0.25), 0.25]
)
def test_glue_stores_plain_numbers(stored, value):
    """``np.float64(0.25)`` as text cannot be formatted in the book's prose."""
    glue("share", value)
    assert stored == {"share": (0.25, False)}
    assert type(stored["share"][0]) is float


def test_glue_keeps_text(stored):
    glue("heads", "L16H21, L3H4")
    assert stored["heads"][0] == "L16H21, L3H4"


def test_glue_does_nothing_without_the_book_tools(monkeypatch):
    monkeypatch.setitem(sys.modules, "myst_nb", None)
    glue("share", 0.25)


def test_timed_measures_a_block_even_if_it_fails():
    with pytest.raises(ValueError, match="stop"), timed() as timing:
        time.sleep(0.01)
        raise ValueError("stop")
    assert timing.seconds >= 0.01
