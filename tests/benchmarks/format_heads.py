"""Is there one head whose loss takes every lettered question to chance, and open ones not?

    python tests/benchmarks/format_heads.py --model M      # may be killed and rerun: it goes on

The same facts are asked twice: with lettered choices and openly. Where the
gate lets the lettered forms pass, candidates are the heads of layers 0 and 1 (where the paper finds
its format heads) and the 20 steepest by slopes at 0.75 and 1, on either lettered task. Each is
switched off alone on 24 locate items of both; the five that cost most on average are switched off
alone on every verify item of all four forms.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from csloc_utils.gate import check_capability
from csloc_utils.measure import Evaluator
from csloc_utils.models import load_model
from csloc_utils.tasks import load_task

ROOT = Path(__file__).resolve().parents[2]
PAIRS = {"knowledge-letters": "knowledge", "capitals-letters": "capitals"}
N_ITEMS, N_STEEPEST, N_HEADS = 24, 20, 5


def candidates(evaluators: list[Evaluator]) -> np.ndarray:
    """Flat indices of the heads that are measured one by one."""
    grid = evaluators[0].grid
    chosen = set(range(2 * grid.n_heads))
    for evaluator in evaluators:
        for strength in (0.75, 1.0):
            slopes = evaluator.slopes(np.zeros((1, grid.size), bool), strength)
            chosen |= set(np.argsort(slopes.effects[0])[:N_STEEPEST].tolist())
    return np.array(sorted(chosen))


def main() -> None:
    """Record one model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-q4")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--store", type=Path, default=ROOT / "_build/bench/measurements.sqlite")
    args = parser.parse_args()
    model = load_model(args.model, dtype=args.dtype)
    options = {"store": args.store, "progress": False}
    names = [name for pair in PAIRS.items() for name in pair]
    gates = {}
    for name in names:
        gate = check_capability(Evaluator(model, load_task(name), "locate", **options))
        gates[name] = gate.to_dict()
        print(name, "passed" if gate.passed else "closed", f"{gate.accuracy:.2f}", flush=True)
    written = {
        "command": shlex.join(
            ["python", "tests/benchmarks/format_heads.py", "--model", args.model]
            + ["--dtype", args.dtype]
        ),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": {"name": model.name, **model.fingerprint},
        "pairs": PAIRS,
        "gates": gates,
    }
    lettered = [name for name in PAIRS if gates[name]["passed"]]
    if lettered:
        locators = [Evaluator(model, load_task(n), n_items=N_ITEMS, **options) for n in lettered]
        tried = candidates(locators)
        masks = model.grid.single_masks()[tried]
        effects = [locator.measure(masks).effects() for locator in locators]
        order = tried[np.argsort(np.mean(effects, axis=0))][:N_HEADS]
        heads = [model.grid.head(i) for i in order]
        print(*heads, flush=True)
        written["tried"] = [str(model.grid.head(i)) for i in tried]
        written["located"] = {n: e.round(4).tolist() for n, e in zip(lettered, effects)}
        written["heads"] = [str(head) for head in heads]
        written["verify"] = {}
        for name in names:
            judge = Evaluator(model, load_task(name), "verify", **options)
            measured = judge.measure(model.grid.single_masks()[order], count=False)
            written["verify"][name] = {"facts": judge.facts.tolist()} | {
                score: {
                    "intact": measured.baseline[score].round(4).tolist(),
                    "ablated": measured.scores[score].round(4).tolist(),
                }
                for score in ("accuracy", "logprob")
            }
            print(name, measured.effects("accuracy").round(2), flush=True)
    path = ROOT / "data" / "recorded" / args.model / "format-heads.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, ensure_ascii=False) + "\n", "utf8")
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
