"""Slopes and masks together: does any way of fusing them beat what there is, at equal cost?

    python tests/benchmarks/fusion.py            # simulated worlds, and the recorded tasks replayed
    python tests/benchmarks/fusion.py --judge    # also ablates the heads named on verify items

Two questions, never mixed up: the damage of the *set* of five heads on held-out items, as a share
of greedy search's; and the *single* effects of the five on the locate items, as a share of those of
the sweep's first five. Every variant pays in evaluation-equivalents and gets the same budget.

Settings were chosen on worlds 0 to 49 and on the recorded tasks in TUNED, and frozen before the
worlds from FIRST_WORLD on and the other tasks were looked at. Recorded tasks have random masks and
slopes of the intact model; variants that need more run in simulated worlds only. Results go to
``data/recorded/fusion.json``, which a chapter reads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import datetime, timezone
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm, rankdata
from search import FRESH, RECORD, ROOT, STORE, TUNED, K, Live, Simulated
from sklearn.linear_model import Lasso

from csloc_utils import search
from csloc_utils.designs import stratified
from csloc_utils.errors import InputError
from csloc_utils.fusion import STRENGTHS, fuse, fused
from csloc_utils.measurements import SLOPE_COST
from csloc_utils.recorded import RecordedEvaluator, recorded_tasks
from csloc_utils.recovery import HeadLasso
from csloc_utils.screening import STRENGTHS as TURNS
from csloc_utils.screening import screened
from csloc_utils.yardstick import read_cases

TASKS = [task for task in (*TUNED, *FRESH) if task != "code"]  # code has a sweep and no masks
BUDGETS = (45, 61, 100)
FIRST_WORLD, N_WORLDS = 100, {270: 60, 1024: 30}
OUT = ROOT / "data" / "recorded" / "fusion.json"
PASSES = SLOPE_COST * len(STRENGTHS)  # what slopes of the intact model cost

Variant = Callable[[Any, int, int], Any]  # evaluator, budget, seed -> flat indices of K heads


def _masks(evaluator: Any, n: int, seed: int) -> np.ndarray:
    """Return the paper's masks."""
    size = evaluator.grid.size
    return stratified(n, size, search.default_size(size), seed)


def _slopes(evaluator: Any) -> list[np.ndarray]:
    intact = np.zeros((1, evaluator.grid.size), bool)
    return [evaluator.slopes(intact, s).effects[0] for s in STRENGTHS]


def _flat(evaluator: Any, result: search.SearchResult) -> list[int]:
    return [evaluator.grid.flat(head) for head in result.found]


def paper(response: Callable[[Any], np.ndarray]) -> Variant:
    """The paper's Lasso on some response."""

    def run(evaluator: Any, budget: int, seed: int) -> Any:
        measured = evaluator.measure(_masks(evaluator, budget - 1, seed))
        return HeadLasso().fit(measured.masks, response(measured)).top(K)

    return run


def weighted(evaluator: Any, budget: int, seed: int) -> Any:
    """The paper's Lasso with a penalty that falls with the square root of a head's mean slope."""
    needed = np.maximum(-np.mean(_slopes(evaluator), axis=0), 0)
    weight = np.sqrt(0.2 + needed / needed.mean())
    weight /= weight.mean()
    masks = _masks(evaluator, budget - 1 - PASSES, seed)
    effects = evaluator.measure(masks).effects()
    effects = (effects - effects.mean()) / effects.std()
    fit = Lasso(alpha=0.01, max_iter=5000).fit(masks * weight, effects)
    left = effects - fit.predict(masks * weight)
    tie = weight * ((masks - masks.mean(axis=0)).T @ left)
    return np.lexsort((tie, fit.coef_ * weight))[:K]


def unconfirmed(evaluator: Any, budget: int, seed: int) -> Any:
    """`fuse` with all masks that the budget has."""
    masks = _masks(evaluator, budget - 1 - PASSES, seed)
    effects = evaluator.measure(masks).effects()
    return np.argsort(fuse(masks, effects, _slopes(evaluator)).effects)[:K]


def confirmed(evaluator: Any, budget: int, seed: int) -> Any:
    """No random masks: heads by the better of their places by either slope, measured alone."""
    places = np.min([rankdata(guess) for guess in _slopes(evaluator)], axis=0)
    first = np.argsort(places, kind="stable")[: budget - 1 - PASSES]
    effects = evaluator.measure(evaluator.grid.single_masks()[first]).effects()
    return first[np.argsort(effects)[:K]]


def _under_masks(evaluator: Any, budget: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Masks, and mean slopes under them of the heads that are on; a pass a mask."""
    masks = _masks(evaluator, (budget - 1) // SLOPE_COST, seed)
    slopes = evaluator.slopes(masks).effects
    on = ~masks
    return masks, (slopes * on).sum(axis=0) / np.maximum(on.sum(axis=0), 1)


def under_masks(evaluator: Any, budget: int, seed: int) -> Any:
    """Mean slopes under the paper's masks."""
    return np.argsort(_under_masks(evaluator, budget, seed)[1])[:K]


def under_masks_fused(evaluator: Any, budget: int, seed: int) -> Any:
    """The same as prior of the masks' own effects, which the passes give for nothing."""
    masks, slopes = _under_masks(evaluator, budget, seed)
    effects = evaluator.measure(masks, count=False).effects()
    return np.argsort(fuse(masks, effects, [slopes]).effects)[:K]


def rounds(choose: Callable[[Any, np.ndarray, np.ndarray, int, int, dict], Any]) -> Variant:
    """Conditional screening with candidates that `choose` names, and a memory over rounds."""

    def run(evaluator: Any, budget: int, seed: int) -> list[int]:
        spare, memory = budget - 1 - SLOPE_COST * K, {"rng": np.random.default_rng(seed)}
        found: list[int] = []
        joint = 0.0
        for number in range(K):
            base = np.zeros((1, evaluator.grid.size), bool)
            base[0, found] = True
            guess = evaluator.slopes(base, TURNS[number % len(TURNS)]).effects[0].copy()
            guess[found] = 0
            share = spare // K + (number < spare % K)
            named = choose(evaluator, base, guess, share, number, memory)
            masks = base.repeat(len(named), axis=0)
            masks[np.arange(len(named)), named] = True
            effects = evaluator.measure(masks).effects() - joint
            if "mean" in memory:
                memory["mean"][named], memory["variance"][named] = effects, 1e-6
            best = int(np.argmin(effects))
            found.append(int(named[best]))
            joint += effects[best]
        return found

    return run


def _first(values: np.ndarray, base: np.ndarray, n: int) -> np.ndarray:
    return np.argsort(np.where(base[0], np.inf, values), kind="stable")[:n]


def with_masks(
    evaluator: Any, base: np.ndarray, guess: np.ndarray, share: int, number: int, memory: dict
) -> np.ndarray:
    """Two fifths of a round in masks of three of the first forty heads, fused with the slopes."""
    n_masks = max(int(0.4 * share), 2)
    masks, pool = base.repeat(n_masks, axis=0), _first(guess, base, 40)
    for mask in masks:
        mask[memory["rng"].choice(pool, 3, replace=False)] = True
    effects = evaluator.measure(masks).effects()
    return _first(fuse(masks & ~base, effects, [guess]).effects, base, share - n_masks)


def with_memory(
    evaluator: Any, base: np.ndarray, guess: np.ndarray, share: int, number: int, memory: dict
) -> np.ndarray:
    """A Kalman filter a head: earlier slopes and measurements, less sure after every round."""
    noise = np.maximum(np.abs(guess), guess.std()) ** 2
    if number == 0:
        memory |= {"mean": guess.copy(), "variance": noise}
    else:
        drift = 4 * np.maximum(memory["mean"] ** 2, guess.std() ** 2)
        before = memory["variance"] + drift
        gain = before / (before + noise)
        memory["mean"] = memory["mean"] + gain * (guess - memory["mean"])
        memory["variance"] = (1 - gain) * before
    return _first(memory["mean"], base, share)


VARIANTS: dict[str, Variant] = {
    "conditional screening": lambda e, budget, seed: _flat(e, screened(e, K, budget)),
    "… with masks near the found": rounds(with_masks),
    "… with a memory": rounds(with_memory),
    "the paper's Lasso": paper(lambda m: m.effects()),
    "… response clipped at -6": paper(lambda m: m.item_effects().clip(-6).mean(axis=1)),
    "… response ranked": paper(
        lambda m: norm.ppf((rankdata(m.effects()) - 0.5) / len(m.masks)),
    ),
    "… penalty weighted by slopes": weighted,
    "slopes under masks": under_masks,
    "slopes under masks, fused": under_masks_fused,
    "fused, not confirmed": unconfirmed,
    "fused": lambda e, budget, seed: _flat(e, fused(e, K, budget, seed=seed)),
    "slopes, confirmed": confirmed,
}
# What recorded tasks hold.
REPLAYED = [name for name in VARIANTS if not name.startswith(("cond", "… with", "slopes under"))]


def run(name: str, evaluator: Any, budget: int, seed: int) -> list[int]:
    """Run a variant; it may not cost more than its budget."""
    before = evaluator.evaluations["equivalents"]
    heads = [int(head) for head in VARIANTS[name](evaluator, budget, seed)]
    spent = 1 + evaluator.evaluations["equivalents"] - before
    if spent > budget or len(set(heads)) != K:
        raise AssertionError(f"{name} spent {spent} of {budget} and named {heads}")
    return heads


def single_share(evaluator: Any, heads: list[int]) -> float:
    """Single effects of these heads over those of the sweep's first."""
    effects = evaluator.measure(evaluator.grid.single_masks(), count=False).effects()
    return float(effects[heads].sum() / np.sort(effects)[:K].sum())


def damage(evaluator: Any, heads: list[int]) -> float:
    """Drop in log-probability without these heads."""
    mask = np.zeros((1, evaluator.grid.size), bool)
    mask[0, heads] = True
    return float(-evaluator.measure(mask, count=False).effects()[0])


def simulated(n_heads: int) -> dict[str, Any]:
    """Shares in every world, by variant and budget."""
    source, n = Simulated(n_heads), N_WORLDS[n_heads]
    shares: dict[str, Any] = {v: {b: {"set": [], "single": []} for b in BUDGETS} for v in VARIANTS}
    for number in range(FIRST_WORLD, FIRST_WORLD + n):
        name = f"world {number}"
        evaluator, judge = source.locate(name, 0), source.verify(name)
        greedy = damage(judge, _flat(evaluator, search.greedy(evaluator, K)))
        for variant, budgets in shares.items():
            for budget, both in budgets.items():
                heads = run(variant, evaluator, budget, number)
                both["set"].append(round(min(damage(judge, heads) / greedy, 1), 4))
                both["single"].append(round(single_share(evaluator, heads), 4))
    return {"worlds": n, "shares": shares}


class Replay(RecordedEvaluator):
    """A record; slopes of the intact model that it lacks are taken from the model."""

    def __init__(self, model: str, task: str, source: Callable[[], Live]) -> None:
        super().__init__(f"{model}/{task}")
        self._live = lambda: source().locate(task, 0)

    def slopes(self, masks: np.ndarray, *point: Any) -> Any:
        """Look slopes up, or take them."""
        try:
            return super().slopes(masks, *point)
        except InputError:
            self._count(len(masks), backward=True)
            return self._live().slopes(masks, *point)


def replayed(model: str, tasks: list[str], source: Callable[[], Live]) -> dict[str, Any]:
    """Heads and single shares on recorded tasks, by variant and budget."""
    result: dict[str, Any] = {}
    for task in tasks:
        evaluator = Replay(model, task, source)
        result[task] = {}
        for name in REPLAYED:
            result[task][name] = {}
            for budget in BUDGETS:
                heads = run(name, evaluator, budget, 0)
                result[task][name][budget] = {
                    "heads": [str(evaluator.grid.head(i)) for i in heads],
                    "single": round(single_share(evaluator, heads), 4),
                }
    return result


def judged(source: Live, tasks: dict[str, Any]) -> None:
    """Add what the named heads do on verify items, beside greedy's heads on record."""
    rows = read_cases(RECORD, source.name)
    for task, variants in tasks.items():
        judge = source.verify(task)
        slow = [r for r in rows if (r["task"], r["method"]) == (task, "greedy")]
        greedy = np.mean([np.mean(r["drops"]["logprob"]) for r in slow])
        for budgets in variants.values():
            for found in budgets.values():
                heads = [judge.grid.flat(h) for h in judge.grid.parse(",".join(found["heads"]))]
                found["set"] = round(min(damage(judge, heads) / greedy, 1), 4)
        print(f"{task} judged", flush=True)


def show(title: str, values: dict[str, dict[int, list[float]]]) -> None:
    """Print means, and the worst, by budget."""
    print(f"\n{title}")
    for name, budgets in values.items():
        cells = [f"{np.mean(v):.2f} (worst {np.min(v):.2f})" for v in budgets.values()]
        print(f"{name:32s}", *cells)


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-q4")
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--heads", nargs="*", type=int, default=list(N_WORLDS))
    parser.add_argument("--judge", action="store_true", help="ablate on verify items as well")
    parser.add_argument("--store", type=Path, default=STORE)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    missing = set(args.tasks) - set(recorded_tasks(args.model))
    if missing:
        raise SystemExit(f"no record of {', '.join(missing)}: run tests/benchmarks/record.py")
    worlds = {n: simulated(n) for n in args.heads}
    source = cache(partial(Live, args.model, args.store, "float32"))
    real = replayed(args.model, args.tasks, source)
    if args.judge:
        judged(source(), real)
    report = {
        "simulated": worlds,
        "recorded": real,
        "budgets": BUDGETS,
        "k": K,
        "model": RecordedEvaluator(f"{args.model}/{args.tasks[0]}").provenance["model"],
        "command": "python tests/benchmarks/fusion.py" + " --judge" * args.judge,
        "versions": {p: version(p) for p in ("numpy", "scipy", "scikit-learn")},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    args.out.write_text(json.dumps(report, ensure_ascii=False) + "\n", encoding="utf8")
    for kind in ("set", "single"):
        for n, world in worlds.items():
            table = {v: {b: x[kind] for b, x in bs.items()} for v, bs in world["shares"].items()}
            show(f"{kind}, {n} simulated heads, {world['worlds']} worlds", table)
        if kind == "single" or args.judge:
            table = {
                v: {b: [real[t][v][b][kind] for t in args.tasks] for b in BUDGETS} for v in REPLAYED
            }
            show(f"{kind}, {', '.join(args.tasks)}", table)


if __name__ == "__main__":
    main()
