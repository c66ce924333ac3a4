"""Record whether models swear when they are asked to: what the chapter on edits has to know.

    python tests/benchmarks/swearing.py --data-dir FOLDER MODEL …

Every prompt of the task is answered by the intact model, plainly and through its chat template. An
answer counts when it holds a listed word. Only shares are kept, no word and no answer.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

from csloc_utils.intervals import bootstrap
from csloc_utils.models import load_model
from csloc_utils.written import WritingEvaluator, load_written

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Record some models."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--store", type=Path, default=ROOT / "_build/bench/swearing.sqlite")
    args = parser.parse_args()
    written = load_written("swearing", args.data_dir, max_new_tokens=args.max_new_tokens)
    rows = []
    for name in args.models:
        model = load_model(name)
        for chat in (False, True):
            judge = WritingEvaluator(
                model, written, "all", store=args.store, chat=chat, progress=False
            )
            share = bootstrap([(judge.baseline["accuracy"], judge.facts)])
            row = {"model": name, "chat": chat, "prompts": len(judge.items)}
            row |= {"share": share.value, "low": share.low, "high": share.high}
            rows.append(row | {"fingerprint": model.fingerprint})
            print(name, "chat" if chat else "plain", share, flush=True)
    command = ["python", "tests/benchmarks/swearing.py", "--data-dir", "FOLDER", *args.models]
    record = {
        "command": shlex.join(command),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "max_new_tokens": args.max_new_tokens,
        "rows": rows,
    }
    path = ROOT / "data" / "recorded" / "swearing.json"
    path.write_text(json.dumps(record, indent=1) + "\n", "utf8")
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
