"""Two small things that every chapter needs: numbers for its prose, and the time a step took.

In a cell, ``glue("accuracy", 0.93)`` stores a number; in the text, ``{glue:text}`accuracy:.2f``
prints it, so that no number is ever typed. Where the book's tools are not installed (Colab, a
chapter copied alone), `glue` does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np


def glue(name: str, value: object) -> None:
    """Store `value` in the running cell under `name`, for the prose of the book.

    Parameters
    ----------
    name : str
        Unique in the whole chapter.
    value : object
        A number or a short text. NumPy and torch scalars become plain numbers first, since only
        those can be formatted in the text.
    """
    try:
        from myst_nb import glue as store
    except ImportError:
        return
    store(name, _plain(value), display=False)


def _plain(value: object) -> object:
    if isinstance(value, np.generic) or (hasattr(value, "item") and getattr(value, "ndim", 1) == 0):
        return value.item()
    return value


@dataclass
class Timing:
    """Wall-clock time of one `timed` block, in seconds; 0 until the block ends."""

    seconds: float = 0.0


@contextmanager
def timed() -> Iterator[Timing]:
    """Measure a block: ``with timed() as t: ...``, then ``t.seconds``.

    It takes the place of the cell magic of that purpose, under which nnsight cannot find the
    source of a trace.
    """
    timing, start = Timing(), time.perf_counter()
    try:
        yield timing
    finally:
        timing.seconds = time.perf_counter() - start
