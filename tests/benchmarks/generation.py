"""How fast many masks decode together, against one mask at a time.

    python tests/benchmarks/generation.py --model smollm2-135m-q4 --masks 16 --items 6 --tokens 32

Prompts look like few-shot arithmetic: a long prefix in common, an own question each. The other side
is ``transformers.generate`` on the same weights, one mask at a time with all its items in a batch
and the mask set by forward pre-hooks. Both sides write all tokens, take turns, and run `--repeats`
times. Wall time decides; time on the processor is given too, for a machine that has other work to
do. The other side's masks cost the same each, so only `--reference-masks` of them are timed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from csloc_utils.generation import generate
from csloc_utils.models import HeadModel, load_model


def prompts(tokenizer: Any, n_items: int, prefix: int, own: int) -> list[list[int]]:
    """Few-shot prompts: `prefix` shared tokens and about `own` (± a quarter) of each item's."""
    rng = np.random.default_rng(0)

    def question() -> str:
        a, b, c = rng.integers(11, 99, 3)
        return (
            f"Question: A shop has {a} boxes with {b} apples each and sells {c} apples. "
            "How many apples are left?\nAnswer:"
        )

    def tokens(text: str, n: int) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids[-n:]

    shown = "".join(f"{question()} The answer is {rng.integers(99, 999)}.\n\n" for _ in range(99))
    first = tokens(shown, prefix)
    lengths = rng.integers(own - own // 4, own + own // 4 + 1, n_items)
    # The id before an own part differs, so that exactly the prefix is shared.
    return [first + [100 + i] + tokens(question() * 9, n - 1) for i, n in enumerate(lengths)]


def one_mask(model: HeadModel, texts: list[list[int]], mask: np.ndarray, tokens: int) -> list:
    """Decode all items under one mask with ``transformers.generate`` and forward pre-hooks."""
    grid, longest = model.grid, max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(t)) + t for t in texts], device=model.device)
    real = torch.tensor([[0] * (longest - len(t)) + [1] * len(t) for t in texts]).to(model.device)
    off = torch.from_numpy(mask).view(grid.shape).repeat_interleave(grid.head_width, 1)
    handles = []
    for layer in np.flatnonzero(off.any(1)):
        blank = off[layer].to(model.device)
        handles.append(
            model.projections[layer]._module.register_forward_pre_hook(
                lambda _, args, blank=blank: (args[0].masked_fill(blank, 0),)
            )
        )
    try:
        out = model.hf.generate(
            ids, attention_mask=real, do_sample=False, max_new_tokens=tokens, pad_token_id=0
        )
    finally:
        for handle in handles:
            handle.remove()
    return out[:, longest:].tolist()


def timed(run: Callable[[], Any], tokens: int) -> tuple[float, float, Any]:
    """Return tokens per second of wall time and of processor time, and the result."""
    wall, busy = time.perf_counter(), time.process_time()
    result = run()
    return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - busy), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-q4")
    for name, value in dict(
        masks=16, items=6, tokens=32, prefix=150, own=40, repeats=3, reference_masks=2
    ).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--batch-rows", type=int)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of text")
    args = parser.parse_args()

    model = load_model(args.model, dtype=args.dtype)
    # Nothing ends early: both sides write the same number of tokens.
    model.hf.generation_config.eos_token_id = [10**9]
    texts = prompts(model.tokenizer, args.items, args.prefix, args.own)
    masks = np.random.default_rng(1).random((args.masks, model.grid.size)) < 0.1
    few = masks[: args.reference_masks]
    options = dict(max_new_tokens=args.tokens, batch_rows=args.batch_rows, progress=False)

    generate(model, texts, masks[:1], **options | dict(max_new_tokens=2))  # warm up
    one_mask(model, texts, masks[0], 2)
    per_mask, equal = args.items * args.tokens, []
    ours, theirs, ours_busy, theirs_busy = [], [], [], []
    for _ in range(args.repeats):
        wall, busy, got = timed(
            lambda: generate(model, texts, masks, **options), len(masks) * per_mask
        )
        ours.append(wall)
        ours_busy.append(busy)
        wall, busy, wanted = timed(
            lambda: [one_mask(model, texts, m, args.tokens) for m in few], len(few) * per_mask
        )
        theirs.append(wall)
        theirs_busy.append(busy)
        pairs = [(a, b) for x, y in zip(got.ids, wanted) for a, b in zip(x, y)]
        equal.append(float(np.mean([a == b for a, b in pairs])))
    result = vars(args) | dict(
        threads=torch.get_num_threads(),
        dtype=str(model.dtype),
        device=str(model.device),
        rows=got.batch_rows,
        ours=ours,
        one_mask_at_a_time=theirs,
        ratio=median(a / b for a, b in zip(ours, theirs)),
        ratio_processor_time=median(a / b for a, b in zip(ours_busy, theirs_busy)),
        equal_texts=min(equal),
    )
    if args.json:
        print(json.dumps(result))
        return
    for name, speeds in (("together", ours), ("one mask at a time", theirs)):
        print(
            f"{name:20} {median(speeds):8.1f} tokens/s  ({', '.join(f'{s:.1f}' for s in speeds)})"
        )
    print(f"ratio {result['ratio']:.2f} ({result['ratio_processor_time']:.2f} by processor time)")
    print(f"{100 * result['equal_texts']:.0f} % of the texts equal")


if __name__ == "__main__":
    main()
