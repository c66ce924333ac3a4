"""From the recorded cases to the table, the CSV file and the figure of the yardstick."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "_build" / "bench"
N_BOOT, LEVEL, MARGIN = 2000, 0.90, 0.05


def counted(rows: list[dict[str, Any]]) -> list[str]:
    """Tasks that count: greedy's heads do more damage than every random set."""
    bands = {r["task"]: max(r["mean_drops"]) for r in rows if r["method"] == "random"}
    damage = {r["task"]: np.mean(r["drops"]["logprob"]) for r in rows if r["method"] == "greedy"}
    return [task for task in damage if task in bands and damage[task] > bands[task]]


def _weights(rows: list[dict[str, Any]], task: str) -> np.ndarray:
    """Resampled item weights ``(1 + N_BOOT, n_items)``; the first row is the sample itself."""
    facts = next(r["facts"] for r in rows if r["method"] == "random" and r["task"] == task)
    names, fact = np.unique(facts, return_inverse=True)
    draws = np.random.default_rng(0).multinomial(
        len(names), np.full(len(names), 1 / len(names)), N_BOOT
    )
    weights = np.vstack([np.ones((1, len(names))), draws])[:, fact]
    return weights / weights.sum(axis=1, keepdims=True)


def shares(rows: list[dict[str, Any]]) -> dict[tuple[str, int], pd.DataFrame]:
    """Share of greedy's damage, resampled: (method, budget) → frame (1 + N_BOOT) × tasks.

    The mean over a task's seeds, clipped at 1. Facts are resampled for method and greedy alike.
    """
    result: dict[tuple[str, int], dict[str, np.ndarray]] = {}
    for task in counted(rows):
        weights = _weights(rows, task)
        here = [r for r in rows if r["task"] == task and r["method"] != "random"]
        (reference,) = (r for r in here if r["method"] == "greedy")
        greedy = weights @ np.array(reference["drops"]["logprob"])
        for key in sorted({(r["method"], r["budget"]) for r in here}):
            drops = np.mean(
                [r["drops"]["logprob"] for r in here if (r["method"], r["budget"]) == key], axis=0
            )
            result.setdefault(key, {})[task] = np.minimum(weights @ drops / greedy, 1)
    return {key: pd.DataFrame(columns) for key, columns in result.items()}


def _specific(row: dict[str, Any], score: str) -> float:
    if not row["controls"]:
        return float("nan")
    controls = np.mean([c[score] for c in row["controls"].values()])
    return float(np.mean(row["drops"][score]) - controls)


def tabulate(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """One row a method and budget, over the tasks that count."""
    tasks, table = counted(rows), []
    single = {r["task"]: set(r["heads"]) for r in rows if r["method"] == "sweep"}
    for (method, budget), share in shares(rows).items():
        here = [
            r for r in rows if (r["method"], r["budget"]) == (method, budget) and r["task"] in tasks
        ]
        means = share.mean(axis=1)
        low, high = np.quantile(means[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        by_task = pd.DataFrame(
            {
                "task": r["task"],
                "equivalents": r["equivalents"],
                "seconds": r["seconds"],
                "probability": np.mean(r["drops"]["probability"]),
                "accuracy": np.mean(r["drops"]["accuracy"]),
                "specific": _specific(r, "logprob"),
                "specific probability": _specific(r, "probability"),
                "recall": len(single[r["task"]] & set(r["heads"])) / len(r["heads"])
                if r["task"] in single
                else np.nan,
            }
            for r in here
        )
        mean = by_task.groupby("task").mean().mean()
        table.append(
            {
                "method": method,
                "budget": budget,
                "tasks": share.shape[1],
                "seeds": len({r["seed"] for r in here}),
                "share": means.iloc[0],
                "low": low,
                "high": high,
                "worst": share.iloc[0].min(),
                "worst task": share.iloc[0].idxmin(),
                **mean,
            }
        )
    return pd.DataFrame(table).sort_values(["method", "budget"], ignore_index=True)


def non_inferior(rows: list[dict[str, Any]], ours: tuple, other: tuple) -> pd.DataFrame:
    """Ours minus another's share on every task, with its interval; fine if low > -0.05."""
    all_shares = shares(rows)
    difference = (all_shares[ours] - all_shares[other]).dropna(axis=1)
    low = difference[1:].quantile((1 - LEVEL) / 2)
    return pd.DataFrame(
        {"difference": difference.iloc[0], "low": low, "non-inferior": low > -MARGIN}
    )


def figure(table: pd.DataFrame, title: str, path: Path) -> None:
    """Share of greedy's damage over cost, one line a method."""
    import matplotlib.pyplot as plt

    from csloc_utils import plots

    plots.set_style()
    _, ax = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for marker, (method, part) in zip("osD^vPX<>*", table.groupby("method", sort=False)):
        error = [part["share"] - part["low"], part["high"] - part["share"]]
        ax.errorbar(
            part["equivalents"], part["share"], np.maximum(error, 0), marker=marker, label=method
        )
    ax.set(xscale="log", xlabel="evaluation-equivalents", ylabel="share of greedy's damage")
    ax.set_title(title, fontsize=10)
    ax.legend(frameon=False, fontsize=8)
    ax.figure.savefig(path, dpi=150)


def report(rows: list[dict[str, Any]], model: str) -> None:
    """Print the table; write it and the figure."""
    rows = [r for r in rows if r["model"] == model]
    if not rows:
        raise SystemExit(f"nothing is recorded of {model}: run the benchmark first")
    table = tabulate(rows)
    OUT.mkdir(parents=True, exist_ok=True)
    table.to_csv(OUT / f"search-{model}.csv", index=False, float_format="%.4f")
    figure(table, f"{model}, {table['tasks'].max()} tasks", OUT / f"search-{model}.png")
    with pd.option_context("display.width", 250, "display.max_columns", None):
        print(table.round(2).to_string(index=False))
        for budget in (41, 45):
            for other in [k for k in shares(rows) if k[0].startswith("paper") and k[1] == 45]:
                if ("screened", budget) in shares(rows):
                    print(f"\nscreened {budget} minus {other[0]} {other[1]}")
                    print(non_inferior(rows, ("screened", budget), other).round(2))
    print(f"\nwritten to {OUT}")
