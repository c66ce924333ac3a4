"""What the commands do; their options are read in :mod:`csloc_utils.cli`.

A command checks everything that can be known to be wrong before the weights are loaded, so heavy
imports stand inside the functions, behind those checks.
"""

from __future__ import annotations

import argparse
from typing import Any

from csloc_utils.console import (
    calm,
    print_plan,
    print_search,
    print_table,
    print_verification,
)
from csloc_utils.errors import InputError

LOCATE_ITEMS = 24  # items a mask is scored on unless --items says otherwise
PAPER_BUDGET = 150  # within the paper's 100 to 400 evaluations
MOST_VERIFY = 200  # verify items that are drawn from a benchmark unless --verify-items says more
RANDOM, WRITTEN_RANDOM = 100, 10  # random head sets; writing takes long
WRITTEN_ITEMS = 40  # verify items of written answers
BY_CUSTOM = ("gsm8k", "mbpp", "humaneval", "swearing")  # judged by what a model writes


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


def locate(args: argparse.Namespace) -> None:
    """Find the heads of a capability and check them on items that did not choose them."""
    from csloc_utils.tasks import controls_for, load_task

    _check_seed(args)
    task = load_task(args.task, args.seed)
    names = controls_for(task) if args.controls is None else _split_names(args.controls)
    controls = {} if args.no_verify else {n: load_task(n, args.seed) for n in names}
    contrast = [load_task(n, args.seed) for n in _split_names(args.contrast or "none")]
    _check_locate(args, task, controls, contrast)
    n_items = _locate_items(args, task)
    n_verify = _verify_items(args, task)
    seed = task.seed if args.seed is None else args.seed
    written = _written(args, task)
    used = dict.fromkeys(contrast, "locate")
    if not written:
        used[task] = "locate" if args.no_verify else "all"
    grid, tokenizer = _prepare(args, used, controls)
    from csloc_utils import search
    from csloc_utils.gate import check_capability
    from csloc_utils.measure import Evaluator
    from csloc_utils.racing import check_race
    from csloc_utils.results import locate_report, write_json
    from csloc_utils.verify import verify

    n_tasks = 1 + len(contrast)
    shape = (args.budget, args.size, args.design, seed, n_tasks)
    search.check(args.method, grid.size, args.k, *shape)
    check_race(args.confidence or 0.9, args.tolerance or 0.0)
    if not args.no_verify and 2 * args.k > grid.size:
        raise InputError(
            f"k = {args.k} is more than half of the {grid.size} heads, so that no random sets "
            "are left to compare with: lower k, or give --no-verify"
        )
    store, progress = _store(args), not args.quiet
    model = _load(args, tokenizer)
    options = dict(ablation=args.ablation, store=store, progress=progress)
    print(f"{model}\n{task.name}: {n_items} locate items, ablation {args.ablation}")
    if written:
        from csloc_utils.written import WritingEvaluator, own_answers

        asked, judge = (
            WritingEvaluator(model, written, split, n, store=store, progress=progress)
            for split, n in (("locate", n_items), ("verify", n_verify))
        )
        own = own_answers(asked, judge)
        evaluator, gate = Evaluator(model, own.task, "locate", **options), own.gate
        solved = ", ".join(f"{share:.0%} of {half}" for half, share in own.accuracy.items())
        print(f"the intact model solves {solved}; heads are located on what it wrote there")
    else:
        evaluator = Evaluator(model, task, "locate", n_items, **options)
        gate = check_capability(evaluator)
        judge = Evaluator(model, task, "verify", n_verify, **options)
    if not gate.passed and args.json:
        write_json(args.json, locate_report(args, evaluator, gate))
    gate.require()
    others = [
        Evaluator(model, t, "locate", min(n_items, len(t.locate)), **options) for t in contrast
    ]
    result = _search(args, evaluator, seed, others)
    if args.json:  # at once: nothing that follows can lose it
        write_json(args.json, locate_report(args, evaluator, gate, result))
    print_search(result, evaluator)
    if not args.no_verify:
        verification = verify(
            judge,
            result.found,
            {n: Evaluator(model, t, "verify", **options) for n, t in controls.items()},
            n_random=args.random,
            n_random_control=min(10, args.random),
            seed=seed,
        )
        if args.json:
            write_json(args.json, locate_report(args, evaluator, gate, result, verification))
        print_verification(verification)
    if args.json:
        print(f"\nwritten to {args.json}")


def _check_locate(args: argparse.Namespace, task: Any, controls: dict, contrast: list) -> None:
    """Check what can be checked without the model, and fill in what was left open."""
    from csloc_utils.designs import check_count

    check_count("k", args.k)
    if args.random is None:
        args.random = WRITTEN_RANDOM if _is_written(args) else RANDOM
    check_count("random", args.random, low=0)
    if args.method != "paper" and (args.size is not None or args.design is not None):
        raise InputError(
            f"--size and --design shape random masks, which {args.method} does not use"
        )
    if args.method != "screened" and args.contrast is not None:
        raise InputError(f"--contrast is for the screened search, not for {args.method}")
    if args.method != "race" and (args.confidence, args.tolerance) != (None, None):
        raise InputError(f"--confidence and --tolerance are for a race, not for {args.method}")
    if any(c.fingerprint(c.locate) == task.fingerprint(task.locate) for c in contrast):
        raise InputError("a contrast task is the task itself: name another")
    for name, control in controls.items():
        if control.fingerprint(control.verify) == task.fingerprint(task.verify):
            raise InputError(f"control {name!r} is the task itself: name another, or none")
    args.design = args.design or "stratified"
    if args.method == "paper" and args.budget is None:
        args.budget = PAPER_BUDGET
    known = _scores(task)
    if args.score not in known:
        raise InputError(f"unknown score {args.score!r}: choose from {', '.join(known)}")


def _is_written(args: argparse.Namespace) -> bool:
    """Whether answers are to be written: by the benchmark's custom, unless it was said."""
    return args.task in BY_CUSTOM if args.written is None else args.written


def _written(args: argparse.Namespace, task: Any) -> Any:
    if not _is_written(args):
        return None
    from csloc_utils.written import load_written

    if args.ablation != "zero":
        raise InputError(f"written answers know zero ablation only, not {args.ablation!r}")
    return load_written(
        args.task,
        seed=task.seed,
        max_new_tokens=args.max_new_tokens,
        allow_code_execution=args.allow_code_execution,
    )


def _search(args: argparse.Namespace, evaluator: Any, seed: int, others: list) -> Any:
    """Run the search that was asked for."""
    from csloc_utils import search
    from csloc_utils.racing import raced
    from csloc_utils.screening import screened

    if args.method == "screened":
        return screened(evaluator, args.k, args.budget, args.score, others)
    if args.method == "sweep":
        return search.sweep(evaluator, args.score, args.k, args.budget)
    if args.method == "race":
        chosen = {"confidence": args.confidence, "tolerance": args.tolerance}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        return raced(evaluator, args.k, budget=args.budget, score=args.score, seed=seed, **chosen)
    if args.method == "greedy":
        return search.greedy(evaluator, args.k, args.score, args.budget)
    return search.paper(evaluator, args.k, args.budget, args.size, args.design, seed, args.score)


def plan(args: argparse.Namespace) -> None:
    """Say what searches will cost."""
    from csloc_utils.models import load_config, promised_grid
    from csloc_utils.planning import plan, time_of_a_mask
    from csloc_utils.tasks import load_task

    task = load_task(args.task)
    n_items = _locate_items(args, task)
    grid = promised_grid(load_config(args.model))
    plan(grid.size, args.k, n_items, args.seconds, args.confidence)  # bad numbers, before the model
    seconds = args.seconds
    if seconds is None:
        from csloc_utils.measure import Evaluator
        from csloc_utils.models import load_model

        if not args.debug:
            calm()
        model, options = load_model(args.model), dict(store=":memory:", progress=False)
        seconds = time_of_a_mask(Evaluator(model, task, "locate", n_items, **options))
    made = plan(grid.size, args.k, n_items, seconds, args.confidence)
    items = f"{n_items} items of {task.name}, {seconds:.2f} s a mask"
    print(f"{grid.size} heads, k = {args.k}, {items}")
    print_plan(made)


def ablate(args: argparse.Namespace) -> None:
    """Switch heads off and score tasks."""
    from csloc_utils.tasks import load_task

    _check_seed(args)
    tasks = [load_task(name, args.seed) for name in args.task]
    for task in tasks:
        task.items(args.split, args.items)
    grid, tokenizer = _prepare(args, {task: args.split for task in tasks}, {})
    heads = grid.parse(args.heads)
    import numpy as np

    from csloc_utils.intervals import Interval, bootstrap
    from csloc_utils.measure import Evaluator
    from csloc_utils.results import ablate_report, write_json

    store = _store(args)
    model = _load(args, tokenizer)
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


def _check_seed(args: argparse.Namespace) -> None:
    from csloc_utils.designs import check_count

    if args.seed is not None:
        check_count("seed", args.seed, low=0)


def _prepare(args: argparse.Namespace, tasks: dict, controls: dict) -> tuple[Any, Any]:
    """Check model name, dtype, files and the tasks' tokens; return head grid and tokenizer."""
    if not args.debug:
        calm()
    from csloc_utils.ablation import KINDS
    from csloc_utils.devices import DTYPES, find_device
    from csloc_utils.models import load_config, load_tokenizer, promised_grid
    from csloc_utils.results import check_writable
    from csloc_utils.scoring import encode

    for name, value, known in (
        ("dtype", args.dtype, ("auto", *DTYPES)),
        ("ablation", args.ablation, KINDS),
    ):
        if value not in known:
            raise InputError(f"unknown {name} {value!r}: choose from {', '.join(known)}")
    if args.json:
        check_writable(args.json)
    find_device(args.device)
    config = load_config(args.model)
    tokenizer = load_tokenizer(args.model)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    for task, split in [*tasks.items(), *((t, "verify") for t in controls.values())]:
        encode(task, task.items(split), tokenizer, longest)
    return promised_grid(config), tokenizer


def _load(args: argparse.Namespace, tokenizer: Any) -> Any:
    from csloc_utils.models import load_model

    return load_model(
        args.model,
        dtype=args.dtype,
        device=args.device,
        device_map=args.device_map,
        tokenizer=tokenizer,
    )


def _store(args: argparse.Namespace) -> Any:
    from csloc_utils.store import Store

    return Store(args.store)


def _scores(task: Any) -> tuple[str, ...]:
    from csloc_utils.scoring import SCORES

    return SCORES[task.scoring]


def _locate_items(args: argparse.Namespace, task: Any) -> int:
    if args.items is None and getattr(args, "method", None) == "race":
        return len(task.locate)  # it stops by itself
    if args.items is None:
        return min(LOCATE_ITEMS, len(task.locate))
    return len(task.items("locate", args.items))


def _verify_items(args: argparse.Namespace, task: Any) -> int:
    if args.verify_items is not None:
        return len(task.items("verify", args.verify_items))
    return min(WRITTEN_ITEMS if _is_written(args) else MOST_VERIFY, len(task.verify))


def _split_names(text: str) -> list[str]:
    return [] if text == "none" else [name.strip() for name in text.split(",")]
