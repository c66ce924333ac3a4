"""Numbers, intervals, tables and paragraphs of a report's page, as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd

SCORES = {"logprob": "log-probability", "accuracy": "accuracy"}


def unit(score: str) -> str:
    """Return the name of a score with its unit."""
    return "log-probability (nats)" if score == "logprob" else SCORES.get(score, score)


def drop_in_words(score: str, drop: Mapping[str, float]) -> str:
    """Return a drop with its interval and what it is of, for a sentence."""
    of = "nats of log-probability" if score == "logprob" else f"of {SCORES[score]}"
    return f"{interval(drop, 'drop')} {of}"


def interval(made: Mapping[str, float], value: str = "value") -> str:
    """Return an estimate with its interval, never broken over two lines."""
    low, high = number(made["low"]), number(made["high"])
    return f"{number(made[value])} [{low}, {high}]".replace(" ", "\N{NO-BREAK SPACE}")


def number(value: Any) -> str:
    """Return two decimals of a fraction, whole numbers and words as they are, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.2f}".replace("-0.00", "0.00").replace("-", "\N{MINUS SIGN}")
    return str(value)


def listed(names: Sequence[str]) -> str:
    """Return names as in a sentence: a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def paragraph(text: str) -> str:
    """Return a paragraph; what is HTML in the text shows as it was written."""
    return f"<p>{escape(text)}</p>"


def facts(rows: Mapping[str, str]) -> str:
    """Return a list of names, each with what it stands for."""
    lines = (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows.items())
    return f"<dl>{''.join(lines)}</dl>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table that scrolls by itself where the page is narrow."""
    made = pd.DataFrame(rows, columns=columns).to_html(index=False, border=0, justify="left")
    return f'<div class="wide">{made}</div>'


def leading(damage: Mapping[str, Any]) -> str:
    """The score that decides: the log-probability where there is one."""
    return next(score for score in SCORES if score in damage)


def found(run: Mapping[str, Any]) -> list[str]:
    """Names of the heads that the run names; none when the gate stopped it."""
    return [row["head"] for row in run["heads"][: run["k"]]]
