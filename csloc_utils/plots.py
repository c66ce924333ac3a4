"""The figures of the book: heads, effects, recovery, additivity, damage.

Every function draws on ``ax`` (or on a new figure of a fitting size) and returns the Axes. There
are no titles: in the book the caption says what a figure shows. Colours are told apart by
colour-blind readers, and nothing is told by colour alone. Effects are negative for needed heads;
drops are positive for damage.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from csloc_utils.designs import check_count
from csloc_utils.errors import InputError
from csloc_utils.heads import Head, HeadGrid

if TYPE_CHECKING:
    from csloc_utils.verify import Verification

# Okabe and Ito's palette (2008), as in seaborn's "colorblind".
NEEDED, OTHER, RANDOM = "#D55E00", "#0072B2", "#6E6E6E"
_MAX_NAMES = 12
_SEARCHES = ("screened", "greedy", "sweep", "gradient", "paper, stratified", "paper, Bernoulli")
_UNITS = {
    "logprob": "log-probability (nats)",
    "accuracy": "accuracy",
    "accuracy_norm": "accuracy (length-normalized)",
}


def set_style() -> None:
    """Set the look of the book's figures for the whole session; call it once in a chapter."""
    sns.set_theme(
        context="notebook",
        style="ticks",
        palette="colorblind",
        rc={
            "figure.dpi": 110,
            "savefig.dpi": 150,
            "figure.figsize": (7.0, 4.0),
            "figure.constrained_layout.use": True,
            "font.size": 11,
            "axes.labelsize": 11,
            "xtick.labelsize": 10,
            "ytick.labelsize": 10,
            "legend.fontsize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#E6E6E6",
            "grid.linewidth": 0.8,
            "axes.axisbelow": True,
        },
    )


def head_map(
    values: np.ndarray,
    grid: HeadGrid,
    label: str = "effect on log-probability (nats)",
    mark: Sequence[Head] = (),
    limit: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Map of one value per head: layers from left to right, heads of a layer from top to bottom.

    Values of both signs, or only negative ones, get a diverging map centred at 0 (orange = negative
    = needed, when the values are effects); values that are never negative get a sequential one.

    Parameters
    ----------
    values : array of float, shape (grid.size,) or grid.shape
        NaN = not measured, drawn grey.
    grid : HeadGrid
        Layout of the heads.
    label : str
        What the values are, with their unit; stands beside the colour bar.
    mark : sequence of Head
        Heads to frame.
    limit : float, optional
        Largest absolute value of the colour scale; larger ones are drawn in the last colour and the
        bar gets arrowheads. By default the largest one there is.
    """
    values = np.asarray(values, dtype=float)
    if values.shape not in ((grid.size,), grid.shape):
        raise InputError(
            f"the values have shape {values.shape}: give ({grid.size},) or {grid.shape}, one a head"
        )
    values = values.reshape(grid.shape).T
    known = values[np.isfinite(values)]
    largest = float(np.abs(known).max()) if known.size else 0.0
    if limit is not None and not limit > 0:
        raise InputError(f"limit is {limit!r}: give a positive number")
    limit = limit or largest or 1.0
    diverging = bool((known < 0).any())
    ax = ax or _axes(
        np.clip(1.9 + 0.2 * grid.n_layers, 3, 8), np.clip(0.8 + 0.2 * grid.n_heads, 2, 7)
    )
    ax.set_facecolor("#C8C8C8")
    ax.grid(False)
    mesh = ax.pcolormesh(
        np.ma.masked_invalid(values),
        cmap="PuOr" if diverging else "viridis",
        vmin=-limit if diverging else 0.0,
        vmax=limit,
        edgecolors="white",
        linewidth=0.4,
    )
    _outer_ticks(ax.xaxis, grid.n_layers)
    _outer_ticks(ax.yaxis, grid.n_heads)
    ax.invert_yaxis()
    ax.set_aspect("equal")
    ax.set(xlabel="layer", ylabel="head")
    _colour_bar(ax, mesh, label, clipped=largest > limit, both=diverging)
    for head in mark:
        grid.check(head)
        frame = Rectangle((head.layer, head.index), 1, 1, fill=False, edgecolor="black", lw=1.8)
        ax.add_patch(frame)
    return ax


def sorted_effects(
    effects: np.ndarray,
    grid: HeadGrid,
    k: int = 5,
    label: str = "effect on log-probability (nats)",
    ax: Axes | None = None,
) -> Axes:
    """Effects of all heads by rank, most needed first; the first ``k`` marked and named.

    Ranks are on a logarithmic axis, so that the first few can be told apart and the tail still
    fits.

    Parameters
    ----------
    effects : array of float, shape (grid.size,)
        score(ablated) - score(intact) of every head; negative = needed.
    grid : HeadGrid
        Layout of the heads.
    k : int, default 5
        Heads to mark; at most the first twelve are named.
    label : str
        What the effects are, with their unit.
    """
    effects = np.asarray(effects, dtype=float)
    if effects.shape != (grid.size,):
        raise InputError(f"the effects have shape {effects.shape}: give ({grid.size},), one a head")
    k = check_count("k", k, high=grid.size)
    order = np.argsort(effects, kind="stable")
    ranks = np.arange(1, grid.size + 1)
    ax = ax or _axes(7.0, 3.8)
    ax.axhline(0, color="black", lw=0.8)
    ax.scatter(ranks[k:], effects[order[k:]], s=12, color=OTHER, label="other heads", zorder=3)
    ax.scatter(
        ranks[:k], effects[order[:k]], s=36, color=NEEDED, marker="D", label=f"top {k}", zorder=4
    )
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlim(0.8, 1.3 * grid.size)
    ax.margins(y=0.1)
    named = order[: min(k, _MAX_NAMES)]
    _name_points(ax, effects[named], [str(grid.head(i)) for i in named], x=1.8 * k)
    ax.set(xlabel="rank of the head (1 = most needed)", ylabel=label)
    ax.legend(loc="lower right", frameon=False)
    return ax


def recovery_curve(
    frame: pd.DataFrame,
    x: str = "n_masks",
    y: str = "recall",
    hue: str | None = "design",
    xlabel: str = "masks measured",
    ylabel: str = "share of the true top heads found",
    ax: Axes | None = None,
) -> Axes:
    """Recovery against the number of masks: mean over seeds, band from the worst to the best.

    Parameters
    ----------
    frame : DataFrame
        One row a design, seed and number of masks; columns ``x``, ``y`` and, when there are several
        designs, ``hue``.
    x, y, hue : str
        Columns.
    xlabel, ylabel : str
        Axis labels.
    """
    hue = hue if hue in frame.columns else None
    missing = [column for column in (x, y) if column not in frame.columns]
    if missing or frame.empty:
        what = f"no column {', '.join(missing)}" if missing else "no rows"
        raise InputError(f"the frame has {what}: give one row a design, seed and number of masks")
    ax = ax or _axes(6.5, 3.8)
    sns.lineplot(
        frame,
        x=x,
        y=y,
        hue=hue,
        style=hue,
        markers=True if hue else None,
        dashes=bool(hue),
        marker=None if hue else "o",
        markersize=7,
        palette="colorblind" if hue else None,
        color=None if hue else OTHER,
        errorbar=("pi", 100),
        err_kws={"alpha": 0.15, "lw": 0},
        ax=ax,
    )
    ax.set(xlabel=xlabel, ylabel=ylabel, ylim=(-0.03, 1.05), xlim=(0, None))
    if hue:
        ax.legend(title=None, frameon=False, loc="lower right")
    return ax


def cost_curves(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Share of greedy's damage over the cost of a search, one line a method.

    Parameters
    ----------
    table : DataFrame
        From `csloc_utils.yardstick.tabulate`.
    """
    ax = ax or _axes(7.0, 5.0)
    names = [*_SEARCHES, *sorted(set(table["method"]) - set(_SEARCHES))]
    looks = zip(names, "DosX^vP<>*" * len(names), sns.color_palette("colorblind", len(names)))
    for method, marker, colour in looks:  # a method looks the same in every figure
        part = table[table["method"] == method]
        error = [part["share"] - part["low"], part["high"] - part["share"]]
        look = {"marker": marker, "color": colour, "ms": 5, "capsize": 2, "label": method}
        if len(part):
            ax.errorbar(part["equivalents"], part["share"], np.maximum(error, 0), **look)
    ax.set(xscale="log", ylim=(min(0, ax.get_ylim()[0]), 1.05))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set(xlabel="evaluation-equivalents", ylabel="share of greedy's damage")
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=3)
    return ax


def predicted_vs_measured(
    predicted: np.ndarray,
    measured: np.ndarray,
    label: str = "log-probability (nats)",
    ax: Axes | None = None,
) -> Axes:
    """Sum of single effects against measured joint effects; on the line, effects add up exactly.

    The text in the corner gives the correlation, the least-squares slope of measured on predicted
    (above 1: together the heads do more than their sum) and the number of masks.

    Parameters
    ----------
    predicted, measured : array of float, shape (n_masks,)
        Effects of the same masks, in the same unit.
    label : str
        The score, with its unit.
    """
    predicted, measured = np.asarray(predicted, float), np.asarray(measured, float)
    if predicted.shape != measured.shape or predicted.ndim != 1 or not len(predicted):
        raise InputError(
            f"predicted has shape {predicted.shape} and measured {measured.shape}: "
            "give two non-empty 1-D arrays of the same length"
        )
    ax = ax or _axes(5.0, 4.6)
    both = np.concatenate([predicted, measured, [0.0]])
    pad = 0.05 * (np.ptp(both) or 1.0)
    ends = (both.min() - pad, both.max() + pad)
    ax.plot(ends, ends, color="black", lw=1, ls="--", label="measured = predicted")
    ax.scatter(predicted, measured, s=22, color=OTHER, alpha=0.7, lw=0, zorder=3)
    ax.set(xlim=ends, ylim=ends, aspect="equal")
    ax.set(xlabel=f"sum of single effects, {label}", ylabel=f"measured joint effect, {label}")
    text = f"n = {len(predicted)}"
    if len(predicted) > 2 and np.ptp(predicted) > 0 and np.ptp(measured) > 0:
        r = np.corrcoef(predicted, measured)[0, 1]
        slope = np.polyfit(predicted, measured, 1)[0]
        text = f"r = {r:.2f}\nslope = {slope:.2f}\n{text}"
    ax.text(0.04, 0.96, text.replace("-", "\N{MINUS SIGN}"), transform=ax.transAxes, va="top")
    ax.legend(loc="lower right", frameon=False)
    return ax


def damage_bars(
    verification: Verification, score: str = "accuracy", ax: Axes | None = None
) -> Axes:
    """Drop on the target and on the controls, with intervals, above the drops of random heads.

    Parameters
    ----------
    verification : Verification
        Result of :func:`csloc_utils.verify.verify`.
    score : {"accuracy", "logprob"}
        Score whose drop is shown.
    """
    target = verification.target
    if score not in target.drops:
        raise InputError(f"unknown score {score!r}: choose one of {', '.join(target.drops)}")
    damages = {target.task: target, **verification.controls}
    if len(damages) <= len(verification.controls):
        damages = {f"{target.task} (target)": target, **verification.controls}
    rows = np.arange(len(damages))
    drops = [damage.drops[score] for damage in damages.values()]
    ax = ax or _axes(7.0, 1.5 + 0.55 * len(damages))
    ax.axvline(0, color="black", lw=0.8)
    colours = [NEEDED] + [OTHER] * (len(drops) - 1)
    errors = [[d.drop - d.low for d in drops], [d.high - d.drop for d in drops]]
    ax.barh(
        rows - 0.15,
        [d.drop for d in drops],
        height=0.42,
        color=colours,
        hatch=[""] + ["//"] * (len(drops) - 1),
        edgecolor="white",
        xerr=np.maximum(errors, 0),
        error_kw={"capsize": 4, "lw": 1.3, "ecolor": "black"},
        zorder=2,
    )
    rng = np.random.default_rng(0)  # only spreads the dots
    for row, damage in zip(rows, damages.values()):
        draws = damage.random[score]
        height = row + 0.26 + rng.uniform(-0.08, 0.08, len(draws))
        ax.scatter(draws, height, s=10, color=RANDOM, alpha=0.6, lw=0, zorder=3)
    ax.set_yticks(rows, list(damages))
    ax.set_ylim(len(rows) - 0.45, -0.55)
    ax.use_sticky_edges = False  # leave room for dots at zero
    ax.margins(x=0.03)
    ax.yaxis.grid(False)
    ax.set(xlabel=f"drop in {_UNITS.get(score, score)}, intact \N{MINUS SIGN} ablated")
    ax.legend(
        handles=_damage_legend(len(drops) > 1, target.n_random > 0),
        frameon=False,
        ncols=3,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        borderaxespad=0.2,
    )
    return ax


def _damage_legend(with_controls: bool, with_random: bool) -> list:
    handles: list = [Patch(facecolor=NEEDED, edgecolor="white", label="target")]
    if with_controls:
        handles.append(Patch(facecolor=OTHER, edgecolor="white", hatch="//", label="control"))
    if with_random:
        dot = Line2D(
            [], [], ls="", marker="o", ms=4, color=RANDOM, label="random heads, same layers"
        )
        handles.append(dot)
    return handles


def _axes(width: float, height: float) -> Axes:
    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def _name_points(ax: Axes, heights: np.ndarray, names: list[str], x: float) -> None:
    """Name the points of rank 1, 2, … beside the rising curve, where it leaves room below."""
    gap = 0.065 * np.ptp(ax.get_ylim())
    height = np.inf
    for rank in range(len(names), 0, -1):  # from the highest point down, never closer than the gap
        point = (rank, heights[rank - 1])
        height = min(heights[rank - 1] - 0.3 * gap, height - gap)
        line = {"arrowstyle": "-", "color": "#9A9A9A", "lw": 0.7, "shrinkA": 1, "shrinkB": 4}
        ax.annotate(names[rank - 1], point, (x, height), va="center", fontsize=9, arrowprops=line)


def _outer_ticks(axis, n: int) -> None:
    """Label cells at their middle, all of them when few, else every second, fifth or tenth."""
    step = next(step for step in (1, 2, 5, 10, 20, 50) if n / step <= 17 or step == 50)
    axis.set_ticks(np.arange(0, n, step) + 0.5, [str(i) for i in range(0, n, step)])


def _colour_bar(ax: Axes, mesh: QuadMesh, label: str, clipped: bool, both: bool) -> None:
    extend = ("both" if both else "max") if clipped else "neither"
    beside = ax.inset_axes((1.015, 0, 0.02, 1))  # as tall as the map, whatever its shape
    bar = ax.figure.colorbar(mesh, cax=beside, extend=extend)
    height = ax.get_window_extent().height / ax.figure.dpi
    bar.set_label(textwrap.fill(label, max(16, round(10 * height)), break_on_hyphens=False))
    bar.locator = MaxNLocator(5)
    bar.update_ticks()
    bar.outline.set_visible(False)
