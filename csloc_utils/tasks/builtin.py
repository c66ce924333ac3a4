"""The tasks that come with the package, all of them written or generated for it.

Arithmetic and copying are generated here; what needs writing (capitals, rhymes, code, questions,
prose) stands in the project's ``data/tasks`` as JSON Lines. The items of a task are always the
same; its seed decides the split and which items become few-shot examples.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from csloc_utils.tasks.files import data_path, few_shot, read_task, records, split_facts
from csloc_utils.tasks.items import Item, Task

SHOTS = 4

# Short common words, so that most tokenizers have one token for each.
WORDS = (
    "apple arm baby bag ball band bank bear bed bell bird boat body bone book box boy bread"
    " bridge brother bus cake camp car card cat chain chair chest child church city class clock"
    " cloud club coat coin cold color corner cotton cow cup dance day desk dinner dog door dream"
    " dress drink drum duck dust ear earth egg eye face family farm father field film fire fish"
    " flag floor flower foot fork forest friend fruit game garden gate gift girl glass gold grass"
    " green group guitar hair hall hand hat head heart hill home honey horse hospital hotel house"
    " ice iron island jacket job key king kitchen knife lady lake lamp land leaf leg letter light"
    " lion lip lock machine man map market meat metal milk mirror money moon morning mother"
    " mountain mouse mouth music nail neck nest night nose oil orange oven page paint paper park"
    " pen picture pig pilot pipe plant plate pocket poem pool queen rain ring river road rock roof"
    " room root rope rose sail salt sand school sea seat shadow sheep ship shirt shoe shop silver"
    " sister skin sky snow soap sock song soup spoon spring square star station stone storm street"
    " sugar summer sun table tail tea teacher team tent ticket tiger tooth tower town train tree"
    " truck valley village voice wall watch water wave wheel wind window wine winter wolf wood"
).split()

# What a lettered question looks like; every letter is right once.
LETTER_EXAMPLES = (
    ("Question: Which animal barks?\nAnswer:", ("a cat", "a dog", "a fish", "a hen"), 1),
    ("Question: What is a shoe worn on?\nAnswer:", ("hand", "ear", "neck", "foot"), 3),
    ("Question: What falls from clouds?\nAnswer:", ("rain", "sand", "milk", "ink"), 0),
    ("Question: What does a baker make?\nAnswer:", ("shoes", "clocks", "bread", "paint"), 2),
)


def multiplication(seed: int) -> Task:
    """Times table from 2 to 12; a product and its mirror image are one fact."""
    return _task(
        "multiplication",
        "multiplying two numbers",
        "7 × 8 = … 56",
        [_pair(a, b, "×", " =", a * b) for a in range(2, 13) for b in range(2, 13)],
        seed,
    )


def repeat_left(seed: int) -> Task:
    """Twin of multiplication: same operands, same examples, same split; another operation."""
    return _task(
        "repeat-left",
        "repeating the left of two numbers",
        "7 × 8, first number: … 7; the twin of multiplication, with nothing to multiply",
        [_pair(a, b, "×", ", first number:", a) for a in range(2, 13) for b in range(2, 13)],
        seed,
    )


def addition(seed: int) -> Task:
    """Sums of two numbers from 1 to 10; a sum and its mirror image are one fact."""
    return _task(
        "addition",
        "adding two numbers",
        "7 + 8 = … 15",
        [_pair(a, b, "+", " =", a + b) for a in range(1, 11) for b in range(1, 11)],
        seed,
    )


def subtraction(seed: int) -> Task:
    """Differences of two numbers up to 10 and of the same in tens; 8 - 3 and 80 - 30 are one."""
    items = [
        Item(f"{a * tens} - {b * tens} =", (str((a - b) * tens),), fact=f"{a}-{b}")
        for a in range(2, 11)
        for b in range(1, a)
        for tens in (1, 10)
    ]
    return _task("subtraction", "subtracting two numbers", "9 - 4 = … 5", items, seed)


def worded_multiplication(seed: int) -> Task:
    """The products of `multiplication` in words: same facts, same split."""
    pairs = [(a, b) for a in range(2, 13) for b in range(2, 13)]
    return _task(
        "worded-multiplication",
        "multiplying two numbers, asked in words",
        "The product of 7 and 8 is … 56",
        [_worded(a, b, "×", "The product of {} and {} is", a * b) for a, b in pairs],
        seed,
    )


def worded_addition(seed: int) -> Task:
    """The sums of `addition` in words: same facts, same split."""
    pairs = [(a, b) for a in range(1, 11) for b in range(1, 11)]
    return _task(
        "worded-addition",
        "adding two numbers, asked in words",
        "The sum of 7 and 8 is … 15",
        [_worded(a, b, "+", "The sum of {} and {} is", a + b) for a, b in pairs],
        seed,
    )


def sum_stories(seed: int) -> Task:
    """The sums of `addition` as little stories: same facts, same split."""
    story = "Question: A box holds {} red and {} blue balls. How many balls does it hold?\nAnswer:"
    pairs = [(a, b) for a in range(1, 11) for b in range(1, 11)]
    return _task(
        "sum-stories",
        "adding two numbers that a story gives",
        "A box holds 7 red and 8 blue balls. How many balls does it hold? … 15",
        [_worded(a, b, "+", story, a + b) for a, b in pairs],
        seed,
    )


def copying(seed: int) -> Task:
    """Five random words, then the first four again: what comes next can only be copied."""
    generator = random.Random("copying")
    items = []
    for answer in generator.sample(WORDS, 100):  # no two items have the same answer
        words = generator.sample([word for word in WORDS if word != answer], 4)
        items.append(Item(f"{' '.join([*words, answer])}\n{' '.join(words)}", (answer,)))
    return Task(
        "copying",
        "copying from the context",
        "continuation",
        "",
        *_halves(items, seed),
        seed,
        "lamp tree egg road sun / lamp tree egg road … sun",
    )


def knowledge_letters(seed: int) -> Task:
    """The questions of `knowledge` as an exam asks them: the answer is a letter; same split."""
    return _lettered(
        "knowledge", lambda record: (record["prompt"], record["choices"], record["answer"]), seed
    )


def capitals_letters(seed: int) -> Task:
    """The facts of `capitals` as an exam asks them: the answer is a letter; same split."""
    facts = {r["fact"]: r["answer"] for r in _records("capitals")}
    names = {fact: [a] if isinstance(a, str) else a for fact, a in facts.items()}

    def ask(record: dict) -> tuple[str, list[str], int]:
        fact = record["fact"]
        generator = random.Random(f"capitals-letters/{fact}")
        wrong = [n[0] for n in names.values() if n[0] not in names[fact]]
        choices = generator.sample(wrong, 3)
        correct = generator.randrange(4)
        choices.insert(correct, names[fact][0])
        return f"Question: What is the capital of {fact}?\nAnswer:", choices, correct

    return _lettered("capitals", ask, seed)


def _lettered(name: str, ask: Callable[[dict], tuple[str, list[str], int]], seed: int) -> Task:
    """Return the items of a stored task with lettered choices; the letter is the answer."""
    items = [
        _letter_item(*ask(record), record.get("fact", record["prompt"]))
        for record in _records(name)
    ]
    # The facts that are the open form's examples are left out, so that the halves are the same.
    shots = next(record["task"]["shots"] for _, record in records(_path(name)))
    _, locate, verify = split_facts(items, seed, shots)
    return Task(
        f"{name}-letters",
        f"{_stored(name, seed).capability}, answered by a letter",
        "choice",
        few_shot([_letter_item(*example) for example in LETTER_EXAMPLES]),
        tuple(locate),
        tuple(verify),
        seed,
        "… A. green B. blue C. red D. purple, Answer: … A",
    )


def _letter_item(question: str, choices: Sequence[str], correct: int, fact: str = "") -> Item:
    lines = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", choices))
    prompt = question.replace("\nAnswer:", f"\n{lines}\nAnswer:")
    return Item(prompt, choices=tuple("ABCD"), correct=correct, fact=fact)


def _records(name: str) -> list[dict]:
    return [record for _, record in records(_path(name)) if "prompt" in record]


def _path(name: str) -> Path:
    return data_path("tasks", f"{name}.jsonl")


def _task(name: str, capability: str, description: str, items: list[Item], seed: int) -> Task:
    examples, locate, verify = split_facts(items, seed, SHOTS)
    return Task(
        name,
        capability,
        "continuation",
        few_shot(examples),
        tuple(locate),
        tuple(verify),
        seed,
        description,
    )


def _halves(items: Iterable[Item], seed: int) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    _, locate, verify = split_facts(list(items), seed)
    return tuple(locate), tuple(verify)


def _pair(a: int, b: int, sign: str, ask: str, answer: int) -> Item:
    """One problem; its fact is the unordered pair, so that mirror images stay together."""
    return Item(f"{a} {sign} {b}{ask}", (str(answer),), fact=f"{min(a, b)}{sign}{max(a, b)}")


def _worded(a: int, b: int, sign: str, ask: str, answer: int) -> Item:
    """One problem in words, of the same fact as in signs."""
    return replace(_pair(a, b, sign, "", answer), prompt=ask.format(a, b))


def _stored(name: str, seed: int) -> Task:
    return read_task(_path(name), seed=seed, source="built-in")


BUILTIN: dict[str, Callable[[int], Task]] = {
    "multiplication": multiplication,
    "repeat-left": repeat_left,
    "addition": addition,
    "subtraction": subtraction,
    "worded-multiplication": worded_multiplication,
    "worded-addition": worded_addition,
    "sum-stories": sum_stories,
    "capitals": partial(_stored, "capitals"),
    "capitals-letters": capitals_letters,
    "copying": copying,
    "rhyme": partial(_stored, "rhyme"),
    "code": partial(_stored, "code"),
    "knowledge": partial(_stored, "knowledge"),
    "knowledge-letters": knowledge_letters,
    "text": partial(_stored, "text"),
}

# Beside a task: a twin with its surface, something that reads its context, something that recalls
# facts, and plain text, where a head that everything needs gives itself away.
CONTROLS: dict[str, list[str]] = {
    "multiplication": ["repeat-left", "copying", "capitals", "text"],
    "repeat-left": ["multiplication", "copying", "capitals", "text"],
    "addition": ["repeat-left", "copying", "capitals", "text"],
    "subtraction": ["repeat-left", "copying", "capitals", "text"],
    "worded-multiplication": ["copying", "capitals", "text"],
    "worded-addition": ["copying", "capitals", "text"],
    "sum-stories": ["copying", "capitals", "text"],
    "capitals": ["knowledge", "copying", "multiplication", "text"],
    "copying": ["capitals", "multiplication", "text"],
    "rhyme": ["copying", "capitals", "text"],
    "code": ["copying", "multiplication", "text"],
    "knowledge": ["copying", "capitals", "text"],
    "knowledge-letters": ["knowledge", "copying", "capitals", "text"],
    "capitals-letters": ["capitals", "copying", "knowledge", "text"],
    "text": ["copying", "capitals", "multiplication"],
}
OWN_CONTROLS = ["copying", "capitals", "text"]
