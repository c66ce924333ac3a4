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
from pathlib import Path
from typing import Any

from csloc_utils.mapping import Survey, survey, survey_report
from csloc_utils.measure import Evaluator
from csloc_utils.models import load_model
from csloc_utils.screening import screened
from csloc_utils.tasks import load_task
from csloc_utils.transfer import dose

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
    tasks = [load_task(name) for name in args.tasks.split(",")]
    made = survey(model, tasks, args.k, args.random, N_ITEMS, N_ITEMS, report=_say, **options)
    command = shlex.join(["python", "tests/benchmarks/atlas.py", *_said(parser, args)])
    written = survey_report(made, model, command)
    if args.dose:
        first = next(iter(made.found))
        evaluator = Evaluator(model, load_task(first), "locate", n_items=N_ITEMS, **options)
        order = screened(evaluator, args.dose).found
        written["dose"] = {
            "task": first,
            "heads": [str(head) for head in order],
            "table": dose(made.judges, order, SIZES).to_dict("records"),
        }
    path = ROOT / "data" / "recorded" / args.model / "atlas.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(written), ensure_ascii=False) + "\n", "utf8")
    print(f"written to {path.relative_to(ROOT)}")


def _say(made: Survey, name: str) -> None:
    """Say how a task did."""
    found = made.found.get(name)
    heads = " ".join(map(str, found.found)) if found else "left out"
    print(f"{name} {made.gates[name].accuracy:.2f} {heads}", flush=True)


def _said(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """Return the options that differ from their defaults, without the place of the store."""
    options = {n: v for n, v in vars(args).items() if n != "store" and v != parser.get_default(n)}
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


if __name__ == "__main__":
    sys.exit(main())
