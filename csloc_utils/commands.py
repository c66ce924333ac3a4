"""What the commands do; their options are read in :mod:`csloc_utils.cli`.

A command checks everything that can be known to be wrong before the weights are loaded, so heavy
imports stand inside the functions, behind those checks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from csloc_utils.console import (
    calm,
    print_plan,
    print_table,
)
from csloc_utils.errors import InputError

LOCATE_ITEMS = 24  # items a mask is scored on unless --items says otherwise
PAPER_BUDGET = 150  # within the paper's 100 to 400 evaluations


def models(args: argparse.Namespace) -> None:
    """List the models with a name."""
    from csloc_utils.sources import KNOWN_MODELS

    rows = [
        (
            name,
            f"{m.n_layers} × {m.n_heads}",
            m.n_layers * m.n_heads,
            f"{2 * m.billions:.1f} / {4 * m.billions:.1f}",
            m.location,
            m.note,
        )
        for name, m in KNOWN_MODELS.items()
    ]
    print_table(("model", "layers × heads", "heads", "GB in 16 / 32 bits", "from", ""), rows)
    print("\nAny hub id, checkpoint folder or .gguf file works as well.")


def tasks(args: argparse.Namespace) -> None:
    """List the built-in tasks."""
    from csloc_utils.tasks import BENCHMARKS, list_tasks

    rows = [(t.name, t.scoring, len(t.locate), len(t.verify), t.capability) for t in list_tasks()]
    print_table(("task", "scoring", "locate", "verify", "capability"), rows)
    print("\nPublic benchmarks, from the hub or from a folder (--data-dir):")
    rows = [(b.name, b.capability, b.scored) for b in BENCHMARKS.values()]
    print_table(("benchmark", "capability", "usually scored by"), rows)
    print("\nA .jsonl file of your own works as well: see the book's page on running.")


def plan(args: argparse.Namespace) -> None:
    """Say what searches will cost."""
    from csloc_utils.devices import DTYPES, find_device
    from csloc_utils.models import load_config, promised_grid
    from csloc_utils.planning import plan, time_of_a_mask
    from csloc_utils.tasks import load_task

    check_choice("dtype", args.dtype, ("auto", *DTYPES))
    find_device(args.device)
    task = load_task(args.task)
    n_items = locate_items(args, task)
    grid = promised_grid(load_config(args.model))
    plan(grid.size, args.k, n_items, args.seconds, args.confidence)  # bad numbers, before the model
    seconds = args.seconds
    if seconds is None:
        from csloc_utils.measure import Evaluator
        from csloc_utils.models import load_model

        if not args.debug:
            calm()
        model = load_model(args.model, dtype=args.dtype, device=args.device)
        options = dict(store=":memory:", progress=False)
        seconds = time_of_a_mask(Evaluator(model, task, "locate", n_items, **options))
    made = plan(grid.size, args.k, n_items, seconds, args.confidence)
    items = f"{n_items} items of {task.name}, {seconds:.2f} s a mask"
    print(f"{grid.size} heads, k = {args.k}, {items}")
    print_plan(made)


def ablate(args: argparse.Namespace) -> None:
    """Switch heads off and score tasks."""
    from csloc_utils.tasks import load_task

    check_seed(args)
    tasks = [load_task(name, args.seed) for name in args.task]
    for task in tasks:
        task.items(args.split, args.items)
    grid, tokenizer = prepare(args, {task: args.split for task in tasks}, {})
    heads = grid.parse(args.heads)
    import numpy as np

    from csloc_utils.intervals import Interval, bootstrap
    from csloc_utils.measure import Evaluator
    from csloc_utils.results import ablate_report, write_json

    store = open_store(args)
    model = load(args, tokenizer)
    print(f"{model}\nablated ({args.ablation}): {', '.join(map(str, heads))}\n")
    results = []
    for task in tasks:
        evaluator = Evaluator(
            model,
            task,
            args.split,
            args.items,
            ablation=args.ablation,
            store=store,
            progress=not args.quiet,
        )
        measured = evaluator.measure(model.grid.mask(heads))
        result: dict[str, Any] = {"task": task.name, "items": len(evaluator.items)}
        result["intact"] = {s: float(np.mean(v)) for s, v in measured.baseline.items()}
        result["ablated"] = {s: float(np.mean(v[0])) for s, v in measured.scores.items()}
        result["seed"] = task.seed
        result["drop"] = {}
        for score in measured.scores:
            drop = bootstrap([(-measured.item_effects(score)[0], evaluator.facts)])
            result["drop"][score] = vars(drop)
        results.append(result)
    if args.json:
        write_json(args.json, ablate_report(args, model, heads, results))
    rows = [
        (r["task"], r["items"], s, r["intact"][s], r["ablated"][s], Interval(**r["drop"][s]))
        for r in results
        for s in ("logprob", "accuracy")
    ]
    print_table(("task", "items", "score", "intact", "ablated", "drop [95 %]"), rows)
    if args.json:
        print(f"\nwritten to {args.json}")


def edit(args: argparse.Namespace) -> None:
    """Write a checkpoint in which heads are switched off, weakened or strengthened."""
    import copy

    if args.scale is not None and args.ablation is not None:
        raise InputError("--scale and --ablation exclude each other: give one of them")
    args.ablation = args.ablation or "zero"
    mean = args.ablation == "mean"
    check_choice("ablation of weights", args.ablation, ("zero", "mean"))
    if mean != (args.task is not None):
        raise InputError("--ablation mean takes its texts from --task: give both or none of them")
    check_seed(args)
    from csloc_utils.tasks import load_task

    task = load_task(args.task, args.seed) if mean else None
    grid, tokenizer = prepare(args, {task: "locate"} if task else {}, {})
    heads = grid.parse(args.heads)
    from csloc_utils import editing
    from csloc_utils.folders import check_folder
    from csloc_utils.model_card import read_evidence
    from csloc_utils.models import load_config
    from csloc_utils.references import token_means

    scale = editing.check_scale(args.scale or 0.0)
    editing.check_shard_size(args.max_shard_size)
    plan = editing.plan_edit(
        load_config(args.model), heads, mean=mean, dtype=args.dtype, name=args.model
    )
    check_folder(args.out, plan.n_bytes)
    evidence = read_evidence(args.evidence, heads, grid) if args.evidence else None
    rows = [
        (
            f"{change.path}.weight" + " and bias" * change.bias,
            " × ".join(map(str, change.shape)),
            ", ".join(map(str, change.heads)),
            len(change.columns),
        )
        for change in plan.changes
    ]
    print_table(("changed tensors", "shape", "heads", "columns"), rows)
    print(f"\n{plan.n_bytes / 1e6:.1f} MB of weights in {plan.dtype}, edit: ", end="")
    print(f"times {scale:g}" if scale else f"{args.ablation} ablation")
    if args.dry_run:
        print("dry run: nothing was written")
        return
    args.dtype = plan.dtype
    model = load(args, copy.deepcopy(tokenizer))  # wrapping sets how its own pads
    editing.save_edited(
        model,
        heads,
        args.out,
        scale=scale,
        means=token_means(model, task) if task else None,
        reference=f"locate items of task {task.name}, seed {task.seed}" if task else "",
        evidence=evidence,
        command=args.command_line,
        tokenizer=tokenizer,
        max_shard_size=args.max_shard_size,
    )
    print(f"written to {args.out}")


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Check that an option has one of its values."""
    if value not in known:
        raise InputError(f"unknown {name} {value!r}: choose from {', '.join(known)}")


def check_seed(args: argparse.Namespace) -> None:
    """Check the seed, if one is given."""
    from csloc_utils.designs import check_count

    if args.seed is not None:
        check_count("seed", args.seed, low=0)


def prepare(args: argparse.Namespace, tasks: dict, controls: dict) -> tuple[Any, Any]:
    """Check model name, dtype, files and the tasks' tokens; return head grid and tokenizer."""
    if not args.debug:
        calm()
    from csloc_utils.ablation import KINDS
    from csloc_utils.devices import DTYPES, find_device
    from csloc_utils.models import load_config, load_tokenizer, promised_grid
    from csloc_utils.results import check_writable
    from csloc_utils.scoring import encode

    check_choice("dtype", args.dtype, ("auto", *DTYPES))
    check_choice("ablation", args.ablation, KINDS)
    if args.json:
        check_writable(args.json)
    find_device(args.device)
    config = load_config(args.model)
    tokenizer = load_tokenizer(args.model)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    for task, split in [*tasks.items(), *((t, "verify") for t in controls.values())]:
        encode(task, task.items(split), tokenizer, longest)
    return promised_grid(config), tokenizer


def load(args: argparse.Namespace, tokenizer: Any) -> Any:
    """Load the model that the command names."""
    from csloc_utils.models import load_model

    return load_model(
        args.model,
        dtype=args.dtype,
        device=args.device,
        device_map=args.device_map,
        tokenizer=tokenizer,
    )


def open_store(args: argparse.Namespace) -> Any:
    """Open the store that the command names."""
    from csloc_utils.store import Store

    return Store(args.store)


def known_scores(task: Any) -> tuple[str, ...]:
    """Names of the scores that a task has."""
    from csloc_utils.scoring import SCORES

    return SCORES[task.scoring]


def locate_items(args: argparse.Namespace, task: Any) -> int:
    """How many items of the locating half a mask is scored on."""
    if args.items is None and getattr(args, "method", None) == "race":
        return len(task.locate)  # it stops by itself
    if args.items is None:
        return min(LOCATE_ITEMS, len(task.locate))
    return len(task.items("locate", args.items))


def split_names(text: str) -> list[str]:
    """Names between commas; none of them for the word ``none``."""
    return [] if text == "none" else [name.strip() for name in text.split(",")]
