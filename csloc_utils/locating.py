"""``csloc locate``: gate, search, verification, with the result on disk after each."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from csloc_utils.commands import (
    PAPER_BUDGET,
    check_seed,
    known_scores,
    load,
    locate_items,
    open_store,
    prepare,
    split_names,
)
from csloc_utils.console import print_search, print_verification
from csloc_utils.errors import InputError

MOST_VERIFY = 200  # verify items that are drawn from a benchmark unless --verify-items says more
RANDOM, WRITTEN_RANDOM = 100, 10  # random head sets; writing takes long
WRITTEN_ITEMS = 40  # verify items of written answers
BY_CUSTOM = ("gsm8k", "mbpp", "humaneval", "swearing")  # judged by what a model writes


def locate(args: argparse.Namespace) -> None:
    """Find the heads of a capability and check them on items that did not choose them."""
    from csloc_utils.tasks import controls_for, load_task

    check_seed(args)
    if args.task.startswith("lm-eval:"):
        return _locate_harness(args)
    task = load_task(args.task, args.seed)
    names = controls_for(task) if args.controls is None else split_names(args.controls)
    controls = {} if args.no_verify else {n: load_task(n, args.seed) for n in names}
    contrast = [load_task(n, args.seed) for n in split_names(args.contrast or "none")]
    _check_locate(args, task, controls, contrast)
    n_items = locate_items(args, task)
    n_verify = _verify_items(args, task)
    seed = task.seed if args.seed is None else args.seed
    written = _written(args, task)
    used = dict.fromkeys(contrast, "locate")
    if not written:
        used[task] = "locate" if args.no_verify else "all"
    grid, tokenizer = prepare(args, used, controls)
    from csloc_utils import search
    from csloc_utils.gate import check_capability
    from csloc_utils.measure import Evaluator
    from csloc_utils.racing import check_race
    from csloc_utils.results import locate_report, write_json

    n_tasks = 1 + len(contrast)
    shape = (args.budget, args.size, args.design, seed, n_tasks)
    search.check(args.method, grid.size, args.k, *shape)
    check_race(args.confidence or 0.9, args.tolerance or 0.0)
    _check_random(args, grid.size)
    store, progress = open_store(args), not args.quiet
    model = load(args, tokenizer)
    options = dict(ablation=args.ablation, store=store, progress=progress)
    print(f"{model}\n{task.name}: {n_items} locate items, ablation {args.ablation}")
    if written:
        from csloc_utils.written import WritingEvaluator, own_answers

        asked, judge = (
            WritingEvaluator(
                model, written, split, n, store=store, chat=args.chat, progress=progress
            )
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
        _say_where(args)
    gate.require()
    others = [
        Evaluator(model, t, "locate", min(n_items, len(t.locate)), **options) for t in contrast
    ]
    spared = _spared(model, controls, options)
    _find_and_verify(args, evaluator, judge, gate, others, spared, seed)


def _find_and_verify(
    args: argparse.Namespace,
    evaluator: Any,
    judge: Any,
    gate: Any,
    others: list,
    controls: dict,
    seed: int,
) -> None:
    """Search on one evaluator and verify on the other, with the result on disk after each."""
    from csloc_utils.results import locate_report, write_json
    from csloc_utils.verify import verify

    result = _search(args, evaluator, seed, others)
    if args.json:  # at once: nothing that follows can lose it
        write_json(args.json, locate_report(args, evaluator, gate, result))
    print_search(result, evaluator)
    if not args.no_verify:
        verification = verify(
            judge,
            result.found,
            controls,
            n_random=args.random,
            n_random_control=min(10, args.random),
            seed=seed,
        )
        if args.json:
            write_json(args.json, locate_report(args, evaluator, gate, result, verification))
        print_verification(verification)
    _say_where(args)


def _say_where(args: argparse.Namespace) -> None:
    """Say where the result is, and how it becomes a page."""
    if args.json:
        page = shlex.join(["csloc", "report", str(args.json)])
        print(f"\nwritten to {args.json}; a page of it: {page}")
    else:
        print("\n--json FILE keeps the result, and `csloc report FILE` makes a page of it")


def _locate_harness(args: argparse.Namespace) -> None:
    """Locate on a task of lm-evaluation-harness: one mask a run, scored by its own metrics."""
    if args.method == "screened":
        raise InputError(
            "lm-evaluation-harness gives scores and no gradients: choose --method paper, sweep, "
            "race or greedy"
        )
    if args.contrast or args.written or args.chat:
        raise InputError(
            "--contrast, --written and --chat are not for tasks of lm-evaluation-harness"
        )
    from csloc_utils.designs import check_count
    from csloc_utils.harness import HarnessEvaluator
    from csloc_utils.tasks import load_task

    names = ["text"] if args.controls is None else split_names(args.controls)
    controls = {} if args.no_verify else {n: load_task(n, args.seed) for n in names}
    grid, tokenizer = prepare(args, {}, controls)
    from csloc_utils import search
    from csloc_utils.gate import above_chance
    from csloc_utils.results import locate_report, write_json

    _check_method(args)
    args.random = check_count("random", 10 if args.random is None else args.random, low=0)
    seed = args.seed or 0
    search.check(args.method, grid.size, args.k, args.budget, args.size, args.design, seed)
    _check_random(args, grid.size)
    store, progress = open_store(args), not args.quiet
    model = load(args, tokenizer)
    evaluator, judge = (
        HarnessEvaluator(
            model,
            args.task,
            n_items=n,
            seed=seed,
            split=split,
            include_path=args.include_path,
            ablation=args.ablation,
            store=store,
            progress=progress,
        )
        for split, n in (("locate", args.items), ("verify", args.verify_items))
    )
    if args.score not in evaluator.scores:
        args.score = "accuracy"
    print(f"{model}\n{evaluator.task.name}: {len(evaluator.items)} locate items")
    gate = above_chance(evaluator, evaluator.task.chance or 0.0)
    if not gate.passed and args.json:
        write_json(args.json, locate_report(args, evaluator, gate))
        _say_where(args)
    gate.require()
    options = dict(store=store, progress=progress)
    spared = _spared(model, controls, options)
    _find_and_verify(args, evaluator, judge, gate, [], spared, seed)


def _spared(model: Any, controls: dict, options: dict) -> dict:
    """Evaluators of the control tasks; of a large benchmark, a sample."""
    from csloc_utils.measure import Evaluator

    return {
        name: Evaluator(model, task, "verify", min(MOST_VERIFY, len(task.verify)), **options)
        for name, task in controls.items()
    }


def _check_locate(args: argparse.Namespace, task: Any, controls: dict, contrast: list) -> None:
    """Check what can be checked without the model, and fill in what was left open."""
    from csloc_utils.designs import check_count

    if args.random is None:
        args.random = WRITTEN_RANDOM if _is_written(args) else RANDOM
    check_count("random", args.random, low=0)
    _check_method(args)
    if any(c.fingerprint(c.locate) == task.fingerprint(task.locate) for c in contrast):
        raise InputError("a contrast task is the task itself: name another")
    for name, control in controls.items():
        if control.fingerprint(control.verify) == task.fingerprint(task.verify):
            raise InputError(f"control {name!r} is the task itself: name another, or none")
    known = known_scores(task)
    if args.score not in known:
        raise InputError(f"unknown score {args.score!r}: choose from {', '.join(known)}")


def _check_method(args: argparse.Namespace) -> None:
    """Check that options and method go together, and fill in the paper's."""
    from csloc_utils.designs import check_count

    check_count("k", args.k)
    if args.method != "paper" and (args.size is not None or args.design is not None):
        raise InputError(
            f"--size and --design shape random masks, which {args.method} does not use"
        )
    if args.method != "screened" and args.contrast is not None:
        raise InputError(f"--contrast is for the screened search, not for {args.method}")
    if args.method != "race" and (args.confidence, args.tolerance) != (None, None):
        raise InputError(f"--confidence and --tolerance are for a race, not for {args.method}")
    args.design = args.design or "stratified"
    if args.method == "paper" and args.budget is None:
        args.budget = PAPER_BUDGET


def _check_random(args: argparse.Namespace, n_heads: int) -> None:
    """Check that heads are left for random sets."""
    if not args.no_verify and 2 * args.k > n_heads:
        raise InputError(
            f"k = {args.k} is more than half of the {n_heads} heads, so that no random sets "
            "are left to compare with: lower k, or give --no-verify"
        )


def _is_written(args: argparse.Namespace) -> bool:
    """Whether answers are to be written: by the benchmark's custom, unless it was said."""
    return args.task in BY_CUSTOM if args.written is None else args.written


def _written(args: argparse.Namespace, task: Any) -> Any:
    if not _is_written(args):
        if args.chat:
            raise InputError("--chat is for answers that the model writes: give --written as well")
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


def _verify_items(args: argparse.Namespace, task: Any) -> int:
    if args.verify_items is not None:
        return len(task.items("verify", args.verify_items))
    return min(WRITTEN_ITEMS if _is_written(args) else MOST_VERIFY, len(task.verify))
