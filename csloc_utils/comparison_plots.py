"""Figures that compare tasks: the atlas, what head lists share, damage by dose.

They follow the rules of `csloc_utils.plots`: drawn on ``ax`` or on a new figure, no titles, colours
that colour-blind readers can tell apart, and nothing told by colour alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from csloc_utils.errors import InputError

if TYPE_CHECKING:
    from csloc_utils.atlas import Atlas

_SCALES = {"logprob": 1, "accuracy": 100}
_LABELS = {"logprob": "drop in log-probability (nats)", "accuracy": "drop in accuracy (points)"}
_GREY = "#505050"
_MARKERS = "DosX^vP<>*hp"


def atlas_map(made: Atlas, score: str = "logprob", ax: Axes | None = None) -> Axes:
    """Heat map of an atlas: what switching off the heads of each row costs the task of each column.

    A task under its own heads is framed. A bold number is more than random heads of the same layers
    cost, a grey one in parentheses lies within their band. Drops of log-probability are in nats,
    others in points.

    Parameters
    ----------
    made : Atlas
        From `csloc_utils.atlas.atlas`.
    score : {"logprob", "accuracy"}
        Score whose drop is shown. Nats grow without limit, so their colours follow the square root.
    """
    drops = _SCALES.get(made.check_score(score), 100) * made.drops[score]
    digits = 1 if score == "logprob" else 0
    texts = _texts(drops, digits, made.within(score))
    n_sets, n_tasks = drops.shape
    ax = ax or _axes(2.4 + 0.58 * n_tasks, 1.9 + 0.42 * n_sets)
    shade = np.sqrt(np.maximum(drops, 0)) if score == "logprob" else np.maximum(drops, 0)
    cells = _cells(ax, shade, texts, made.sets, made.tasks)
    for a, b in np.argwhere(made.within(score)):
        if cells[a][b].get_color() == "black":  # on a dark cell, white stays
            cells[a][b].set_color(_GREY)
    for a, b in np.argwhere(made.drops[score] > made.band(score)[1]):
        cells[a][b].set_fontweight("bold")
    for a, b in np.argwhere(made.own):
        ax.add_patch(Rectangle((b, a), 1, 1, fill=False, edgecolor="black", lw=2, clip_on=False))
    ax.set(ylabel="heads found for …, switched off", xlabel=f"{_LABELS[score]} of …")
    return ax


def overlap_map(
    pairs: pd.DataFrame, value: str = "jaccard", label: str = "", ax: Axes | None = None
) -> Axes:
    """Heat map of what pairs have in common; the lower triangle, since it is the same both ways.

    Parameters
    ----------
    pairs : DataFrame
        One row a pair with columns ``a`` and ``b``: from `csloc_utils.transfer.overlap` or
        `csloc_utils.transfer.rank_correlations`.
    value : str, default "jaccard"
        Column to show: ``jaccard``, ``shared``, ``rho`` …
    label : str, optional
        What the numbers are, for the axis; by default the column's name.
    """
    missing = [column for column in ("a", "b", value) if column not in pairs.columns]
    if missing or pairs.empty:
        what = f"no column {', '.join(missing)}" if missing else "no rows"
        raise InputError(f"the pairs have {what}: give what overlap or rank_correlations returns")
    names = list(dict.fromkeys([*pairs["a"], *pairs["b"]]))
    table = np.full((len(names), len(names)), np.nan)
    for a, b, number in pairs[["a", "b", value]].itertuples(index=False):
        i, j = sorted((names.index(a), names.index(b)))
        table[j, i] = number
    rows, columns = table[1:, :-1], names[:-1]
    ax = ax or _axes(2.2 + 0.62 * len(columns), 1.9 + 0.42 * len(rows))
    whole = np.all(rows[np.isfinite(rows)] == np.round(rows[np.isfinite(rows)])) and value != "rho"
    texts = _texts(rows, 0 if whole else 2)
    _cells(ax, np.maximum(rows, 0), texts, names[1:], columns, limit=None if whole else 1.0)
    ax.set(xlabel=label or value, ylabel="")
    return ax


def dose_curves(table: pd.DataFrame, target: str = "", ax: Axes | None = None) -> Axes:
    """Damage to every task against the number of heads off, with intervals.

    Parameters
    ----------
    table : DataFrame
        One score of what `csloc_utils.transfer.dose` returns.
    target : str, optional
        The task whose heads are switched off: drawn thicker, and first in the legend. By default
        the first one.
    """
    scores = table["score"].unique() if "score" in table.columns else ()
    if len(scores) != 1:
        raise InputError(
            f"the table has {len(scores)} scores: give the rows of one, as in "
            "table[table['score'] == 'accuracy']"
        )
    (score,) = scores
    names = list(table["task"].unique())
    target = target or names[0]
    if target not in names:
        raise InputError(f"no task {target!r} in the table: choose from {', '.join(names)}")
    scale = _SCALES.get(score, 100)
    names = [target, *(name for name in names if name != target)]
    ax = ax or _axes(7.0, 4.4)
    ax.axhline(0, color="black", lw=0.8)
    sizes = sorted(table["size"].unique())
    palette = sns.color_palette("colorblind", 10)
    shift = 0.22 / max(1, len(names) - 1)  # bars that stand side by side can be read
    for i, name in enumerate(names):
        part = table[table["task"] == name].sort_values("size")
        x = np.searchsorted(sizes, part["size"]) + shift * (i - (len(names) - 1) / 2) * 2
        drop = scale * part["drop"].to_numpy()
        error = np.abs([drop - scale * part["low"], scale * part["high"] - drop])
        main = name == target
        ax.errorbar(
            x,
            drop,
            error,
            label=f"{name} (its own heads)" if main else name,
            color="black" if main else palette[(i - 1) % 10],
            marker=_MARKERS[i % len(_MARKERS)],
            ls="-" if main else ("--", "-.", ":")[i % 3],
            lw=2.4 if main else 1.2,
            ms=7 if main else 5,
            elinewidth=1.4 if main else 0.6,
            capsize=2,
            zorder=4 if main else 3,
        )
    ax.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    ax.set(xlabel="heads switched off", ylabel=_LABELS.get(score, f"drop in {score}"))
    ax.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def _cells(ax: Axes, shade: np.ndarray, texts: list, rows, columns, limit: float | None = None):
    """Draw coloured cells with a text each, rows downwards; return the texts' objects."""
    ax.grid(False)
    largest = float(np.nanmax(shade)) if np.isfinite(shade).any() else 0.0
    colours = plt.get_cmap("YlOrBr")
    norm = plt.Normalize(0, limit or largest or 1.0)
    ax.pcolormesh(
        np.ma.masked_invalid(shade), cmap=colours, norm=norm, edgecolors="white", linewidth=0.8
    )
    made = []
    for i, row in enumerate(texts):
        made.append([])
        for j, text in enumerate(row):
            dark = np.isfinite(shade[i, j]) and norm(shade[i, j]) > 0.62
            colour = "white" if dark else "black"
            at = (j + 0.5, i + 0.5)
            made[-1].append(ax.text(*at, text, ha="center", va="center", fontsize=9, color=colour))
    ax.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=40, ha="right")
    ax.set_yticks(np.arange(len(rows)) + 0.5, rows)
    ax.tick_params(length=0)
    ax.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
    for spine in ax.spines.values():
        spine.set_visible(False)
    return made


def _texts(values: np.ndarray, digits: int, bracketed: np.ndarray | None = None) -> list:
    """Numbers as short texts, with a real minus sign and no negative zero; NaN is empty."""

    def text(value: float, inside: bool) -> str:
        if not np.isfinite(value):
            return ""
        short = f"{round(float(value), digits) + 0.0:.{digits}f}".replace("-", "\N{MINUS SIGN}")
        return f"({short})" if inside else short

    inside = np.zeros(values.shape, bool) if bracketed is None else bracketed
    return [[text(v, i) for v, i in zip(*row)] for row in zip(values, inside)]


def _axes(width: float, height: float) -> Axes:
    return plt.subplots(figsize=(width, height), layout="constrained")[1]
