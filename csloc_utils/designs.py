"""Which heads to switch off together: the measurement matrix.

A design is a bool array ``(n_masks, n_heads)``; a row is one *mask*, ``True`` = ablated, and costs
one evaluation. Two designs come from the paper: *Bernoulli* switches every head off with a fixed
probability, *stratified* deals the heads out like cards, so that every mask has the same size and
every head is ablated equally often. A third one, :func:`layer_matched`, draws the random heads that
a located set is compared with.

All randomness comes from ``random_state``: ``None``, an int or a :class:`numpy.random.Generator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np
from scipy.stats import binom

from csloc_utils.errors import InputError
from csloc_utils.heads import Head, HeadGrid

RandomState = int | np.integer | np.random.Generator | None

# How often a mask that was already dealt is dealt again before it is accepted as a repetition.
_RETRIES = 50


def as_generator(random_state: RandomState) -> np.random.Generator:
    """Turn a seed into a generator; a generator is used as it is (and moves on).

    Raises
    ------
    InputError
        When ``random_state`` is not ``None``, a non-negative int or a ``numpy.random.Generator``.
    """
    if isinstance(random_state, np.random.Generator):
        return random_state
    if random_state is not None:
        random_state = check_count("random_state", random_state, low=0)
    return np.random.default_rng(random_state)


def check_count(name: str, value: object, low: int = 1, high: int | None = None) -> int:
    """Return ``value`` as an int if it is a whole number in ``low..high``, or raise InputError."""
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
    is_whole = isinstance(value, Integral) and not isinstance(value, (bool, np.bool_))
    if not is_whole or value < low or (high is not None and value > high):
        raise InputError(f"{name} is {value!r}: give a whole number {bounds}")
    return int(value)


def bernoulli(n_masks: int, n_heads: int, p: float, random_state: RandomState = None) -> np.ndarray:
    """Masks in which every head is ablated with probability ``p``, independently of the others.

    A mask without any head would only repeat the intact baseline, so empty masks are not returned:
    rows are drawn from the Bernoulli distribution *given that at least one head is ablated*. The
    expected mask size is therefore ``n_heads * p / (1 - (1 - p) ** n_heads)``, slightly more than
    ``n_heads * p``. Rows are independent of each other, so the same mask may come up twice; with
    the same seed, a larger ``n_masks`` only adds rows.

    Parameters
    ----------
    n_masks, n_heads : int
        Shape of the design.
    p : float
        Probability of ablating a head, 0 < p < 1.
    random_state : None, int or numpy.random.Generator
        Seed of the draw.

    Returns
    -------
    ndarray of bool, shape (n_masks, n_heads)

    Raises
    ------
    InputError
        For ``p`` outside (0, 1), or counts below 1.
    """
    n_masks = check_count("n_masks", n_masks)
    n_heads = check_count("n_heads", n_heads)
    if not isinstance(p, Real) or not 0 < p < 1:
        raise InputError(f"p is {p!r}: give the probability of ablating a head, between 0 and 1")
    rng = as_generator(random_state)
    masks = rng.random((n_masks, n_heads)) < p
    # Redraw empty rows by their number of heads (a binomial cut off below 1), not by trial and
    # error, which would hardly ever end when n_heads * p is tiny.
    empty = np.flatnonzero(~masks.any(axis=1))
    draws = rng.spawn(1)[0].random((len(empty), 1 + n_heads))
    sizes = binom.isf(draws[:, 0] * binom.sf(0, n_heads, p), n_heads, p).clip(1, n_heads)
    ranks = draws[:, 1:].argsort(axis=1).argsort(axis=1)
    masks[empty] = ranks < sizes[:, None]
    return masks


def stratified(
    n_masks: int, n_heads: int, size: int, random_state: RandomState = None
) -> np.ndarray:
    """Masks of exactly ``size`` heads that ablate every head equally often, give or take one.

    Every mask takes the heads used least so far; ties are broken at random. This keeps the balance
    after *every* row, so the first rows of a long design are themselves a balanced design: with the
    same seed, a larger ``n_masks`` only adds rows. A mask that was dealt before is dealt again
    while another choice exists, so repetitions occur only when the balance leaves nothing else (for
    instance more than ``n_heads`` masks of size 1).

    Parameters
    ----------
    n_masks, n_heads : int
        Shape of the design.
    size : int
        Heads in each mask, 1 to ``n_heads``.
    random_state : None, int or numpy.random.Generator
        Seed of the draw.

    Returns
    -------
    ndarray of bool, shape (n_masks, n_heads)

    Raises
    ------
    InputError
        For counts below 1, or ``size`` above ``n_heads``.
    """
    n_masks = check_count("n_masks", n_masks)
    n_heads = check_count("n_heads", n_heads)
    size = check_count("mask size", size, high=n_heads)
    rng = as_generator(random_state)
    masks = np.zeros((n_masks, n_heads), dtype=bool)
    used = np.zeros(n_heads, dtype=int)
    dealt: set[bytes] = set()
    for row in masks:
        for _ in range(_RETRIES):
            chosen = np.lexsort((rng.random(n_heads), used))[:size]
            row[:] = False
            row[chosen] = True
            if row.tobytes() not in dealt:
                break
        dealt.add(row.tobytes())
        used += row
    return masks


def layer_matched(
    grid: HeadGrid, heads: Sequence[Head], n_sets: int, random_state: RandomState = None
) -> np.ndarray:
    """Random head sets to compare ``heads`` with: as many other heads from the same layers.

    Each set holds, for every located head, one other head of its layer, without repetition in the
    set. When a layer has too few other heads, the missing ones come from the nearest layer that
    still has some (of two equally near ones, the lower). Sets are drawn independently, so two may
    coincide.

    Parameters
    ----------
    grid : HeadGrid
        Layout of the model's heads.
    heads : sequence of Head
        The located heads.
    n_sets : int
        How many sets to draw; 0 gives an empty design.
    random_state : None, int or numpy.random.Generator
        Seed of the draw; a larger ``n_sets`` only adds sets.

    Returns
    -------
    ndarray of bool, shape (n_sets, grid.size)

    Raises
    ------
    InputError
        When ``heads`` is empty, repeats a head or leaves the grid, or when it holds more than half
        of all heads, so that no disjoint set of the same size exists.
    """
    n_sets = check_count("number of random head sets", n_sets, low=0)
    heads = check_heads(grid, heads)
    if 2 * len(heads) > grid.size:
        raise InputError(
            f"{len(heads)} heads of {grid.size} leave no {len(heads)} other heads to compare with: "
            f"verify at most {grid.size // 2} heads"
        )
    rng = as_generator(random_state)
    masks = np.zeros((n_sets, grid.size), dtype=bool)
    for row in masks:
        row[_matched_set(grid, heads, rng)] = True
    return masks


def check_heads(grid: HeadGrid, heads: Sequence[Head]) -> list[Head]:
    """Return ``heads`` as a list if they are distinct heads of ``grid``, or raise InputError."""
    heads = list(heads)
    for head in heads:
        if not isinstance(head, Head):
            raise InputError(f"{head!r} is not a Head: use HeadGrid.parse for names like L13H4")
        grid.check(head)
    if not heads:
        raise InputError("no head given: name at least one, like L13H4")
    twice = sorted({str(head) for head in heads if heads.count(head) > 1})
    if twice:
        raise InputError(f"{', '.join(twice)} given twice: name each head once")
    return heads


def _matched_set(grid: HeadGrid, heads: list[Head], rng: np.random.Generator) -> list[int]:
    """Draw one set: from the layers themselves, then from the nearest ones with heads left."""
    taken = {grid.flat(head) for head in heads}
    free = {}
    for layer in range(grid.n_layers):
        others = [grid.flat(Head(layer, index)) for index in range(grid.n_heads)]
        free[layer] = list(rng.permutation([head for head in others if head not in taken]))
    chosen, missing = [], []
    for layer in sorted(head.layer for head in heads):
        if free[layer]:
            chosen.append(free[layer].pop())
        else:
            missing.append(layer)
    for layer in missing:
        nearest = min((near for near in free if free[near]), key=lambda near: abs(near - layer))
        chosen.append(free[nearest].pop())
    return [int(head) for head in chosen]
