"""Record what the chapter on units reads: blocks and layers, and heads beside them.

    python tests/benchmarks/units.py --model M      # may be killed and rerun: it goes on

For every task and kind of unit (attention block, MLP block, whole layer): each unit off alone,
on 24 locate items; the pairs among the five that matter most; and the best sets of one, two and
three of these five, chosen one after the other. For heads: the pairs likewise, and the sets of
conditional screening. Then every set is switched off on 24 verify items of every task.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from csloc_utils.assumptions import pair_masks
from csloc_utils.measure import Evaluator
from csloc_utils.models import load_model
from csloc_utils.recorded import RecordedEvaluator
from csloc_utils.screening import screened
from csloc_utils.tasks import load_task
from csloc_utils.units import UNITS, UnitEvaluator, unit_parameters

ROOT = Path(__file__).resolve().parents[2]
TASKS = "multiplication,capitals,copying,text"
N_ITEMS, FEW = 24, 5
SIZES = {"head": (1, 2, 3, 5, 9), "attention": (1, 2, 3), "mlp": (1, 2, 3), "layer": (1, 2, 3)}


def items(values: np.ndarray) -> list:
    """Item scores as plain lists; a record needs no more digits than the arithmetic gives."""
    return np.round(values, 4).tolist()


def best_sets(evaluator: Any, few: list[int], size: int) -> list[int]:
    """Return the units of `few` that do most damage, one after the other."""
    found: list[int] = []
    while len(found) < size:
        rest = [i for i in few if i not in found]
        masks = np.zeros((len(rest), evaluator.grid.size), bool)
        masks[:, found] = True
        masks[np.arange(len(rest)), rest] = True
        found.append(rest[int(np.argmin(evaluator.measure(masks).effects()))])
    return found


def main() -> None:
    """Record one model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-q4")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--store", type=Path, default=ROOT / "_build/bench/units.sqlite")
    args = parser.parse_args()
    model = load_model(args.model, dtype=args.dtype)
    tasks = {name: load_task(name) for name in args.tasks.split(",")}
    options = {"store": args.store, "progress": False}

    def evaluator(kind: str, name: str, split: str) -> Evaluator:
        if kind == "head":
            return Evaluator(model, tasks[name], split, N_ITEMS, **options)
        return UnitEvaluator(model, tasks[name], split, N_ITEMS, unit=kind, **options)

    sweeps: dict[str, dict] = {}
    pairs: dict[str, dict] = {}
    sets: list[dict[str, Any]] = []
    for name in tasks:
        for kind, sizes in SIZES.items():
            one = evaluator(kind, name, "locate")
            if kind == "head":  # the sweep is on record already
                single = RecordedEvaluator(f"{args.model}/{name}").measure(one.grid.single_masks())
                found = [one.grid.flat(head) for head in screened(one, max(sizes)).found]
            else:
                single = one.measure(one.grid.single_masks())
                sweeps.setdefault(kind, {})[name] = items(single.item_effects())
                few = np.argsort(single.effects())[:FEW].tolist()
                found = best_sets(one, few, max(sizes))
            top = np.argsort(single.effects())[:FEW].tolist()
            joint = one.measure(pair_masks(top, one.grid.size))
            alone = one.measure(np.eye(one.grid.size, dtype=bool)[top])
            pairs.setdefault(kind, {})[name] = {
                "units": [str(one.grid.head(i)) for i in top],
                "single": items(alone.item_effects()),
                "joint": items(joint.item_effects()),
            }
            for size in sizes:
                units = found[:size]
                names = [str(one.grid.head(i)) for i in units]
                sets.append({"task": name, "kind": kind, "size": size, "units": names, "at": units})
            print(name, kind, *sets[-1]["units"], flush=True)

    facts, intact = {}, {}
    for name in tasks:
        for kind in SIZES:
            judge = evaluator(kind, name, "verify")
            mine = [s for s in sets if s["kind"] == kind]
            masks = np.zeros((len(mine), judge.grid.size), bool)
            for mask, chosen in zip(masks, mine):
                mask[chosen["at"]] = True
            measured = judge.measure(masks, count=False)
            facts[name] = judge.facts.tolist()
            intact[name] = {s: items(v[0]) for s, v in measured.baseline.items()}
            for chosen, row in zip(mine, -measured.item_effects()):
                chosen.setdefault("drops", {})[name] = items(row)
            for chosen, row in zip(mine, measured.scores["accuracy"]):
                chosen.setdefault("accuracy", {})[name] = round(float(row.mean()), 4)
            print("judged", name, kind, flush=True)
    for chosen in sets:
        del chosen["at"]
    written = {
        "command": shlex.join(["python", "tests/benchmarks/units.py", *_said(parser, args)]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": {"name": model.name, **model.fingerprint},
        "n_items": N_ITEMS,
        "parameters": unit_parameters(model),
        "locate_facts": {n: evaluator("head", n, "locate").facts.tolist() for n in tasks},
        "sweeps": sweeps,
        "pairs": pairs,
        "facts": facts,
        "intact": intact,
        "sets": sets,
    }
    assert set(SIZES) == {"head", *UNITS}
    path = ROOT / "data" / "recorded" / args.model / "units.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, ensure_ascii=False) + "\n", "utf8")
    print(f"written to {path.relative_to(ROOT)}")


def _said(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """Return the options that differ from their defaults, without the place of the store."""
    options = {n: v for n, v in vars(args).items() if n != "store" and v != parser.get_default(n)}
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


if __name__ == "__main__":
    sys.exit(main())
