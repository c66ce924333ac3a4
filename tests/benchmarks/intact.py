"""How well does the intact model do on public benchmarks, beside what its authors report?

    python tests/benchmarks/intact.py --data-dir FOLDER      # some minutes a benchmark

Accuracy with a 95 % interval over facts, on a seeded sample of items. No item is written to the
result, ``data/recorded/intact-MODEL.json``.
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timezone
from pathlib import Path

from csloc_utils.errors import InputError
from csloc_utils.intervals import bootstrap
from csloc_utils.measure import Evaluator
from csloc_utils.models import load_model
from csloc_utils.tasks import load_benchmark

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "hellaswag boolq arc-challenge arc-challenge:letters mmlu-bio-chem-cs mmlu-bio-chem-cs:letters "
    "lambada rhyming swearing gsm8k"
).split()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--model", default="smollm2-135m-q4")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--items", type=int, default=60)
    parser.add_argument("--benchmarks", nargs="+", default=NAMES)
    args = parser.parse_args()
    model = load_model(args.model, dtype=args.dtype)
    out = ROOT / "data" / "recorded" / f"intact-{model.name}.json"
    rows = json.loads(out.read_text("utf8"))["benchmarks"] if out.exists() else {}
    for name in args.benchmarks:
        try:
            task = load_benchmark(name, args.data_dir)
            n_items = min(args.items, len(task.locate + task.verify))
            evaluator = Evaluator(model, task, "all", n_items, store=":memory:", chunk=1)
        except InputError as error:
            print(f"{name}: {error}")
            continue
        row = {"items": n_items, "shots": task.prefix.count("Answer:"), "scoring": task.scoring}
        for score, values in evaluator.baseline.items():
            row[score] = {
                "value": float(values.mean()),
                "interval": vars(bootstrap([(values, evaluator.facts)])),
            }
        rows[name] = row | {"chance": task.chance, "fingerprint": task.fingerprint(evaluator.items)}
        accuracy = bootstrap([(evaluator.baseline["accuracy"], evaluator.facts)])
        print(f"{name}: {accuracy} on {n_items} items, chance {task.chance:.2f}", flush=True)
        report = {
            "benchmarks": rows,
            "model": {"name": model.name, **model.fingerprint},
            "command": "python tests/benchmarks/intact.py --data-dir FOLDER",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        out.write_text(json.dumps(report, indent=1) + "\n", "utf8")


if __name__ == "__main__":
    main()
