"""From rows of the hub to *rows*: ``source_id``, ``question``, ``answer`` and what else is needed.

A converter takes a raw row, its index and the name of its split. A benchmark in the form of rows is
what a folder of JSON Lines holds.
"""

from __future__ import annotations

import re

Row = dict


def gsm8k(raw: Row, i: int, split: str) -> Row:
    """A word problem; its answer without the solution that leads there."""
    answer = raw["answer"].split("####")[1].strip().replace(",", "")
    return {
        "source_id": f"gsm8k/{split}/{i}",
        "question": raw["question"],
        "prompt": f"Question: {raw['question']}\nAnswer:",
        "answer": answer,
        "solution": raw["answer"],
    }


def arithmetic(raw: Row, i: int, split: str) -> Row:
    """A question in words, with its result."""
    context = raw["context"]
    return {
        "source_id": f"arithmetic/{split}/{i}",
        "question": context,
        "prompt": context,
        "answer": raw["completion"].strip(),
    }


def operands(row: Row) -> str:
    """98 + 45 and 45 + 98 are one fact, and so are their products."""
    found = re.search(r"(\d+) (plus|times) (\d+)\?", row["prompt"])
    if not found:
        return row["prompt"]
    a, b = sorted((int(found[1]), int(found[3])))
    return f"{a} {found[2]} {b}"


def mbpp(raw: Row, i: int, split: str) -> Row:
    """A description and the tests that a function must pass."""
    tests = "\n".join(raw["test_list"])
    return {
        "source_id": f"mbpp/{raw['task_id']}",
        "question": raw["text"],
        "prompt": f"You are an expert Python programmer, and here is your task: {raw['text']}"
        f" Your code should pass these tests:\n\n{tests}\n[BEGIN]\n",
        "answer": raw["code"],
        "tests": list(raw["test_list"]),
        "test_setup": raw["test_setup_code"],
    }


def humaneval(raw: Row, i: int, split: str) -> Row:
    """The head of a function, and the tests that its body must pass."""
    return {
        "source_id": raw["task_id"],
        "question": raw["prompt"],
        "prompt": raw["prompt"],
        "answer": raw["canonical_solution"],
        "test": raw["test"],
        "entry_point": raw["entry_point"],
    }


def hellaswag(raw: Row, i: int, split: str) -> Row:
    """The beginning of a scene and its endings."""
    text = f"{raw['activity_label']}: {raw['ctx_a']} {raw['ctx_b'].capitalize()}"
    return {
        "source_id": f"hellaswag/{split}/{raw['ind']}/{raw['source_id']}",
        "question": raw["ctx"],
        "prompt": _plain(text),
        "choices": [_plain(ending) for ending in raw["endings"]],
        "answer": int(raw["label"]),
    }


def _plain(text: str) -> str:
    """Take out the section marks that the articles among HellaSwag's sources carry."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return re.sub(r" {2,}", " ", text).strip()


def boolq(raw: Row, i: int, split: str) -> Row:
    """A passage and a question that is answered by yes or no."""
    return {
        "source_id": f"boolq/{split}/{i}",
        "question": raw["question"],
        "passage": raw["passage"],
        "prompt": f"{raw['passage']}\nQuestion: {raw['question']}?\nAnswer:",
        "choices": ["no", "yes"],
        "answer": int(raw["answer"]),
    }


def arc(raw: Row, i: int, split: str) -> Row:
    """A question of a school exam and its choices."""
    return {
        "source_id": raw["id"],
        "question": raw["question"],
        "choices": list(raw["choices"]["text"]),
        "answer": list(raw["choices"]["label"]).index(raw["answerKey"]),
    }


def chosen(raw: Row, i: int, split: str) -> Row:
    """Convert a question of MMLU or WMDP and its choices."""
    return {
        "source_id": f"{split}/{i}",
        "subject": raw.get("subject", ""),
        "question": raw["question"],
        "choices": list(raw["choices"]),
        "answer": int(raw["answer"]),
    }


def lambada(raw: Row, i: int, split: str) -> Row:
    """A passage without its last word."""
    prompt, _, answer = raw["text"].rstrip().rpartition(" ")
    return {
        "source_id": f"lambada_openai/{i}",
        "question": prompt,
        "prompt": prompt,
        "answer": answer,
    }


def profanity(raw: Row, i: int, split: str) -> Row:
    """Words that insult by what somebody is are left out, and so are phrases and spellings."""
    word = raw["text"].strip().lower()
    kinds = " ".join(str(raw.get(f"category_{n}") or "") for n in (1, 2, 3))
    if not word.isalpha() or re.search(r"orientation|racial|religious|disab|mental", kinds):
        return {}
    return {
        "source_id": f"surge-ai/profanity/{word}",
        "question": None,
        "answer": word,
        "canonical": raw["canonical_form_1"].strip().lower(),
        "category": raw["category_1"],
        "severity": float(raw["severity_rating"]),
    }
