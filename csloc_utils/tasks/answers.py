"""Judging a text that a model wrote: find the answer in it, and say whether it is right.

Everything here is a pure function of texts. Code is not run: `program` puts a solution and its
tests together, and whoever calls it runs the result in a sandbox.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache

from csloc_utils.errors import InputError

# A sign counts unless it may be a minus between two numbers ("12-18"); commas only in thousands.
_NUMBER = (
    r"(?:(?<![\w.)])(?P<sign>[-−]))?\\?[$€£]?(?P<inner>(?<=[$€£])-)?"
    r"(?<![\w.])(?P<digits>(?:\d{1,3}(?:,\d{3})+(?![\d,]*\d)|\d+)(?:\.\d+)?|\.\d+)"
)
_ANYWHERE = re.compile(_NUMBER)
_STATED = re.compile(r"(?:####|\banswer is\b)[\s:*$\\(=]*?" + _NUMBER, re.IGNORECASE)
_NEXT_QUESTION = re.compile(r"\n\s*(?:Question|Q|Problem):")
_FENCE = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.S | re.I | re.M)
_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_DEFINES = re.compile(r"(?:async def|def|class|import|from|@)\b|@")


@dataclass(frozen=True)
class Rhyme:
    """Whether two words rhyme, and why; true in a condition exactly when they do."""

    rhymes: bool
    reason: str

    def __bool__(self) -> bool:
        return self.rhymes


def last_number(text: str) -> Decimal | None:
    """The last number of a text, read as a person would: ``"… so $1,234.50."`` is 1234.50.

    Only the answer to the first question counts: a model that goes on and asks itself another
    ("Question: …" on a new line) is cut there. None if there is no number.
    """
    found = list(_ANYWHERE.finditer(_first_answer(text)))
    return _value(found[-1]) if found else None


def stated_number(text: str) -> Decimal | None:
    """The first number that directly follows ``####`` or "answer is"; None if there is none."""
    found = _STATED.search(_first_answer(text))
    return _value(found) if found else None


def first_word(text: str) -> str:
    """The first word of a text, without quotes and punctuation; empty if there is none."""
    found = _WORD.search(text)
    return found.group() if found else ""


def extract_code(text: str) -> str:
    """The Python a model's answer holds.

    The first fenced block, also one that is never closed; without fences the text up to
    ``[DONE]``. Of text that holds whole definitions, what follows the code is cut off.
    """
    text = text.replace("\r\n", "\n")
    fenced = _FENCE.search(text)
    if fenced:
        return fenced.group(1).rstrip() + "\n"
    code = text.split("[DONE]")[0].replace("[BEGIN]", "")
    return _longest_program(code) if _defines(code) else code


def function_body(text: str, indent: str = "    ") -> str:
    """A function's body out of a raw continuation of its header.

    It ends before the first statement that stands at the margin. A first line that lost its
    indentation, as happens when an answer is stripped, gets `indent` back.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    first = next((i for i, line in enumerate(lines) if line.strip()), None)
    if first is None:
        return ""
    if not lines[first][0].isspace():
        lines[first] = indent + lines[first]
    for i in range(first + 1, len(lines)):
        at_margin = lines[i].strip() and not lines[i][0].isspace()
        # Text at the margin may still be inside of a string or of brackets.
        if at_margin and _parses("def f():\n" + "\n".join(lines[:i])):
            return "\n".join(lines[:i]).rstrip() + "\n"
    return "\n".join(lines).rstrip() + "\n"


def program(benchmark: str, row: Mapping, text: str) -> str:
    """The source text that is run to judge an answer to MBPP or HumanEval; it fails by raising.

    Parameters
    ----------
    benchmark : {"mbpp", "humaneval"}
    row : mapping
        The benchmark's row: ``tests`` and ``test_setup``, or ``prompt``, ``test``, ``entry_point``.
    text : str
        What the model wrote after the prompt.

    Raises
    ------
    InputError
        If the benchmark runs no code or the row lacks its tests.
    """
    name = _base(benchmark)
    if name == "mbpp":
        setup, tests = _field(row, "test_setup", name), _field(row, "tests", name)
        return "\n".join([extract_code(text), setup, *tests, ""])
    if name != "humaneval":
        raise InputError(f"{name!r} runs no code: use mbpp or humaneval")
    prompt, test, entry = (_field(row, key, name) for key in ("prompt", "test", "entry_point"))
    code = extract_code(text)
    fenced = _FENCE.search(text.replace("\r\n", "\n"))
    indent = re.match(r"\s*", prompt.rstrip().split("\n")[-1]).group() or "    "
    again = re.search(rf"^(?:async )?def {re.escape(entry)}\b", code, re.M)
    goes_on = text.lstrip("\r\n")[:1].isspace()  # with the body, whatever follows it
    if again and (fenced or not goes_on):
        # The whole function once more; what the prompt imports and defines is still needed.
        solution = f"{prompt.rstrip()}\n{indent}pass\n\n{code}"
    elif fenced:
        solution = prompt + textwrap.indent(textwrap.dedent(code), indent)
    else:
        solution = prompt + function_body(text.split("[DONE]")[0], indent)
    return f"{solution}\n{test}\ncheck({entry})\n"


def rhymes(word: str, candidate: str) -> Rhyme:
    """Whether two words rhyme by the CMU Pronouncing Dictionary.

    They do if in any pronunciation of each they have the same sounds from the last stressed vowel
    on, whatever the degree of stress. No word rhymes with itself; words that only sound the same
    ("two", "too") do. Case and surrounding punctuation play no part.

    Raises
    ------
    InputError
        If the package `pronouncing` is not installed.
    """
    word, candidate = first_word(word).lower(), first_word(candidate).lower()
    if not candidate:
        return Rhyme(False, "there is no word")
    if candidate == word:
        return Rhyme(False, f"{candidate!r} is the word itself")
    for one in (word, candidate):
        if not _rhyme_parts(one):
            return Rhyme(False, f"{one!r} is not in the pronouncing dictionary")
    if _rhyme_parts(word) & _rhyme_parts(candidate):
        return Rhyme(True, f"{word!r} and {candidate!r} end alike")
    return Rhyme(False, f"{word!r} and {candidate!r} end differently")


def swears(text: str, words: Sequence[str]) -> float:
    """1.0 if a text holds one of `words` as a whole word, or its plural in -s or -es, else 0.0."""
    if isinstance(words, str) or not words:
        raise InputError("'words' must be a list of words that is not empty: give the whole list")
    return float(_any_of(tuple(words)).search(text) is not None)


def check(
    benchmark: str,
    row: Mapping,
    text: str,
    run: Callable[[str], bool] | None = None,
    strict: bool = False,
) -> float:
    """Judge what a model wrote after a row's prompt.

    Parameters
    ----------
    benchmark : str
        ``gsm8k``, ``arithmetic``, ``lambada``, ``rhyming``, ``swearing``, ``mbpp`` or
        ``humaneval``; a variant after a colon is ignored.
    row : mapping
        The benchmark's row (see `csloc_utils.tasks.benchmarks.load_rows`).
    text : str
    run : callable, optional
        For mbpp and humaneval: runs a program in a sandbox, and says whether it passed.
    strict : bool
        For gsm8k: only a number behind ``####`` or "answer is" counts, not just the last one.

    Returns
    -------
    float, 1.0 for right and 0.0 for wrong; for swearing, 1.0 if the text swears.

    Raises
    ------
    InputError
        If the benchmark is not judged this way, the row lacks a field, or `run` is missing.
    """
    name = _base(benchmark)
    if name == "gsm8k":
        number = stated_number(text) if strict else last_number(text)
        return float(number is not None and number == last_number(_field(row, "answer", name)))
    if name == "arithmetic":
        number = _ANYWHERE.search(_first_answer(text))
        answer = last_number(_field(row, "answer", name))
        return float(number is not None and _value(number) == answer)
    if name == "lambada":
        return float(first_word(text) == first_word(_field(row, "answer", name)))
    if name == "rhyming":
        return float(bool(rhymes(_field(row, "word", name), first_word(text))))
    if name == "swearing":
        return swears(text, _field(row, "words", name))
    if name in ("mbpp", "humaneval"):
        if run is None:
            raise InputError(f"{name} is judged by running code: give `run`, a sandbox")
        return float(bool(run(program(name, row, text))))
    raise InputError(f"{benchmark!r} is not judged by its text: score its choices instead")


def _base(benchmark: str) -> str:
    return benchmark.partition(":")[0]


def _field(row: Mapping, key: str, name: str):
    if key not in row:
        raise InputError(f"the {name} row has no {key!r}: give a row of load_rows({name!r})")
    return row[key]


def _first_answer(text: str) -> str:
    return _NEXT_QUESTION.split(text, maxsplit=1)[0]


def _value(found: re.Match) -> Decimal:
    digits = Decimal(found["digits"].replace(",", ""))
    return -digits if found["sign"] or found["inner"] else digits


def _defines(code: str) -> bool:
    return any(_DEFINES.match(line) for line in code.split("\n"))


def _parses(source: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd escapes in a model's strings are no news
        try:
            ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


def _longest_program(code: str) -> str:
    """`code` without the lines at its end, or its start, that keep it from being Python."""
    lines = code.split("\n")
    start = next((i for i, line in enumerate(lines) if _DEFINES.match(line)), 0)
    for first in dict.fromkeys((0, start)):
        for last in range(len(lines), start, -1):
            if _parses("\n".join(lines[first:last])):
                return "\n".join(lines[first:last]).rstrip() + "\n"
    return code


@lru_cache(maxsize=4096)
def _rhyme_parts(word: str) -> frozenset[str]:
    try:
        import pronouncing
    except ImportError:
        raise InputError(
            "rhymes need the package pronouncing, which is not installed:"
            ' pip install "csloc[benchmarks]"'
        ) from None
    phones = pronouncing.phones_for_word(word.replace("’", "'"))
    return frozenset(re.sub(r"\d", "", pronouncing.rhyming_part(p)) for p in phones)


@lru_cache(maxsize=64)
def _any_of(words: tuple[str, ...]) -> re.Pattern:
    listed = "|".join(re.escape(word) for word in words)
    return re.compile(rf"(?<!\w)(?:{listed})(?:e?s)?(?!\w)", re.IGNORECASE)
