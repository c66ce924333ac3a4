"""The command line.

``csloc models``, ``tasks``, ``plan``, ``locate``, ``atlas``, ``ablate``, ``edit`` and ``report``.

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
from typing import NoReturn

from csloc_utils import commands, locating, mapping, report
from csloc_utils.commands import LOCATE_ITEMS, PAPER_BUDGET
from csloc_utils.errors import GateError, InputError


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
        if getattr(args, "data_dir", None):
            os.environ["CSLOC_DATA"] = args.data_dir
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
    kinds = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show tracebacks and warnings")

    models = kinds.add_parser("models", parents=[debug], help="list the models with a name")
    models.set_defaults(run=commands.models)
    tasks = kinds.add_parser("tasks", parents=[debug], help="list the built-in tasks")
    tasks.set_defaults(run=commands.tasks)

    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("--model", default="smollm2-135m-q4", help="name, hub id, folder or .gguf file")
    add("--data-dir", metavar="DIR", help="folder of JSON Lines that benchmarks are read from")
    add("--seed", type=int, help="seed of splits, samples and masks")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--device", default="auto", help="a torch device (default: a GPU if there is one)")
    add("--device-map", help="auto: spread the layers over all GPUs and the memory")
    add("--ablation", default="zero", help="zero, mean or resample")
    add("--store", metavar="FILE", help="where measurements are kept (default: the user's cache)")
    add("--json", metavar="FILE", type=Path, help="write the result to FILE as well")
    add("--quiet", action="store_true", help="no progress bar")

    locate = kinds.add_parser(
        "locate", parents=[common, debug], help="find the heads of a capability and check them"
    )
    add = locate.add_argument
    add("--task", required=True, help="built-in task, benchmark, .jsonl file, or lm-eval:NAME")
    add("--items", type=int, metavar="N", help=f"locate on N drawn items (default {LOCATE_ITEMS})")
    add(
        "--method",
        default="screened",
        help="screened (default: gradients name candidates, a few are measured), paper (random "
        "masks and Lasso), sweep, race (a sweep that stops when it is sure) or greedy",
    )
    add("--k", type=int, default=5, help="heads to find (default 5)")
    add("--budget", type=int, help=f"evaluations (screened: 8 a head; paper: {PAPER_BUDGET})")
    add("--contrast", metavar="A,B", help="tasks the heads should not serve (screened only)")
    add("--size", type=int, help="heads in a random mask (paper only; default 2 %% of all)")
    add("--design", help="stratified (default) or bernoulli (paper only)")
    add("--confidence", type=float, help="that a race names the right heads (default 0.9)")
    add("--tolerance", type=float, help="difference that does not matter to a race (default 0)")
    add("--score", default="logprob", help="score whose loss is sought: logprob or accuracy")
    add("--controls", metavar="A,B", help="control tasks, or none (default: by task)")
    add("--random", type=int, metavar="N", help="random head sets (default 100; written: 10)")
    add(
        "--verify-items", type=int, metavar="N", help="verify on N drawn items (default 200 or all)"
    )
    add(
        "--written",
        action=argparse.BooleanOptionalAction,
        help="judge answers that the model writes (default for gsm8k, mbpp, humaneval, swearing)",
    )
    add("--chat", action="store_true", help="ask through the model's chat template (--written)")
    add("--include-path", metavar="DIR", help="folder with task files for lm-eval:NAME")
    add("--max-new-tokens", type=int, metavar="N", help="longest written answer")
    add(
        "--allow-code-execution",
        action="store_true",
        help="run written programs in a sandbox (mbpp, humaneval)",
    )
    add("--no-verify", action="store_true", help="locate only")
    locate.set_defaults(run=locating.locate)

    plans = kinds.add_parser(
        "plan", parents=[debug], help="say what a search will cost before anything runs"
    )
    add = plans.add_argument
    add("--model", default="smollm2-135m-q4", help="name, hub id, folder or .gguf file")
    add("--task", required=True, help="built-in task, benchmark, .jsonl file, or lm-eval:NAME")
    add("--data-dir", metavar="DIR", help="folder of JSON Lines that benchmarks are read from")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--device", default="auto", help="a torch device (default: a GPU if there is one)")
    add("--items", type=int, metavar="N", help=f"locate items (default {LOCATE_ITEMS})")
    add("--k", type=int, default=5, help="heads to find (default 5)")
    add("--confidence", type=float, default=0.9, help="for telling two heads apart (default 0.9)")
    add("--seconds", type=float, help="time of one mask; measured on the model if not given")
    plans.set_defaults(run=commands.plan)

    atlas = kinds.add_parser(
        "atlas",
        parents=[common, debug],
        help="find the heads of several tasks and measure each set on every task",
    )
    add = atlas.add_argument
    add("--tasks", required=True, metavar="A,B,C", help="built-in tasks, benchmarks or files")
    add("--k", type=int, default=5, help="heads to find for each task (default 5)")
    add("--random", type=int, default=10, metavar="N", help="random head sets a task (default 10)")
    add(
        "--items",
        type=int,
        default=LOCATE_ITEMS,
        metavar="N",
        help=f"locate on N drawn items, or all if fewer (default {LOCATE_ITEMS})",
    )
    add(
        "--verify-items",
        type=int,
        default=mapping.VERIFY_ITEMS,
        metavar="N",
        help=f"measure on N others, or all if fewer (default {mapping.VERIFY_ITEMS})",
    )
    add("--score", default="logprob", help="score whose loss is sought: logprob or accuracy")
    add("--out", metavar="FILE", type=Path, help="draw the atlas as well: .png, .svg or .pdf")
    atlas.set_defaults(run=mapping.map_tasks)

    ablate = kinds.add_parser(
        "ablate", parents=[common, debug], help="switch heads off and score tasks"
    )
    add = ablate.add_argument
    add("--heads", required=True, metavar="L13H4,L14H2", help="heads to switch off together")
    add("--task", required=True, action="append", help="built-in task or file; repeatable")
    add("--items", type=int, metavar="N", help="score on N drawn items (default all)")
    add("--split", default="verify", help="locate, verify or all (default verify)")
    ablate.set_defaults(run=commands.ablate)

    edit = kinds.add_parser(
        "edit", parents=[debug], help="write a checkpoint with heads off, weaker or stronger"
    )
    add = edit.add_argument
    add("--model", default="smollm2-135m-q4", help="name, hub id, folder or .gguf file")
    add("--heads", required=True, metavar="L13H4,L14H2", help="heads to edit")
    add("--out", required=True, metavar="DIR", type=Path, help="new folder of the checkpoint")
    add("--ablation", help="zero (default) or mean (needs a bias in the output projection)")
    add("--scale", type=float, help="multiply the heads instead: 0.5 weakens, 1.5 strengthens")
    add("--task", help="task whose locate items give the heads' means")
    add("--seed", type=int, help="seed of the task's split")
    add("--data-dir", metavar="DIR", help="folder of JSON Lines that benchmarks are read from")
    add("--evidence", metavar="FILE", type=Path, help="report of `locate --json` for the card")
    add("--dtype", default="auto", help="auto (the checkpoint's own), float32, bfloat16 or float16")
    add("--device", default="cpu", help="a torch device (default cpu)")
    add("--max-shard-size", metavar="SIZE", default="5GB", help="largest weight file (default 5GB)")
    add("--dry-run", action="store_true", help="say what would be written, load and write nothing")
    edit.set_defaults(run=commands.edit, json=None, device_map=None)

    page = kinds.add_parser(
        "report", parents=[debug], help="make a page of HTML from a result of locate"
    )
    add = page.add_argument
    add("run_json", metavar="RUN.json", type=Path, help="file that `locate --json` wrote")
    add("--out", metavar="FILE", type=Path, help="the page (default: RUN.html beside RUN.json)")
    add("--force", action="store_true", help="replace a page that is there already")
    page.set_defaults(run=report.report)
    return parser


if __name__ == "__main__":
    sys.exit(main())
