"""Which guess names the right candidates, and which average of items picks the right one of them?

    python tests/benchmarks/guesses.py        # takes a backward pass per guess; can be rerun

Both questions are asked along the path of greedy search, whose rounds measured *every* head given
those found. A guess is good if the best of its first five candidates adds nearly as much damage as
the best of all heads. A response is good if the head it picks on half of the facts does much damage
on the other half. Results go to ``data/recorded/guesses.json``, which a chapter reads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from search import N_ITEMS, ROOT, STORE, TUNED, K, Live

from csloc_utils.measurements import Measurements
from csloc_utils.search import greedy

CANDIDATES = 5
N_HALVES = 300
OUT = ROOT / "data" / "recorded" / "guesses.json"

RESPONSES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "log-probability": lambda drop, margin: drop.mean(axis=1),
    "log-probability, median": lambda drop, margin: np.median(drop, axis=1),
    "log-probability, clipped at -6": lambda drop, margin: drop.clip(-6).mean(axis=1),
    "square root of its loss": lambda drop, margin: -np.sqrt(np.maximum(-drop, 0)).mean(axis=1),
    "one standard error less": lambda drop, margin: (
        drop.mean(axis=1) + drop.std(axis=1) / np.sqrt(drop.shape[1])
    ),
    "margin": lambda drop, margin: margin.mean(axis=1),
}


def guesses(evaluator: Any, off: np.ndarray, seed: int) -> dict[str, list[np.ndarray]]:
    """Guesses of every head's effect beside the heads that are off; some are several, in turn."""
    at = {s: evaluator.slopes(off, s).effects[0] for s in (1.0, 0.9, 0.75, 0.6)}
    rng, rest = np.random.default_rng(seed), np.flatnonzero(~off[0])
    under = []
    for _ in range(3):
        mask = off.copy()
        mask[0, rng.choice(rest, 8, replace=False)] = True
        slopes = evaluator.slopes(mask).effects[0].copy()
        slopes[mask[0] & ~off[0]] = np.nan
        under.append(slopes)
    made = {f"slope at {s:g}": [slopes] for s, slopes in at.items()}
    made["margin's slope at 1"] = [evaluator.slopes(off, 1.0, "margin").effects[0]]
    made["mean of slopes at 1 and 0.75"] = [(at[1.0] + at[0.75]) / 2]
    made["slopes at 1 and 0.75, both every round"] = [at[1.0], at[0.75]]
    made["slopes under three random masks"] = [np.nan_to_num(np.nanmean(under, axis=0), nan=np.inf)]
    return made


def rounds(evaluator: Any) -> Iterator[tuple[np.ndarray, np.ndarray, float, Measurements]]:
    """Heads found before, effects of all others given them (NaN: found), joint effect so far."""
    result, found, joint = greedy(evaluator, K), [], 0.0
    for row, measured in zip(result.table, result.extra["rounds"]):
        off = np.zeros((1, evaluator.grid.size), bool)
        off[0, found] = True
        effects = np.full(evaluator.grid.size, np.nan)
        added = [int(np.flatnonzero(mask & ~off[0])[0]) for mask in measured.masks]
        effects[added] = measured.effects() - joint
        yield off, effects, joint, measured
        found.append(evaluator.grid.flat(evaluator.grid.parse(row["head"])[0]))
        joint = row["joint_effect"]


def captured(effects: np.ndarray, lists: list[np.ndarray]) -> float:
    """Share of the best head's damage that the best of the first candidates does."""
    orders = [np.argsort(np.where(np.isnan(effects), np.inf, g), kind="stable") for g in lists]
    interleaved = np.array(orders).T.ravel()
    first = list(dict.fromkeys(interleaved.tolist()))[:CANDIDATES]
    return float(effects[first].min() / np.nanmin(effects))


def main() -> None:
    """Measure, print and write both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-q4")
    parser.add_argument("--tasks", nargs="+", default=[*TUNED, "addition", "repeat-left"])
    parser.add_argument("--store", type=Path, default=STORE)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    source = Live(args.model, args.store, "float32")
    by_guess: dict[str, dict[str, float]] = {}
    by_response: dict[str, dict[str, float]] = {}
    for task in args.tasks:
        evaluator = source.locate(task, 0)
        shares: dict[str, list[float]] = {}
        picked: dict[str, list[float]] = {}
        for number, (off, effects, joint, measured) in enumerate(rounds(evaluator)):
            made = guesses(evaluator, off, number)
            # What the search does: one of the two slopes a round.
            made["slopes at 0.75 and 1, every other round"] = made[
                "slope at 1" if number % 2 else "slope at 0.75"
            ]
            for name, lists in made.items():
                shares.setdefault(name, []).append(captured(effects, lists))
            drop, margin = measured.item_effects(), measured.item_effects("margin")
            rng, best = np.random.default_rng(number), np.nanmin(effects)
            for _ in range(N_HALVES):
                facts = rng.permutation(np.unique(measured.facts))
                half = np.isin(measured.facts, facts[: len(facts) // 2])
                for name, response in RESPONSES.items():
                    head = int(np.argmin(response(drop[:, half], margin[:, half])))
                    gain = (drop[head, ~half].mean() - joint) / best
                    picked.setdefault(name, []).append(float(gain))
        for table, values in ((by_guess, shares), (by_response, picked)):
            for name, each in values.items():
                table.setdefault(name, {})[task] = round(float(np.mean(each)), 4)
        print(f"{task} done", flush=True)
    report = {
        "guesses": by_guess,
        "responses": by_response,
        "candidates": CANDIDATES,
        "rounds": K,
        "items": N_ITEMS,
        "model": {"name": args.model, **source.versions},
        "command": "python tests/benchmarks/guesses.py",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf8")
    for title in ("guesses", "responses"):
        print(f"\n{title}")
        for name, values in report[title].items():
            print(f"{np.mean(list(values.values())):.3f}  {name}  {values}")


if __name__ == "__main__":
    main()
