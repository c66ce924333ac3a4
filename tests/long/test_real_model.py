"""The whole road on the real model: what the README promises. Some ten minutes on two cores."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from csloc_utils.ablation import masked_logits
from csloc_utils.heads import Head
from csloc_utils.models import load_model
from csloc_utils.sources import cache_folder

LOCATE = (
    "locate --model smollm2-135m-q4 --task multiplication --method paper --k 5 --budget 150 --quiet"
)


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2-135m-q4", dtype="float32")


def csloc(line, cache, **options):
    """Start the command with measurements of its own but the converted models of this machine."""
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / "models").exists():
        (cache / "models").symlink_to(cache_folder() / "models")
    command = [sys.executable, "-m", "csloc_utils.cli", *line.split()]
    return subprocess.Popen(command, env=os.environ | {"CSLOC_CACHE": str(cache)}, **options)


def test_masking_equals_zeroed_columns_bitwise(model):
    ids = model.tokenizer(["7 × 8 = 56", "3 × 4 = 12"], return_tensors="pt", padding=True).input_ids
    heads = [Head(20, 3), Head(13, 4), Head(0, 0)]
    mask = np.repeat(model.grid.mask(heads)[None], 2, 0)
    masked = masked_logits(model, ids, torch.ones_like(ids), mask)
    saved = {}
    with torch.no_grad():
        for head in heads:
            weight = model.hf.model.layers[head.layer].self_attn.o_proj.weight
            columns = slice(head.index * 64, (head.index + 1) * 64)
            saved[head] = weight[:, columns].clone()
            weight[:, columns] = 0
        zeroed = masked_logits(model, ids, torch.ones_like(ids))
        for head, columns in saved.items():
            weight = model.hf.model.layers[head.layer].self_attn.o_proj.weight
            weight[:, head.index * 64 : (head.index + 1) * 64] = columns
    assert torch.equal(masked, zeroed)


def test_multiplication_heads_kill_and_resume(model, tmp_path):
    """An uninterrupted run finds heads that matter; a killed one resumes to the same result."""
    reports = []
    for kill in (False, True):
        cache = tmp_path / f"cache-{kill}"
        line = f"{LOCATE} --json {tmp_path}/{kill}.json"
        if kill:
            process = csloc(line, cache, stdout=subprocess.DEVNULL)
            store = cache / "measurements.sqlite-wal"
            while process.poll() is None and not (store.exists() and store.stat().st_size > 50000):
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -9, "it finished before it could be killed"
        assert csloc(line, cache).wait() == 0
        report = json.loads((tmp_path / f"{kill}.json").read_text())
        reports.append({k: v for k, v in report.items() if k not in ("date", "command")})
    assert reports[0] == reports[1]
    verify = reports[0]["verify"]
    accuracy = verify["target"]["accuracy"]
    assert accuracy["intact"] > 0.6 and accuracy["ablated"] < 0.25
    assert verify["random"]["n"] == 100
    assert verify["random"]["accuracy"]["beaten"] >= 95
    assert verify["random"]["logprob"]["beaten"] >= 95


def test_short_floats_rank_single_heads_as_float32_does(model):
    """bfloat16 is what fast hardware uses: its noise must be small beside the effects."""
    from csloc_utils.measure import Evaluator
    from csloc_utils.tasks import load_task

    task = load_task("multiplication")
    masks = model.grid.single_masks()[13 * 9 : 14 * 9]
    effects = [
        Evaluator(m, task, n_items=8, store=":memory:", progress=False).measure(masks).effects()
        for m in (model, load_model("smollm2-135m-q4", dtype="bfloat16"))
    ]
    assert np.argmin(effects[0]) == np.argmin(effects[1])
    assert np.abs(effects[0] - effects[1]).max() < 0.3
