"""Record what the chapters on specialists, transfer and scale read: head sets on every task.

    python tests/benchmarks/atlas.py --model M      # may be killed and rerun: it goes on

For every task the model can do, by the gate on all locate items: conditional screening for five
heads, on 24 of them. Then every set is switched off on 24 verify items of every task, beside random
heads of the same layers. Then the first task's search is taken further, to twenty heads, and damage
is measured against their number.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from csloc_utils.atlas import atlas, dose
from csloc_utils.gate import check_capability
from csloc_utils.measure import Evaluator
from csloc_utils.models import load_model
from csloc_utils.screening import screened
from csloc_utils.tasks import load_task

ROOT = Path(__file__).resolve().parents[2]
TASKS = (
    "multiplication,worded-multiplication,addition,worded-addition,sum-stories,subtraction,"
    "repeat-left,capitals,knowledge,copying,code,text"
)
N_ITEMS = 24
SIZES = (1, 2, 3, 5, 8, 12, 20)


def rounded(value: Any) -> Any:
    """Round all floats: a record needs no more digits than float32 arithmetic gives."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {name: rounded(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(v) for v in value]
    return value


def main() -> None:
    """Record one model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-q4")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--random", type=int, default=10)
    parser.add_argument("--dose", type=int, default=20, help="heads of the dose; 0: none")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--store", type=Path, default=ROOT / "_build/bench/measurements.sqlite")
    args = parser.parse_args()
    model = load_model(args.model, dtype=args.dtype)
    options = {"store": args.store, "progress": False}
    gates, found, judges = {}, {}, {}
    for name in args.tasks.split(","):
        task = load_task(name)
        gate = check_capability(Evaluator(model, task, "locate", **options))
        gates[name] = gate.to_dict()
        print(name, "passed" if gate.passed else "left out", f"{gate.accuracy:.2f}", flush=True)
        if not gate.passed:
            continue
        found[name] = screened(Evaluator(model, task, n_items=N_ITEMS, **options), args.k)
        judges[name] = Evaluator(model, task, "verify", n_items=N_ITEMS, **options)
        print(name, *found[name].found, flush=True)
    made = atlas(judges, {name: result.found for name, result in found.items()}, args.random)
    written = {
        "command": shlex.join(["python", "tests/benchmarks/atlas.py", *_said(parser, args)]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": {"name": model.name, **model.fingerprint},
        "n_heads": model.grid.size,
        "gates": gates,
        "found": {name: result.table for name, result in found.items()},
        "atlas": made.to_dict(),
    }
    if args.dose:
        first = next(iter(judges))
        evaluator = Evaluator(model, load_task(first), "locate", n_items=N_ITEMS, **options)
        order = screened(evaluator, args.dose).found
        written["dose"] = {
            "task": first,
            "heads": [str(head) for head in order],
            "table": dose(judges, order, SIZES).to_dict("records"),
        }
    path = ROOT / "data" / "recorded" / args.model / "atlas.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(written), ensure_ascii=False) + "\n", "utf8")
    print(f"written to {path.relative_to(ROOT)}")


def _said(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """Return the options that differ from their defaults, without the place of the store."""
    options = {n: v for n, v in vars(args).items() if n != "store" and v != parser.get_default(n)}
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


if __name__ == "__main__":
    sys.exit(main())
