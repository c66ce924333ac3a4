"""``csloc atlas``: heads of several tasks, each set measured on every task.

`survey` is the work: gate, search and atlas, in that order, for chapters and benchmarks as well.
Everything that it measures goes to the store at once, so that one that was interrupted goes on
where it stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csloc_utils import __version__
from csloc_utils.commands import (
    LOCATE_ITEMS,
    check_seed,
    known_scores,
    load,
    open_store,
    prepare,
    split_names,
)
from csloc_utils.console import print_table
from csloc_utils.errors import GateError, InputError

if TYPE_CHECKING:
    from csloc_utils.atlas import Atlas
    from csloc_utils.gate import Gate
    from csloc_utils.measure import Evaluator
    from csloc_utils.models import HeadModel
    from csloc_utils.search import SearchResult
    from csloc_utils.tasks import Task

VERIFY_ITEMS = 50  # every head set is measured on as many of each task
_GATE_ITEMS = 200  # of a large benchmark, a sample is enough to see whether it can be done


@dataclass
class Survey:
    """What `survey` found.

    Attributes
    ----------
    gates : dict of str to Gate
        Of every task that was asked for.
    found : dict of str to SearchResult
        Of those that passed.
    judges : dict of str to Evaluator
        Their verify items.
    atlas : Atlas or None
        None until two tasks have heads.
    """

    gates: dict[str, Gate] = field(default_factory=dict)
    found: dict[str, SearchResult] = field(default_factory=dict)
    judges: dict[str, Evaluator] = field(default_factory=dict)
    atlas: Atlas | None = None

    @property
    def left_out(self) -> list[str]:
        """Tasks that did not pass the gate."""
        return [name for name, gate in self.gates.items() if not gate.passed]


def survey(
    model: HeadModel,
    tasks: Sequence[Task],
    k: int = 5,
    n_random: int = 10,
    n_items: int | None = LOCATE_ITEMS,
    n_verify: int | None = VERIFY_ITEMS,
    seed: int = 0,
    score: str = "logprob",
    report: Callable[[Survey, str], Any] = lambda survey, task: None,
    **options: Any,
) -> Survey:
    """Locate heads for every task that the model can do, and measure every set on every task.

    Parameters
    ----------
    model : HeadModel
    tasks : sequence of Task
        Two or more; their names are those of rows and columns.
    k, score
        Of each search (`csloc_utils.screening.screened`).
    n_random, seed
        Of the random sets (`csloc_utils.atlas.atlas`).
    n_items, n_verify : int or None
        Items that locate and items that verify, or all there are if that is fewer. None: all.
    report : callable, optional
        Called with the survey so far and a task's name when the task has passed the gate and its
        heads are found, or when it has not passed.
    **options
        Of every `csloc_utils.measure.Evaluator`: ``store``, ``ablation``, ``progress``.

    Raises
    ------
    GateError
        When fewer than two tasks pass the gate.
    """
    from csloc_utils.atlas import atlas
    from csloc_utils.gate import check_capability
    from csloc_utils.measure import Evaluator
    from csloc_utils.transfer import locate_all

    def evaluator(task: Task, split: str, n: int | None) -> Evaluator:
        available = len(task.items(split))
        some = available if n is None else min(n, available)
        return Evaluator(model, task, split, some, **options)

    made = Survey()
    for task in tasks:
        name = task.name
        made.gates[name] = check_capability(evaluator(task, "locate", _GATE_ITEMS))
        if made.gates[name].passed:
            locator = {name: evaluator(task, "locate", n_items)}
            made.found |= locate_all(locator, k, score=score)
            made.judges[name] = evaluator(task, "verify", n_verify)
        report(made, name)
    if len(made.found) < 2:
        passed = ", ".join(made.found) or "none"
        raise GateError(
            f"the model shows too few of these capabilities to compare them: {passed} of "
            f"{', '.join(made.gates)} passed; an atlas takes two or more"
        )
    sets = {name: result.found for name, result in made.found.items()}
    made.atlas = atlas(made.judges, sets, n_random, seed)
    return made


def survey_report(made: Survey, model: HeadModel, command: str) -> dict[str, Any]:
    """Return a survey as far as it has come, ready for JSON; ``atlas`` only when it is measured.

    `csloc_utils.atlas.Atlas.from_dict` reads the atlas again, whose provenance names items,
    ablation and versions.
    """
    report = {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": {"name": model.name, **model.fingerprint},
        "csloc": __version__,
        "n_heads": model.grid.size,
        "gates": {name: gate.to_dict() for name, gate in made.gates.items()},
        "found": {name: result.table for name, result in made.found.items()},
    }
    return report | ({"atlas": made.atlas.to_dict()} if made.atlas else {})


def map_tasks(args: argparse.Namespace) -> None:
    """Locate heads for every task and measure every set on every task."""
    tasks = _check(args)
    grid, tokenizer = prepare(args, dict.fromkeys(tasks, "all"), {})
    if 2 * args.k > grid.size:
        raise InputError(
            f"k = {args.k} is more than half of the {grid.size} heads, so that no random sets are "
            "left to compare with: lower k"
        )
    from csloc_utils.results import write_json

    store = open_store(args)
    model = load(args, tokenizer)
    print(f"{model}\n{len(tasks)} tasks, ablation {args.ablation}\n")

    def report(made: Survey, name: str) -> None:
        gate, found = made.gates[name], made.found.get(name)
        heads = (
            ", ".join(map(str, found.found)) if found else "left out, the intact model cannot do it"
        )
        print(f"{name} ({gate.accuracy:.0%} right): {heads}", flush=True)
        if args.json:  # at once: nothing that follows can lose it
            write_json(args.json, survey_report(made, model, args.command_line))

    made = survey(
        model,
        tasks,
        args.k,
        args.random,
        args.items,
        args.verify_items,
        args.seed or 0,
        args.score,
        report,
        ablation=args.ablation,
        store=store,
        progress=not args.quiet,
    )
    _print_atlas(made.atlas)
    if args.json:
        write_json(args.json, survey_report(made, model, args.command_line))
        print(f"\nwritten to {args.json}")
    if args.out:
        _draw(made.atlas, args.out)
        print(f"\ndrawn in {args.out}")


def _check(args: argparse.Namespace) -> list:
    """Check all options that need no model; return the tasks."""
    from csloc_utils.designs import check_count
    from csloc_utils.tasks import load_task

    check_seed(args)
    check_count("k", args.k)
    check_count("random", args.random, low=0)
    check_count("number of items", args.items)
    check_count("number of verify items", args.verify_items)
    names = split_names(args.tasks)
    if any(name.startswith("lm-eval:") for name in names):
        raise InputError("tasks of lm-evaluation-harness are for csloc locate, not for an atlas")
    tasks = [load_task(name, args.seed) for name in names]
    if len(tasks) < 2:
        raise InputError("an atlas compares tasks: name two or more, like multiplication,capitals")
    for i, task in enumerate(tasks):
        for other in tasks[:i]:
            same = other.fingerprint(other.verify) == task.fingerprint(task.verify)
            if same or other.name == task.name:
                raise InputError(f"two of the tasks are {task.name!r}: name each task once")
    common = [s for s in known_scores(tasks[0]) if all(s in known_scores(t) for t in tasks)]
    if args.score not in common:
        raise InputError(
            f"unknown score {args.score!r}: these tasks have {', '.join(common)} in common"
        )
    if args.out:
        _check_figure(args.out)
    return tasks


def _check_figure(path: Path) -> None:
    """Check that a figure can be written at `path`."""
    from matplotlib.backend_bases import FigureCanvasBase

    from csloc_utils.results import check_writable

    kinds = FigureCanvasBase.get_supported_filetypes()
    kind = path.suffix.removeprefix(".").lower()
    if kind not in kinds:
        raise InputError(
            f"cannot draw {path}: its name does not end in a kind of picture; "
            "end it in .png, .svg or .pdf"
        )
    check_writable(path)


def _print_atlas(made: Atlas) -> None:
    """Print the matrix in points with intervals, and what is a task's own."""
    from csloc_utils.intervals import Interval

    level, n_random = made.settings["confidence"], made.settings["n_random"]
    points = (v["accuracy"] for v in (made.drops, made.low, made.high))
    drops, low, high = ((100 * v).round() + 0.0 for v in points)  # no negative zeros
    within = made.within("accuracy")

    def cell(*at: int) -> str:
        text = f"{drops[at]:.0f} [{low[at]:.0f}, {high[at]:.0f}]"
        return f"({text})" if within[at] else text

    print(f"\ndrop in accuracy on held-out items, in points [{level:.0%}], with the heads of … off")
    columns = range(len(made.tasks))
    rows = [(name, *(cell(a, b) for b in columns)) for a, name in enumerate(made.sets)]
    print_table(("heads of", *made.tasks), rows)
    if n_random:
        print(f"(…): within the band of {n_random} random sets of heads from the same layers")
    print("\nspecific damage: a task's own drop less the mean drop of the others")
    units = {"accuracy": ("points", 100), "logprob": ("nats", 1)}
    rows = []
    for row in made.specificity().itertuples():
        unit, scale = units.get(row.score, (row.score, 1))
        numbers = [scale * v for v in (row.own, row.others, row.specific, row.low, row.high)]
        rows.append((row.task, unit, *numbers[:2], Interval(*numbers[2:])))
    print_table(("task", "in", "own", "others", f"specific [{level:.0%}]"), rows)


def _draw(made: Atlas, path: Path) -> None:
    """Draw the atlas in points of accuracy."""
    import matplotlib.pyplot as plt

    from csloc_utils import comparison_plots, plots

    with plt.rc_context():
        plots.set_style()
        figure = comparison_plots.atlas_map(made, "accuracy").figure
        figure.savefig(path)
        plt.close(figure)
