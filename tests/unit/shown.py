"""A task that a tiny random model masters: its answers are what the model itself would write."""

from __future__ import annotations

import itertools

import torch

import tiny
from csloc_utils.tasks import Item, Task

PREFIX = "1 = 2\n"


def questions(n):
    pairs = itertools.product("3 4 5 6 7 8 9 A B".split(), repeat=2)
    return [f"{a} {b} =" for a, b in itertools.islice(pairs, n)]


def own_answers(model, prompts):
    answers = []
    for prompt in prompts:
        ids = model.tokenizer(PREFIX + prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            answers.append(tiny.WORDS[int(model.hf(ids).logits[0, -1].argmax())])
    return answers


def task(model, n=40):
    """Half locate, half verify."""
    prompts = questions(n)
    items = [Item(p, (a,)) for p, a in zip(prompts, own_answers(model, prompts), strict=True)]
    half = n // 2
    return Task("shown", "itself", "continuation", PREFIX, items[:half], items[half:], 0)
