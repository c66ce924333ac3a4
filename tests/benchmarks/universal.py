"""Record what the chapter on universal heads reads: the same masks on every task, and what breaks.

    python tests/benchmarks/universal.py --model M      # may be killed and rerun: it goes on

Random masks, the same for all tasks, on 24 locate items of each. Heads that at least half of the
tasks need, by these masks, are taken on to verify items: each switched off alone on every task;
replaced by mean and by another item's value; and switched off together while the model answers and
writes, beside the heads found for a task and random heads of the same layers. Scores are kept in
the store as they come; texts are written again when the script is run again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
from atlas import rounded

from csloc_utils.ablation import KINDS
from csloc_utils.degeneration import answers_under, kinds_of_loss, texts_under
from csloc_utils.designs import bernoulli, layer_matched
from csloc_utils.measure import Evaluator
from csloc_utils.models import load_model
from csloc_utils.recorded import recorded_json
from csloc_utils.tasks import load_task
from csloc_utils.universal import active_heads, confirm_alone, mask_p_values

ROOT = Path(__file__).resolve().parents[2]
TASKS = "multiplication,addition,repeat-left,capitals,knowledge,copying,code,text"
ANSWERED = ("multiplication", "addition", "repeat-left", "capitals", "copying")
N_ITEMS, N_PROMPTS, N_TOKENS = 24, 12, 48
BLOCK = 40  # masks of one task before the next task's turn, so that a killed run has all tasks


def main() -> None:
    """Record one model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-q4")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--masks", type=int, default=160)
    parser.add_argument("--share", type=float, default=0.03, help="of the heads, in a mask")
    parser.add_argument("--candidates", type=int, default=8, help="heads to switch off alone")
    parser.add_argument("--random", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--store", type=Path, default=ROOT / "_build/bench/measurements.sqlite")
    args = parser.parse_args()
    model, names, begun = (
        load_model(args.model, dtype=args.dtype),
        args.tasks.split(","),
        time.time(),
    )
    grid, tasks = model.grid, {name: load_task(name) for name in args.tasks.split(",")}
    options = {"n_items": N_ITEMS, "store": args.store, "progress": False}

    def say(what: str) -> None:
        print(f"{time.time() - begun:6.0f} s  {what}", flush=True)

    masks = bernoulli(args.masks, grid.size, args.share, 0)
    locate = {name: Evaluator(model, task, **options) for name, task in tasks.items()}
    for start in range(0, len(masks), BLOCK):
        for evaluator in locate.values():
            evaluator.measure(masks[start : start + BLOCK])
        say(f"{min(start + BLOCK, len(masks))} masks")
    effects = np.column_stack([e.measure(masks, count=False).effects() for e in locate.values()])
    p_values = mask_p_values(masks, effects)
    half = active_heads(p_values, names, at_least=(len(names) + 1) // 2)
    claimed = [grid.head(i) for i in half.heads]
    candidates = [grid.head(int(i)) for i in np.argsort(half.combined, kind="stable")]
    candidates = candidates[: max(args.candidates, len(claimed))]
    say("claimed: " + (" ".join(map(str, claimed)) or "none"))
    universal = claimed or candidates[:3]

    verify = {
        kind: {n: Evaluator(model, t, "verify", ablation=kind, **options) for n, t in tasks.items()}
        for kind in KINDS
    }
    alone = confirm_alone(verify["zero"], candidates)
    say("each alone")
    atlas = recorded_json(args.model, "atlas")["atlas"]
    found = {name: grid.parse(atlas["heads"][name]) for name in names}
    sets = {str(head): [head] for head in universal} | {"together": universal}
    kinds = kinds_of_loss(verify, sets).to_dict("records")
    for name in names:
        own = {f"{name}: first": found[name][:1], f"{name}: all": found[name]}
        judges = {kind: {name: by_task[name]} for kind, by_task in verify.items()}
        kinds += kinds_of_loss(judges, own).to_dict("records")
    say("kinds of ablation")

    answered = [name for name in ANSWERED if name in names]
    of_task = {
        name: [h for h in found[name] if h not in universal][: len(universal)] for name in answered
    }
    beside = list(layer_matched(grid, universal, args.random, 0))
    rest = {name: list(layer_matched(grid, of_task[name], args.random, 0)) for name in answered}
    intact, off = np.zeros(grid.size, bool), grid.mask(universal)
    answers = []
    for name in answered:
        task = tasks[name]
        conditions = [
            ("intact", intact),
            ("task heads", grid.mask(of_task[name])),
            ("universal heads", off),
            *(("random, layers of the task heads", mask) for mask in rest[name]),
            *(("random, layers of the universal heads", mask) for mask in beside),
        ]
        frame = answers_under(
            model, task, task.items("verify", N_ITEMS), np.array([mask for _, mask in conditions])
        )
        frame.insert(0, "condition", [conditions[m][0] for m in frame["mask"]])
        frame.insert(0, "task", name)
        answers += frame.to_dict("records")
        say(f"answers: {name}")
    conditions = [
        ("intact", intact),
        *(("task heads", grid.mask(heads)) for heads in of_task.values()),
        ("universal heads", off),
        *(("random, layers of the task heads", drawn[0]) for drawn in rest.values()),
        *(("random, layers of the universal heads", mask) for mask in beside),
    ]
    drawn = np.array([mask for _, mask in conditions])
    prompts = [item.prompt for item in tasks["text"].items("verify", N_PROMPTS)]
    texts = texts_under(model, prompts, drawn, N_TOKENS)
    texts.insert(0, "condition", [conditions[m][0] for m in texts["mask"]])
    surprise = -verify["zero"]["text"].measure(drawn, count=False).scores["logprob"]
    say("texts")
    written = {
        "command": shlex.join(["python", "tests/benchmarks/universal.py", *_said(parser, args)]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": {"name": model.name, **model.fingerprint},
        "threads": torch.get_num_threads(),
        "tasks": names,
        "n_items": N_ITEMS,
        "items": {name: e.provenance["items"] for name, e in locate.items()},
        "design": {"masks": args.masks, "share": args.share, "seed": 0},
        "effects": effects.tolist(),
        "claimed_by_half": [str(head) for head in claimed],
        "universal": [str(head) for head in universal],
        "alone": alone.to_dict("records"),
        "kinds": kinds,
        "task_heads": {name: [str(h) for h in heads] for name, heads in of_task.items()},
        "answers": answers,
        "prompts": prompts,
        "texts": texts.to_dict("records"),
        "text_surprise": [
            {"condition": name, "nats_per_token": row.tolist()}
            for (name, _), row in zip(conditions, surprise)
        ],
        "text_facts": verify["zero"]["text"].facts.tolist(),
    }
    path = ROOT / "data" / "recorded" / args.model / "universal.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(_plain(written)), ensure_ascii=False) + "\n", "utf8")
    say(f"written to {path.relative_to(ROOT)}")


def _plain(value: object) -> object:
    """NumPy scalars as Python's, and NaN as null, which JSON has."""
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and np.isnan(value) else value


def _said(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """Return the options that differ from their defaults, without the place of the store."""
    options = {n: v for n, v in vars(args).items() if n != "store" and v != parser.get_default(n)}
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


if __name__ == "__main__":
    sys.exit(main())
