"""The yardstick: every search method and budget on the same tasks, judged on held-out items.

    python tests/benchmarks/search.py run      # measure what is missing; can be killed and rerun
    python tests/benchmarks/search.py table    # table, CSV and figure from what is recorded

A *case* is a task, a seed and a method. Its seed draws the locate items and the masks. The heads it
names are ablated on the task's verify items, which no method has seen, and on verify items of
control tasks. One line of JSON a case goes to the record, with the damage to every item.

Rules fixed beforehand: k = 5 heads, 24 locate items. A task counts only if the heads of greedy
search do more damage on verify items than each of 20 random sets from the same layers. Damage is
the drop in log-probability; a method's *share* is its damage over greedy's, both the mean over
seeds, clipped at 1 on every task. Settings were chosen on the tasks in TUNED and the simulator, and
frozen before the others were run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from csloc_utils import search
from csloc_utils.designs import layer_matched
from csloc_utils.screening import screened
from csloc_utils.yardstick import read_cases

K, N_ITEMS, N_RANDOM, N_CONTROL_ITEMS = 5, 24, 20, 24
TUNED = ("multiplication", "capitals", "copying")
FRESH = ("addition", "repeat-left", "knowledge", "code")
ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "data" / "recorded" / "search.jsonl"
STORE = ROOT / "_build" / "bench" / "measurements.sqlite"

# Flat indices of the named heads, best first, and what naming them cost in equivalents.
Found = tuple[list[int], int]
Others = Callable[[], list[Any]]  # evaluators of tasks that the heads should not serve
Method = Callable[[Any, int, Others], dict[int, Found]]  # evaluator, seed, … -> budget -> found


def _result(evaluator: Any, result: search.SearchResult) -> Found:
    heads = [evaluator.grid.flat(head) for head in result.found]
    return heads, result.evaluations["equivalents"]


def greedy(evaluator: Any, seed: int, others: Others) -> dict[int, Found]:
    """Iterative greedy search over all heads."""
    found = _result(evaluator, search.greedy(evaluator, K))
    return {found[1]: found}


def sweep(evaluator: Any, seed: int, others: Others) -> dict[int, Found]:
    """Every head alone."""
    found = _result(evaluator, search.sweep(evaluator, k=K))
    return {found[1]: found}


def paper(design: str, size: int | None, budgets: tuple[int, ...]) -> Method:
    """The paper's Lasso; smaller budgets use the first masks of the largest."""

    def run(evaluator: Any, seed: int, others: Others) -> dict[int, Found]:
        return {
            b: _result(evaluator, search.paper(evaluator, K, b, size, design, seed))
            for b in reversed(budgets)
        }

    return run


def gradient(evaluator: Any, seed: int, others: Others) -> dict[int, Found]:
    """The plain gradient's five largest, and the best five of its first twenty measured alone."""
    grid = evaluator.grid
    guess = evaluator.slopes(np.zeros((1, grid.size), bool)).effects[0]
    ranked = np.argsort(guess)
    single = evaluator.measure(grid.single_masks()[ranked[:20]]).effects()
    confirmed = ranked[:20][np.argsort(single)]
    return {4: (ranked[:K].tolist(), 4), 24: (confirmed[:K].tolist(), 24)}


def ours(*budgets: int) -> Method:
    """Conditional screening."""

    def run(evaluator: Any, seed: int, others: Others) -> dict[int, Found]:
        return {b: _result(evaluator, screened(evaluator, K, b)) for b in budgets}

    return run


def contrast(evaluator: Any, seed: int, others: Others) -> dict[int, Found]:
    """Conditional screening for what the target loses beyond other tasks."""
    tasks = others()
    found = _result(evaluator, screened(evaluator, K, contrast=tasks))
    return {found[1]: found} if tasks else {}


def thompson(sign: float, budget: int = 150) -> Method:
    """Thompson sampling over heads, a normal posterior each, five heads a mask.

    With ``sign`` +1 the reward is the accuracy, as in the authors' code, so that it settles on
    harmless heads; with -1 the reward is what is lost.
    """

    def run(evaluator: Any, seed: int, others: Others) -> dict[int, Found]:
        rng, n = np.random.default_rng(seed), evaluator.grid.size
        sums, counts = np.zeros(n), np.zeros(n)
        for _ in range(budget - 1):
            means, spread = sums / (1 + counts), 1 / np.sqrt(1 + counts)
            mask = np.zeros((1, n), bool)
            mask[0, np.argsort(-rng.normal(means, spread))[:K]] = True
            reward = sign * evaluator.measure(mask).effects("accuracy")[0]
            sums[mask[0]] += reward
            counts[mask[0]] += 1
        return {budget: (np.argsort(-sums / (1 + counts))[:K].tolist(), budget)}

    return run


METHODS: dict[str, Method] = {
    "greedy": greedy,
    "sweep": sweep,
    "gradient": gradient,
    "screened": ours(21, 31, 41, 45, 61),
    "screened, contrast": contrast,
    "paper, stratified": paper("stratified", None, (45, 100, 150)),
    "paper, Bernoulli": paper("bernoulli", None, (45, 100, 150)),
    "paper, stratified, 5 %": paper("stratified", 13, (45, 100, 150)),
    "Thompson, as written": thompson(+1),
    "Thompson, mended": thompson(-1),
}
# Methods that measure little are run on more seeds; the others on as many as time allowed.
SEEDS = {"greedy": 3, "sweep": 2, "gradient": 5, "screened": 5, "paper, stratified": 5}


def cases(tasks: list[str], methods: list[str], seeds: int) -> Iterator[tuple[str, int, str]]:
    """Cases with the cheap ones first, and all tasks before the next seed."""
    for method in methods:
        for seed in range(min(seeds, SEEDS.get(method, 1))):
            for task in tasks:
                yield task, seed, method


class Live:
    """The tasks of a real model."""

    def __init__(self, model: str, store: Path, dtype: str) -> None:
        from csloc_utils.models import load_model
        from csloc_utils.store import Store

        self.name, self.store = model, Store(store)
        self.model = load_model(model, dtype=dtype)
        self.versions = self.model.fingerprint

    def _evaluator(self, task: Any, split: str, items: tuple) -> Any:
        from csloc_utils.measure import Evaluator

        return Evaluator(self.model, task, split, items=items, store=self.store, progress=False)

    def locate(self, name: str, seed: int) -> Any:
        """Return the evaluator that a method may use: another draw of items for every seed."""
        from csloc_utils.tasks import load_task

        task = load_task(name)
        if seed == 0:
            return self._evaluator(task, "locate", task.items("locate", N_ITEMS))
        rng = np.random.default_rng(seed)
        chosen = sorted(rng.choice(len(task.locate), N_ITEMS, replace=False))
        return self._evaluator(task, "locate", tuple(task.locate[i] for i in chosen))

    @cache  # noqa: B019 (one source a process)
    def verify(self, name: str) -> Any:
        """Return the evaluator that judges."""
        from csloc_utils.tasks import load_task

        task = load_task(name)
        return self._evaluator(task, "verify", task.verify)

    def others(self, name: str) -> list[Any]:
        """Return locate items of two control tasks, neither the twin nor plain text."""
        from csloc_utils.tasks import controls_for, load_task

        names = [c for c in controls_for(load_task(name))[1:] if c != "text"][:2]
        return [self.locate(c, 0) for c in names]

    @cache  # noqa: B019
    def controls(self, name: str) -> list[Any]:
        """Return evaluators of the control tasks."""
        from csloc_utils.tasks import controls_for, load_task

        tasks = [load_task(c) for c in controls_for(load_task(name))]
        return [self._evaluator(t, "verify", t.items("verify", N_CONTROL_ITEMS)) for t in tasks]


class Simulated:
    """Worlds of a given number of heads; a task is a world. There are no control tasks."""

    def __init__(self, n_heads: int) -> None:
        self.name, self.versions = f"simulated-{n_heads}", {}
        self.n_heads = n_heads

    def _evaluator(self, name: str, seed: int, n_items: int) -> Any:
        from csloc_utils.simulate import SimulatedEvaluator
        from csloc_utils.worlds import World

        world = World(heads=self.n_heads, seed=int(name.removeprefix("world ")))
        return SimulatedEvaluator(world=world, n_items=n_items, seed=seed)

    def locate(self, name: str, seed: int) -> Any:
        """Return the evaluator that a method may use."""
        return self._evaluator(name, seed, N_ITEMS)

    def verify(self, name: str) -> Any:
        """Return the evaluator that judges."""
        return self._evaluator(name, 1000, 60)

    def controls(self, name: str) -> list[Any]:
        """Return nothing: a world has one task."""
        return []

    others = controls


def judge(source: Any, task: str, heads: list[int]) -> dict[str, Any]:
    """Ablate the heads on items that no method has seen."""
    judging = source.verify(task)
    mask = np.zeros((1, judging.grid.size), bool)
    mask[0, heads] = True
    measured = judging.measure(mask, count=False)
    drops = {s: -measured.item_effects(s)[0] for s in ("logprob", "accuracy")}
    drops["probability"] = -np.diff(_probabilities(measured), axis=0)[0]
    controls: dict[str, dict[str, float]] = {}
    for control in source.controls(task):
        other = control.measure(mask, count=False)
        controls[control.task.name] = {
            "logprob": float(-other.effects()[0]),
            "accuracy": float(-other.effects("accuracy")[0]),
            "probability": float(-np.diff(_probabilities(other), axis=0).mean()),
        }
    return {"drops": {s: np.round(d, 4).tolist() for s, d in drops.items()}, "controls": controls}


def _probabilities(measured: Any) -> np.ndarray:
    """Intact and ablated mean answer probability of every item ``(2, n_items)``."""
    return np.exp([measured.intact["logprob"][0], measured.scores["logprob"][0]])


def run(source: Any, wanted: Iterator[tuple[str, int, str]], record: Path) -> None:
    """Run the cases that are not on record and append them to it."""
    record.parent.mkdir(parents=True, exist_ok=True)
    done = {(r["model"], r["task"], r["seed"], r["method"]) for r in read_cases(record)}
    for task, seed, method in wanted:
        if (source.name, task, seed, method) in done:
            continue
        evaluator = source.locate(task, seed)
        start = time.perf_counter()
        found = METHODS[method](evaluator, seed, partial(source.others, task))
        seconds = time.perf_counter() - start
        for budget, (heads, equivalents) in sorted(found.items()):
            row = {
                "model": source.name,
                "task": task,
                "seed": seed,
                "method": method,
                "budget": budget,
                "equivalents": equivalents,
                "seconds": round(seconds, 1),
                "heads": [str(evaluator.grid.head(i)) for i in heads],
                **judge(source, task, heads),
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "versions": source.versions,
            }
            _append(record, row)
        if method == "greedy" and seed == 0:
            _append(record, random_band(source, task, heads))
        print(f"{task}, seed {seed}, {method}: {seconds:.0f} s", flush=True)


def random_band(source: Any, task: str, heads: list[int]) -> dict[str, Any]:
    """Damage of random sets from the layers of greedy's heads, to see whether a task counts."""
    judging = source.verify(task)
    sets = layer_matched(judging.grid, [judging.grid.head(i) for i in heads], N_RANDOM, 0)
    drops = -judging.measure(sets, count=False).effects()
    row = {"model": source.name, "task": task, "seed": 0, "method": "random", "budget": 0}
    facts = judging.facts.tolist()
    return row | {"mean_drops": np.round(drops, 4).tolist(), "facts": facts}


def _append(record: Path, row: dict[str, Any]) -> None:
    with record.open("a", encoding="utf8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def report(rows: list[dict[str, Any]], model: str) -> None:
    """Print the table; write it and its figure."""
    import matplotlib.pyplot as plt
    import pandas as pd

    from csloc_utils import plots, yardstick

    table = yardstick.tabulate(rows)
    out = ROOT / "_build" / "bench"
    out.mkdir(parents=True, exist_ok=True)
    table.to_csv(out / f"search-{model}.csv", index=False, float_format="%.4f")
    plots.set_style()
    ax = plots.cost_curves(table)
    ax.set_title(f"{model}, {table['tasks'].max()} tasks", fontsize=10)
    ax.figure.savefig(out / f"search-{model}.png", dpi=150)
    plt.close(ax.figure)
    with pd.option_context("display.width", 250, "display.max_columns", None):
        print(table.round(2).to_string(index=False))
        known = list(yardstick.shares(rows))
        for other in [key for key in known if key[0].startswith("paper") and key[1] == 45]:
            print(f"\nscreened, 45, minus {other[0]}, 45")
            print(yardstick.non_inferior(rows, ("screened", 45), other).round(2))
    print(f"\nwritten to {out}")


def main() -> None:
    """Run or tabulate."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--model", default="smollm2-135m-q4")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tasks", nargs="+", default=[*TUNED, *FRESH])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--store", type=Path, default=STORE)
    parser.add_argument("--simulated", type=int, metavar="N", help="worlds of N heads instead")
    args = parser.parse_args()
    if args.simulated:
        args.model, args.tasks = f"simulated-{args.simulated}", [f"world {i}" for i in range(6)]
    if args.what == "run":
        simulated = args.simulated and Simulated(args.simulated)
        source = simulated or Live(args.model, args.store, args.dtype)
        run(source, cases(args.tasks, args.methods, args.seeds), args.record)
    else:
        rows = read_cases(args.record, args.model)
        if not rows:
            raise SystemExit(f"nothing is recorded of {args.model}: run the benchmark first")
        report(rows, args.model)


if __name__ == "__main__":
    main()
