"""The figures of a report's page, as HTML with the image and what it shows in words."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from csloc_utils import plots
from csloc_utils import report_text as html
from csloc_utils.heads import HeadGrid
from csloc_utils.verify import Damage, Drop, Verification

Run = Mapping[str, Any]
_MOST = 20  # heads in a figure


def heads_figure(run: Run) -> str:
    """Draw the intervals of every head; nothing where there are none."""
    each = run.get("verify", {}).get("each")
    if not each:
        return ""
    each = each[:_MOST]
    fig = Figure(figsize=(7, 1.1 + 0.5 * len(each)), layout="constrained")
    ax = fig.subplots()
    ax.axvline(0, color="black", lw=0.8)
    looks = (
        ("single", "off alone", "o", plots.OTHER),
        ("given_others", "off beside the others", "D", plots.NEEDED),
    )
    for shift, (key, label, marker, colour) in zip((-0.14, 0.14), looks):
        low, value, high = (np.array([h[key][x] for h in each]) for x in ("low", "value", "high"))
        error = np.maximum([value - low, high - value], 0)
        place = np.arange(len(each)) + shift
        ax.errorbar(value, place, xerr=error, fmt=marker, color=colour, capsize=3, label=label)
    ax.set_yticks(range(len(each)), [h["head"] for h in each])
    ax.set_ylim(len(each) - 0.5, -0.5)
    ax.set(xlabel=f"drop in {html.unit(html.leading(run['verify']['target']))}, intact − ablated")
    ax.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    said = "; ".join(f"{h['head']} alone {html.interval(h['single'])}" for h in each[:12])
    return _figure(
        ax,
        "The heads on held-out items: drop and interval.",
        f"Points with intervals, one row a head: {said}.",
    )


def map_figure(run: Run) -> str:
    """Draw where the heads sit: all that the search knows of every head, the named ones framed."""
    layers, n_heads = run["model"]["layers"], run["model"]["heads"]
    grid = HeadGrid(layers, n_heads, n_heads, 1)  # the map needs no more than the shape
    named = [grid.parse(name)[0] for name in html.found(run)]
    values, what = np.full(grid.size, np.nan), "effect"
    if run["method"] in ("sweep", "race"):
        rows = run["heads"]
        what = "effect of each head alone"
    else:
        rows, known = run["heads"][: run["k"]], run.get("all_heads")
        if known:
            what, rows = known["what"], []
            values[:] = [np.nan if v is None else v for v in known["values"]]
    for row in rows:
        values[grid.mask(grid.parse(row["head"]))] = row["effect"]
    if not named:
        return html.paragraph("None to show.")
    width = min(8, max(3, 1.9 + 0.2 * grid.n_layers))
    fig = Figure(figsize=(width, min(7, max(2, 0.8 + 0.2 * grid.n_heads))), layout="constrained")
    ax = plots.head_map(
        values, grid, f"{what}, {html.unit(run['score'])}", named, ax=fig.subplots()
    )
    caption = f"Layers from left to right, heads of a layer from top to bottom; shown: {what}"
    caption += " (negative = needed). Framed: the heads named. Grey: not measured."
    return _figure(
        ax, caption, f"Map of {grid.size} heads; framed: {html.listed(html.found(run))}."
    )


def damage_figure(run: Run) -> str:
    """Draw the drops of target and controls above those of random heads."""
    if "verify" not in run:
        return ""
    verify = run["verify"]
    score = html.leading(verify["target"])
    controls = {
        name: _damage(control, control["random"])
        for name, control in verify["controls"].items()
        if score in control
    }
    target = _damage(verify["target"], verify["random"])
    fig = Figure(figsize=(7, 1.8 + 0.55 * (1 + len(controls))), layout="constrained")
    made = Verification((), target, controls, None, [], {})
    ax = plots.damage_bars(made, score, ax=fig.subplots())
    rows = {f"{target.task} (target)": target, **controls}
    said = "; ".join(
        f"{name} {html.interval(vars(d.drops[score]), 'drop')}" for name, d in rows.items()
    )
    caption = "Bars with intervals: all located heads off together. Dots: sets of random heads off."
    return _figure(ax, caption, f"One bar a task, the drop in {html.unit(score)}: {said}.")


def _damage(damage: Mapping[str, Any], random: Mapping[str, Any]) -> Damage:
    scores = [score for score in html.SCORES if score in damage]
    drops = {score: Drop(**damage[score]) for score in scores}
    draws = {s: np.array(random[s]["drops"] if s in random else [], float) for s in scores}
    return Damage(damage["task"], damage["n_items"], damage["n_facts"], drops, draws)


def _figure(ax: Axes, caption: str, alt: str) -> str:
    file = io.BytesIO()
    ax.figure.savefig(file, dpi=160, format="png", bbox_inches="tight")
    data = base64.b64encode(file.getvalue()).decode()
    image = f'<img src="data:image/png;base64,{data}" alt="{escape(alt)}">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"
