"""Tasks from JSON Lines files: one item a line, an optional header before them.

Every mistake is reported with file and line, before any model is loaded. The tasks that come with
the package are read by this very loader.
"""

from __future__ import annotations

import codecs
import difflib
import importlib.resources
import json
from collections.abc import Sequence
from pathlib import Path

from csloc_utils.errors import InputError
from csloc_utils.tasks.items import SCORINGS, Item, Task, join, shuffled

HEADER_KEYS = {
    "name": str,
    "capability": str,
    "description": str,
    "prefix": str,
    "scoring": str,
    "delimiter": str,
    "seed": int,
    "shots": int,
}
FIELDS = ("prompt", "answer", "choices", "split", "fact")


def data_path(*parts: str) -> Path:
    """Where a file of the project's data folder lies, in an installed package or a checkout.

    Raises
    ------
    InputError
        If it is in neither.
    """
    package = importlib.resources.files("csloc_utils")
    places = [Path(str(package)).joinpath("data", *parts), Path(str(package)).parent / "data"]
    places[1] = places[1].joinpath(*parts)
    for place in places:
        if place.exists():
            return place
    name = "/".join(parts)
    raise InputError(f"the data file {name} is missing from this installation: install csloc again")


def read_task(path: str | Path, seed: int | None = None, source: str | None = None) -> Task:
    """Read a task from a JSON Lines file.

    Parameters
    ----------
    path : str or Path
        A file with one JSON object a line: ``{"prompt": "7 × 8 =", "answer": "56"}`` (or a list of
        accepted answers), or ``{"prompt": …, "choices": ["a", "b"], "answer": 0}``. Any line may
        say what ``"fact"`` it is about; all or none say which ``"split"`` ("locate" or "verify")
        they belong to. Other fields are ignored. The first line may be a header
        ``{"task": {"name": …}}`` with the keys of `HEADER_KEYS`.
    seed : int, optional
        Seed of the split, of the few-shot examples and of samples; default: the header's, or 0.
    source : str, optional
        What the task says it came from; default: the file's path.

    Returns
    -------
    Task

    Raises
    ------
    InputError
        Naming file and line, if anything is wrong with the file.

    Notes
    -----
    Without splits, half of the facts (chosen by `seed`) are for locating and half for verifying.
    The header's ``"shots": 4`` takes four more facts out of both and writes them, one a line, as
    the few-shot prefix (after the header's own ``prefix``, if it has one).
    """
    path = Path(path)
    header: dict = {}
    header_line = 1
    items: list[Item] = []
    lines: list[int] = []
    splits: list[str | None] = []
    for number, record in records(path):
        where = f"{path}:{number}"
        if isinstance(record.get("task"), dict) and "prompt" not in record:
            if items or header:
                raise InputError(f"{where}: a task header belongs in the first line: move it there")
            header, header_line = _header(record, where), number
            continue
        items.append(_item(record, where))
        splits.append(_split(record, where))
        lines.append(number)
    if not items:
        raise InputError(f"{path}:1: there are no items in this file: add one JSON object a line")
    _check_together(path, items, lines, splits, header.get("scoring"))
    try:
        return _build(path, header, items, splits, seed, source)
    except InputError as error:
        raise InputError(f"{path}:{header_line}: {error}") from None


def split_facts(
    items: Sequence[Item], seed: int, shots: int = 0
) -> tuple[list[Item], list[Item], list[Item]]:
    """Deal items out to few-shot examples, locate and verify, so that no two share a fact.

    Parameters
    ----------
    items : sequence of Item
    seed : int
    shots : int
        Number of examples, each of another fact; the other items of these facts are dropped.

    Returns
    -------
    examples, locate, verify : list of Item

    Raises
    ------
    InputError
        If there are fewer than ``shots + 2`` facts.
    """
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.fact, []).append(item)
    if len(groups) < shots + 2:
        extra = f" and {shots} shots" if shots else ""
        raise InputError(
            f"two halves{extra} need {shots + 2} facts, there are {len(groups)}: add items"
        )
    facts = shuffled(groups, f"facts/{seed}")
    examples = [shuffled(groups[fact], f"{seed}/example/{fact}")[0] for fact in facts[:shots]]
    half = (len(facts) - shots) // 2
    for_locate = set(facts[shots : shots + half])
    for_verify = set(facts[shots + half :])
    locate = [item for item in items if item.fact in for_locate]
    verify = [item for item in items if item.fact in for_verify]
    return examples, locate, verify


def few_shot(examples: Sequence[Item], delimiter: str = " ") -> str:
    """Examples with their first right answer, one a line, as the text before a prompt."""
    return "".join(join(item.prompt, item.right[0], delimiter) + "\n" for item in examples)


def records(path: Path) -> list[tuple[int, dict]]:
    """Numbered JSON objects of a file, or what is wrong with it."""
    try:
        raw = path.read_bytes()
    except IsADirectoryError:
        raise InputError(f"{path}: this is a folder: name a .jsonl file in it") from None
    except FileNotFoundError:
        raise InputError(f"{path}: no such file: check the path of the task file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read ({reason}): check the path") from None
    try:
        text = raw.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not UTF-8 text: save the file as UTF-8") from None
    if text.lstrip().startswith("["):
        raise InputError(
            f"{path}:1: a JSON list, not JSON Lines: write one object a line, without [ ]"
        )
    found = []
    # Only "\n" ends a line: str.splitlines would also cut at U+2028 inside a text.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, object_pairs_hook=_no_repeats)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", None) or str(error)
            raise InputError(
                f"{path}:{number}: not JSON ({reason}): write one whole object on each line"
            ) from None
        if not isinstance(record, dict):
            raise InputError(f"{path}:{number}: not a JSON object: write {{...}} on each line")
        found.append((number, record))
    return found


def _no_repeats(pairs: list[tuple[str, object]]) -> dict:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("the same field twice in one object")
    return record


def _header(record: dict, where: str) -> dict:
    if len(record) > 1:
        other = min(set(record) - {"task"})
        raise InputError(f"{where}: {other!r} stands beside the task header: move it inside")
    header = record["task"]
    for key, value in header.items():
        if key not in HEADER_KEYS:
            raise InputError(
                f"{where}: unknown key {key!r} in the task header: use {', '.join(HEADER_KEYS)}"
            )
        if type(value) is not HEADER_KEYS[key]:
            kind = "text" if HEADER_KEYS[key] is str else "a whole number"
            raise InputError(f"{where}: {key!r} must be {kind}, not {value!r}")
    if header.get("shots", 0) < 0:
        raise InputError(f"{where}: {header['shots']} shots: give 0 or more")
    if header.get("scoring", "text") not in SCORINGS:
        raise InputError(
            f"{where}: unknown scoring {header['scoring']!r}: use {', '.join(SCORINGS)}"
        )
    return header


def _item(record: dict, where: str) -> Item:
    for field in FIELDS:
        if field not in record:
            # A misspelt optional field would be ignored in silence, and with it what it asks for.
            close = [k for k in record if _misspelt(k, field)]
            if close:
                raise InputError(f"{where}: unknown field {close[0]!r}: write {field!r}")
    for field in ("prompt", "answer"):
        if field not in record:
            raise InputError(f"{where}: the field {field!r} is missing: add it")
    answer = record["answer"]
    fact = record.get("fact", "")
    if "fact" in record and not (isinstance(fact, str) and fact.strip()):
        raise InputError(f"{where}: 'fact' must be text that is not empty, not {fact!r}")
    try:
        if "choices" in record:
            if type(answer) is not int:
                raise InputError(f"with choices, 'answer' is the index of one, not {answer!r}")
            if record["choices"] == []:
                raise InputError("'choices' is empty: give at least two")
            return Item(record["prompt"], (), record["choices"], answer, fact, where)
        if isinstance(answer, (int, float)):  # 0 may be an index whose choices were forgotten
            raise InputError(
                f"'answer' is the bare value {json.dumps(answer)}:"
                " write it in quotes, or add the choices it counts"
            )
        if not isinstance(answer, (str, list)):
            raise InputError(f"'answer' must be text or a list of texts, not {answer!r}")
        answers = [answer] if isinstance(answer, str) else answer
        return Item(record["prompt"], answers, fact=fact, where=where)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _misspelt(key: str, field: str) -> bool:
    if key in FIELDS:
        return False
    return difflib.SequenceMatcher(None, key.strip().lower(), field).ratio() > 0.8


def _split(record: dict, where: str) -> str | None:
    split = record.get("split")
    if "split" in record and split not in ("locate", "verify"):
        raise InputError(f'{where}: unknown split {split!r}: write "locate" or "verify"')
    return split


def _check_together(
    path: Path,
    items: list[Item],
    lines: list[int],
    splits: list[str | None],
    scoring: str | None,
) -> None:
    """What no line shows by itself: mixed kinds, half-given splits, contradictions."""
    choice = scoring == "choice" if scoring else bool(items[0].choices)
    seen: dict = {}
    halves: dict[str, tuple[str | None, int]] = {}
    for item, line, split in zip(items, lines, splits):
        where = f"{path}:{line}"
        if bool(item.choices) != choice:
            has, rest = ("choices", "do not") if item.choices else ("no choices", "do")
            raise InputError(
                f"{where}: this item has {has}, the task's other items {rest}: make two files"
            )
        if (split is None) != (splits[0] is None):
            raise InputError(f"{where}: some lines have a split and some none: give all or none")
        key = (item.prompt, frozenset(item.choices))
        right, first = seen.setdefault(key, (item.right, line))
        if set(right) != set(item.right):
            raise InputError(
                f"{where}: the prompt of line {first} with another answer:"
                " keep one, or list both answers"
            )
        half, first = halves.setdefault(item.fact, (split, line))
        if half != split:
            raise InputError(
                f"{where}: this fact is in {split}, but in line {first} in {half}: choose one"
            )


def _build(
    path: Path,
    header: dict,
    items: list[Item],
    splits: list[str | None],
    seed: int | None,
    source: str | None,
) -> Task:
    seed = header.get("seed", 0) if seed is None else seed
    delimiter = header.get("delimiter", " ")
    prefix = header.get("prefix", "")
    shots = header.get("shots", 0)
    if splits[0] is None:
        examples, locate, verify = split_facts(items, seed, shots)
        prefix += few_shot(examples, delimiter)
    elif shots:
        raise InputError("'shots' draws from items without a split: write them as the prefix")
    else:
        locate = [item for item, split in zip(items, splits) if split == "locate"]
        verify = [item for item, split in zip(items, splits) if split == "verify"]
    name = header.get("name", path.stem)
    return Task(
        name=name,
        capability=header.get("capability", name),
        scoring=header.get("scoring", "choice" if items[0].choices else "continuation"),
        prefix=prefix,
        locate=tuple(locate),
        verify=tuple(verify),
        seed=seed,
        description=header.get("description", ""),
        source=str(path) if source is None else source,
        delimiter=delimiter,
    )
