"""Record what the chapters read: searches, random masks and pairs, task by task.

    python tests/benchmarks/record.py TASK...      # may be killed and rerun: it goes on

For every task, on 24 locate items, by default everything in `PARTS`: greedy search for five heads
(its first round is the sweep of all single heads), all pairs among the ten heads with the largest
single effects, conditional screening, the paper's 150 evaluations in either design, and 30 random
masks of 2, 13 and 27 heads. `--parts` names the ones that a larger model can afford.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from itertools import combinations
from pathlib import Path

import numpy as np

from csloc_utils import search
from csloc_utils.designs import stratified
from csloc_utils.measure import Evaluator
from csloc_utils.models import load_model
from csloc_utils.recorded import record
from csloc_utils.screening import screened
from csloc_utils.tasks import load_task

ROOT = Path(__file__).resolve().parents[2]


def pairs(evaluator: Evaluator) -> None:
    """Measure the 45 pairs of the ten heads with the largest single effects."""
    order = np.argsort(evaluator.measure(evaluator.grid.single_masks()).effects())
    masks = np.zeros((45, evaluator.grid.size), bool)
    for row, pair in zip(masks, combinations(order[:10], 2)):
        row[list(pair)] = True
    evaluator.measure(masks)


def paper(evaluator: Evaluator) -> None:
    """Measure the paper's masks in either design."""
    for design in search.DESIGNS:
        search.paper(evaluator, 5, 150, design=design)


def sizes(evaluator: Evaluator) -> None:
    """Measure masks of other sizes than the paper's."""
    for size in (2, 13, 27):
        evaluator.measure(stratified(30, evaluator.grid.size, size, 0))


PARTS = {
    "screened": lambda evaluator: screened(evaluator, 5),
    "sweep": lambda evaluator: search.sweep(evaluator, k=5),
    "greedy": lambda evaluator: search.greedy(evaluator, 5),
    "pairs": pairs,
    "stratified": lambda evaluator: search.paper(evaluator, 5, 150),
    "paper": paper,
    "sizes": sizes,
}


def main() -> None:
    """Record the tasks that are named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--parts", default="screened,greedy,pairs,paper,sizes")
    parser.add_argument("--model", default="smollm2-135m-q4")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--store", type=Path, default=ROOT / "_build/bench/measurements.sqlite")
    args = parser.parse_args()
    model = load_model(args.model, dtype=args.dtype)
    for name in args.tasks:
        task = load_task(name)
        options = {"n_items": 24, "store": args.store, "progress": False}
        evaluator = Evaluator(model, task, **options)
        for part in args.parts.split(","):
            PARTS[part](evaluator)
        path = ROOT / "data" / "recorded" / args.model / f"{name}.npz"
        line = f"python tests/benchmarks/record.py {name} --model {args.model}"
        if args.parts != parser.get_default("parts"):
            line += f" --parts {args.parts}"
        n_masks = record(evaluator, path, shlex.join([*line.split(), "--dtype", args.dtype]))
        print(f"{name}: {n_masks} masks in {path.relative_to(ROOT)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
