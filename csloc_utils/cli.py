"""The command line: ``csloc models``, ``csloc tasks``, ``csloc locate``, ``csloc ablate``.

Everything that can be known to be wrong is found before the weights are loaded. Exit status: 0
done; 1 the model does not show the capability; 2 bad input, with one line on standard error; 3 a
failure that is not the user's; 130 interrupted, with the line that resumes.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from csloc_utils.console import (
    calm,
    print_plan,
    print_search,
    print_table,
    print_verification,
)
from csloc_utils.errors import GateError, InputError

LOCATE_ITEMS = 24  # items a mask is scored on unless --items says otherwise
PAPER_BUDGET = 150  # within the paper's 100 to 400 evaluations


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}: see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no "×" shows "?"
    try:
        args = _parser().parse_args(argv)
        args.command_line = shlex.join(["csloc", *argv])
        return args.run(args) or 0
    except GateError as error:
        print(f"csloc: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except InputError as error:
        if debug:
            raise
        print(f"csloc: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        resume = shlex.join(["csloc", *argv])
        print(f"\ncsloc: interrupted; what is measured is kept. Resume: {resume}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output (head, say) has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if debug:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        print(f"csloc: failed: {reason}: --debug shows where", file=sys.stderr)
        return 3


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="csloc",
        description="Which few attention heads of a language model carry a capability?",
    )
    from csloc_utils import __version__

    parser.add_argument("--version", action="version", version=f"csloc {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show tracebacks and warnings")

    models = commands.add_parser("models", parents=[debug], help="list the models with a name")
    models.set_defaults(run=_models)
    tasks = commands.add_parser("tasks", parents=[debug], help="list the built-in tasks")
    tasks.set_defaults(run=_tasks)

    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("--model", default="smollm2-135m-q4", help="name, hub id, folder or .gguf file")
    add("--seed", type=int, help="seed of splits, samples and masks")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--device", default="auto", help="a torch device (default: a GPU if there is one)")
    add("--ablation", default="zero", help="zero, mean or resample")
    add("--store", metavar="FILE", help="where measurements are kept (default: the user's cache)")
    add("--json", metavar="FILE", type=Path, help="write the result to FILE as well")
    add("--quiet", action="store_true", help="no progress bar")

    locate = commands.add_parser(
        "locate", parents=[common, debug], help="find the heads of a capability and check them"
    )
    add = locate.add_argument
    add("--task", required=True, help="built-in task, or a .jsonl file")
    add("--items", type=int, metavar="N", help=f"locate on N drawn items (default {LOCATE_ITEMS})")
    add(
        "--method",
        default="screened",
        help="screened (default: gradients name candidates, a few are measured), paper (random "
        "masks and Lasso), sweep or greedy",
    )
    add("--k", type=int, default=5, help="heads to find (default 5)")
    add("--budget", type=int, help=f"evaluations (screened: 8 a head; paper: {PAPER_BUDGET})")
    add("--contrast", metavar="A,B", help="tasks the heads should not serve (screened only)")
    add("--size", type=int, help="heads in a random mask (paper only; default 2 %% of all)")
    add("--design", help="stratified (default) or bernoulli (paper only)")
    add("--score", default="logprob", help="score whose loss is sought: logprob or accuracy")
    add("--controls", metavar="A,B", help="control tasks, or none (default: by task)")
    add("--random", type=int, default=100, metavar="N", help="random head sets (default 100)")
    add("--no-verify", action="store_true", help="locate only")
    locate.set_defaults(run=_locate)

    plans = commands.add_parser(
        "plan", parents=[debug], help="say what a search will cost before anything runs"
    )
    add = plans.add_argument
    add("--model", default="smollm2-135m-q4", help="name, hub id, folder or .gguf file")
    add("--task", required=True, help="built-in task, or a .jsonl file")
    add("--items", type=int, metavar="N", help=f"locate items (default {LOCATE_ITEMS})")
    add("--k", type=int, default=5, help="heads to find (default 5)")
    add("--confidence", type=float, default=0.9, help="for telling two heads apart (default 0.9)")
    add("--seconds", type=float, help="time of one mask; measured on the model if not given")
    plans.set_defaults(run=_plan)

    ablate = commands.add_parser(
        "ablate", parents=[common, debug], help="switch heads off and score tasks"
    )
    add = ablate.add_argument
    add("--heads", required=True, metavar="L13H4,L14H2", help="heads to switch off together")
    add("--task", required=True, action="append", help="built-in task or file; repeatable")
    add("--items", type=int, metavar="N", help="score on N drawn items (default all)")
    add("--split", default="verify", help="locate, verify or all (default verify)")
    ablate.set_defaults(run=_ablate)
    return parser


def _models(args: argparse.Namespace) -> None:
    from csloc_utils.sources import KNOWN_MODELS

    rows = [
        (name, f"{m.n_layers} × {m.n_heads}", m.n_layers * m.n_heads, m.location, m.note)
        for name, m in KNOWN_MODELS.items()
    ]
    print_table(("model", "layers × heads", "heads", "from", ""), rows)
    print("\nAny hub id, checkpoint folder or .gguf file works as well.")


def _tasks(args: argparse.Namespace) -> None:
    from csloc_utils.tasks import list_tasks

    rows = [(t.name, t.scoring, len(t.locate), len(t.verify), t.capability) for t in list_tasks()]
    print_table(("task", "scoring", "locate", "verify", "capability"), rows)
    print("\nA .jsonl file of your own works as well: see the book's page on running.")


def _locate(args: argparse.Namespace) -> None:
    from csloc_utils.designs import check_count
    from csloc_utils.tasks import controls_for, load_task

    _check_seed(args)
    task = load_task(args.task, args.seed)
    names = controls_for(task) if args.controls is None else _split_names(args.controls)
    controls = {} if args.no_verify else {n: load_task(n, args.seed) for n in names}
    check_count("k", args.k)
    check_count("random", args.random, low=0)
    if args.method != "paper" and (args.size is not None or args.design is not None):
        raise InputError(
            f"--size and --design shape random masks, which {args.method} does not use"
        )
    if args.method != "screened" and args.contrast is not None:
        raise InputError(f"--contrast is for the screened search, not for {args.method}")
    contrast = [load_task(n, args.seed) for n in _split_names(args.contrast or "none")]
    if any(c.fingerprint(c.locate) == task.fingerprint(task.locate) for c in contrast):
        raise InputError("a contrast task is the task itself: name another")
    args.design = args.design or "stratified"
    for name, control in controls.items():
        if control.fingerprint(control.verify) == task.fingerprint(task.verify):
            raise InputError(f"control {name!r} is the task itself: name another, or none")
    n_items = _locate_items(args, task)
    seed = task.seed if args.seed is None else args.seed
    if args.method == "paper" and args.budget is None:
        args.budget = PAPER_BUDGET
    used = {task: "locate" if args.no_verify else "all"} | dict.fromkeys(contrast, "locate")
    grid, tokenizer = _prepare(args, used, controls)
    from csloc_utils import search
    from csloc_utils.gate import check_capability
    from csloc_utils.measure import Evaluator
    from csloc_utils.results import locate_report, write_json
    from csloc_utils.screening import screened
    from csloc_utils.verify import verify

    search.check(
        args.method,
        grid.size,
        args.k,
        args.budget,
        args.size,
        args.design,
        seed,
        1 + len(contrast),
    )
    if not args.no_verify and 2 * args.k > grid.size:
        raise InputError(
            f"k = {args.k} is more than half of the {grid.size} heads, so that no random sets "
            "are left to compare with: lower k, or give --no-verify"
        )
    if args.score not in _scores(task):
        raise InputError(f"unknown score {args.score!r}: choose from {', '.join(_scores(task))}")
    store, progress = _store(args), not args.quiet
    model = _load(args, tokenizer)
    options = dict(ablation=args.ablation, store=store, progress=progress)
    evaluator = Evaluator(model, task, "locate", n_items, **options)
    print(f"{model}\n{task.name}: {n_items} locate items, ablation {args.ablation}")
    gate = check_capability(evaluator)
    if not gate.passed and args.json:
        write_json(args.json, locate_report(args, evaluator, gate))
    gate.require()
    if args.method == "screened":
        others = [
            Evaluator(model, t, "locate", min(n_items, len(t.locate)), **options) for t in contrast
        ]
        result = screened(evaluator, args.k, args.budget, args.score, others)
    elif args.method == "sweep":
        result = search.sweep(evaluator, args.score, args.k, args.budget)
    elif args.method == "greedy":
        result = search.greedy(evaluator, args.k, args.score, args.budget)
    else:
        result = search.paper(
            evaluator, args.k, args.budget, args.size, args.design, seed, args.score
        )
    if args.json:  # at once: nothing that follows can lose it
        write_json(args.json, locate_report(args, evaluator, gate, result))
    print_search(result, evaluator)
    if not args.no_verify:
        others = {n: Evaluator(model, t, "verify", **options) for n, t in controls.items()}
        verification = verify(
            Evaluator(model, task, "verify", **options),
            result.found,
            others,
            n_random=args.random,
            n_random_control=min(10, args.random),
            seed=seed,
        )
        if args.json:
            write_json(args.json, locate_report(args, evaluator, gate, result, verification))
        print_verification(verification)
    if args.json:
        print(f"\nwritten to {args.json}")


def _plan(args: argparse.Namespace) -> None:
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


def _ablate(args: argparse.Namespace) -> None:
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
    from csloc_utils.models import (
        DTYPES,
        find_device,
        load_config,
        load_tokenizer,
        promised_grid,
    )
    from csloc_utils.results import check_writable
    from csloc_utils.scoring import encode

    for name, value, known in (("dtype", args.dtype, DTYPES), ("ablation", args.ablation, KINDS)):
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

    return load_model(args.model, dtype=args.dtype, device=args.device, tokenizer=tokenizer)


def _store(args: argparse.Namespace) -> Any:
    from csloc_utils.store import Store

    return Store(args.store)


def _scores(task: Any) -> tuple[str, ...]:
    from csloc_utils.scoring import SCORES

    return SCORES[task.scoring]


def _locate_items(args: argparse.Namespace, task: Any) -> int:
    if args.items is None:
        return min(LOCATE_ITEMS, len(task.locate))
    return len(task.items("locate", args.items))


def _split_names(text: str) -> list[str]:
    return [] if text == "none" else [name.strip() for name in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
