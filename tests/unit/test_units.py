"""A block that is off is a block whose weights are zero; searches run on blocks as on heads."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import shown
import tiny
from csloc_utils import search
from csloc_utils.assumptions import additivity, sparsity
from csloc_utils.errors import InputError
from csloc_utils.measure import Evaluator
from csloc_utils.models import HeadModel
from csloc_utils.units import UNITS, UnitEvaluator, find_mlps, unit_parameters

OPTIONS = dict(store=":memory:", progress=False, chunk=2)
# The matrix that writes what the MLP adds.
LAST = ("down_proj", "c_proj", "dense_4h_to_h", "fc2")


def zeroed(model, layer, mlp, attention):
    """A copy of a model whose blocks write nothing (but the attention's bias) in one layer."""
    made = copy.deepcopy(model.hf)
    twin = HeadModel(made, tiny.tokenizer(), model.name)
    with torch.no_grad():
        if mlp:
            block = find_mlps(twin)[layer]._module
            last = next((m for n, m in block.named_modules() if n in LAST), block)
            for parameter in last.parameters():
                parameter.zero_()
        if attention:
            twin.projections[layer]._module.weight.zero_()
    return twin


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_block_that_is_off_equals_zeroed_weights(name):
    model = tiny.head_model(name)
    task = shown.task(model, 8)
    for unit, mlp, attention in (
        ("mlp", True, False),
        ("attention", False, True),
        ("layer", True, True),
    ):
        measured = UnitEvaluator(model, task, unit=unit, **OPTIONS).measure(np.eye(3, dtype=bool))
        other = Evaluator(zeroed(model, 1, mlp, attention), task, **OPTIONS)
        np.testing.assert_allclose(
            measured.scores["logprob"][1], other.baseline["logprob"], atol=2e-4
        )
        assert (
            np.abs(measured.item_effects()).max(axis=1).min() > 1e-3
        )  # every block does something


@pytest.mark.parametrize("unit", UNITS)
def test_a_late_start_and_a_shared_prefix_change_nothing(unit, monkeypatch):
    """The last layer's mask begins at the last layer, after a prefix that was read once."""
    model = tiny.head_model("llama")
    task = shown.task(model, 8)
    starts = []
    forward = UnitEvaluator._forward

    def watched(self, *args, start=None, **options):
        starts.append(start and start[0])
        return forward(self, *args, start=start, **options)

    monkeypatch.setattr(UnitEvaluator, "_forward", watched)
    masks = np.array([[0, 0, 1], [1, 0, 1], [0, 1, 1]], bool)
    measured = UnitEvaluator(model, task, unit=unit, **OPTIONS | {"chunk": 1}).measure(masks)
    assert 2 in starts and None in starts
    whole = UnitEvaluator(model, task, unit=unit, **OPTIONS | {"chunk": 1})
    whole._encoded = replace(whole._encoded, prefix=0)
    whole._first_layer = lambda *_: 0
    np.testing.assert_allclose(measured.effects(), whole.measure(masks).effects(), atol=1e-5)


def test_all_heads_of_a_layer_are_its_attention_block():
    model = tiny.head_model("llama")
    task = shown.task(model, 8)
    blocks = UnitEvaluator(model, task, unit="attention", **OPTIONS).measure(np.eye(3, dtype=bool))
    heads = Evaluator(model, task, **OPTIONS).measure(np.repeat(np.eye(3, dtype=bool), 4, axis=1))
    np.testing.assert_allclose(blocks.item_effects(), heads.item_effects(), atol=2e-4)


def test_rows_keep_their_own_masks_and_the_empty_mask_changes_nothing():
    model = tiny.head_model("llama")
    made = UnitEvaluator(model, shown.task(model, 8), unit="layer", **OPTIONS)
    masks = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 1], [1, 1, 1]], bool)
    together, alone = made.measure(masks), []
    for mask in masks:
        one = UnitEvaluator(model, shown.task(model, 8), unit="layer", **OPTIONS)
        alone.append(one.measure(mask).effects()[0])
    np.testing.assert_allclose(together.effects(), alone, atol=1e-5)
    assert together.effects()[0] == 0


@pytest.mark.parametrize("unit", UNITS)
def test_searches_and_assumptions_run_on_blocks(unit):
    model = tiny.head_model("llama")
    made = UnitEvaluator(model, shown.task(model, 16), unit=unit, **OPTIONS)
    single = made.measure(made.grid.single_masks())
    best = UNITS[unit] + str(int(np.argmin(single.effects())))
    assert search.sweep(made, k=2).table[0]["head"] == best
    assert str(search.greedy(made, 2).found[0]) == best
    assert sparsity(single.item_effects(), single.facts, 1).top_share.value <= 1
    pair = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]], bool)
    assert len(additivity(pair, made.measure(pair).effects(), single.effects()))
    assert made.part(np.arange(3)).measure(pair).scores["logprob"].shape == (3, 3)


def test_measurements_are_kept_apart_by_unit(tmp_path):
    model = tiny.head_model("llama")
    options = OPTIONS | {"store": tmp_path / "store.sqlite"}
    effects = {
        unit: UnitEvaluator(model, shown.task(model, 8), unit=unit, **options)
        .measure(np.eye(3, dtype=bool))
        .effects()
        for unit in UNITS
    }
    assert not np.allclose(effects["mlp"], effects["attention"])
    again = UnitEvaluator(model, shown.task(model, 8), unit="mlp", **options)
    again._forward = None  # nothing is run again
    np.testing.assert_array_equal(again.measure(np.eye(3, dtype=bool)).effects(), effects["mlp"])


def test_what_does_not_exist_is_refused():
    model = tiny.head_model("llama")
    task = shown.task(model, 8)
    with pytest.raises(InputError, match="unknown unit"):
        UnitEvaluator(model, task, unit="neuron", **OPTIONS)
    with pytest.raises(InputError, match="zero ablation only"):
        UnitEvaluator(model, task, ablation="mean", **OPTIONS)
    with pytest.raises(InputError, match="no slopes"):
        UnitEvaluator(model, task, **OPTIONS).slopes(np.zeros((1, 3), bool))
    with pytest.raises(InputError, match="expected"):
        UnitEvaluator(model, task, **OPTIONS).measure(np.zeros((1, 12), bool))


def test_parameters_are_counted_once():
    model = tiny.head_model("llama")
    counted = unit_parameters(model)
    layer = model.hf.model.layers[0]
    assert counted["mlp"] == pytest.approx(sum(p.numel() for p in layer.mlp.parameters()) / 1e6)
    assert counted["head"] == pytest.approx(counted["attention"] / 4)
    assert counted["attention"] + counted["mlp"] < counted["layer"]
