"""What the command line prints, plain tables, and what it keeps quiet."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any


def print_search(result: Any, evaluator: Any) -> None:
    """Print a search's cost and its first heads."""
    shown = result.table[: max(result.k, 10)]
    keys = [k for k in shown[0] if k not in ("coef", "aliases")]
    twins = [f"{row['head']} = {', '.join(row['aliases'])}" for row in shown if row.get("aliases")]
    print(f"\n{result.method}: {result.evaluations['equivalents']} evaluations")
    print_table(("rank", *keys), [(i + 1, *(row[k] for k in keys)) for i, row in enumerate(shown)])
    accuracy = evaluator.baseline["accuracy"].mean()
    if twins:
        print(f"off in the same masks, so not told apart (raise --budget): {'; '.join(twins)}")
    print(f"effect: change of the score when ablated; intact accuracy {accuracy:.2f}")
    if "race" in result.extra:
        print(_settled(result))
    if "estimator" in result.extra and len(result.extra["effects"]) >= 10:
        from csloc_utils.assumptions import diagnose  # scikit-learn takes a while to load

        made = diagnose(result.extra["measurements"].masks, result.extra["effects"])
        print(
            f"design: {made.n_masks} masks, a head off in {made.least} to {made.most}, a pair in "
            f"{made.pair_coverage:.2f} on average; R² on held-out masks {made.held_out_r2:.2f}"
        )
        for warning in made.warnings:
            print(f"caution: {warning}")


def _settled(result: Any) -> str:
    race = result.extra["race"]
    counts = {name: int((race.status == name).sum()) for name in ("in", "open", "out")}
    if race.settled:
        return f"settled: the first {race.k} are the right ones among {len(race.masks)}"
    left = race.k - counts["in"]
    return (
        f"not settled: {counts['in']} are in for certain, {counts['open']} compete for {left} "
        f"places, {counts['out']} are out; more --items or a --tolerance settle more"
    )


def print_plan(plan: Any) -> None:
    """Print what each search will cost, and what the items can tell apart."""
    names = {"race": "race, at most"}
    rows = [(names.get(m, m), n, f"{plan.minutes[m]:.1f}") for m, n in plan.equivalents.items()]
    print_table(("method", "evaluations", "minutes"), rows)
    print(
        f"a difference of {plan.resolved:.2f} nats between two heads will show in four cases of "
        f"five at {plan.confidence:.0%} confidence (if it varies by 1 nat over items); "
        "verification comes on top"
    )


def print_verification(verification: Any) -> None:
    """Print what a verified set of heads, and each of its heads, does to target and controls."""
    from csloc_utils.intervals import Interval  # brings scipy, which `csloc tasks` can do without

    print("\nverification on held-out items (drop = intact − ablated)")
    rows = [
        (
            row.task,
            row.score,
            row.intact,
            row.ablated,
            Interval(row.drop, row.low, row.high),
            row.random_mean,
            "" if row.beats != row.beats else f"{row.beats:.0%} of {row.n_random}",
        )
        for row in verification.table().itertuples()
    ]
    columns = ("task", "score", "intact", "ablated", "drop [95 %]", "random", "more than random")
    print_table(columns, rows)
    for score, interval in (verification.specific or {}).items():
        print(f"specific damage, {score}: {interval}")
    score = next(iter(verification.target.drops))  # written answers have no log-probability
    name = {"logprob": "log-probability"}.get(score, score)
    print(f"\neach head, drop in {name} on the same items [95 %]")
    heads = [(h.head, h.single, h.given_others) for h in verification.each]
    print_table(("head", "off alone", "off beside the others"), heads)
    drop = verification.target.drops[score]
    if drop.low <= 0:
        print("no head found: on held-out items the loss of these heads costs nothing for certain")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows in aligned columns; None is a dash."""

    def text(value: Any) -> str:
        if value is None:
            return "–"
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    cells = [list(columns), *([text(v) for v in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())


def calm() -> None:
    """Keep warnings of the libraries below off the terminal."""
    warnings.filterwarnings("ignore")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
