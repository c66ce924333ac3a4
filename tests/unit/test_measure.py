"""Measuring: paired, stored, resumed, the same in any chunk."""

import gc

import numpy as np
import psutil
import pytest
import torch

import shown
import tiny
from csloc_utils import measure as measuring
from csloc_utils.ablation import masked_logits
from csloc_utils.errors import InputError
from csloc_utils.heads import Head
from csloc_utils.measure import Evaluator, Measurements
from csloc_utils.store import Store


@pytest.fixture(scope="module")
def model():
    return tiny.head_model("llama")


@pytest.fixture(scope="module")
def task(model):
    return shown.task(model)


def some_masks(model, n=7, seed=0):
    return np.random.default_rng(seed).random((n, model.grid.size)) < 0.25


def evaluator(model, task, **options):
    return Evaluator(model, task, **{"store": ":memory:", "progress": False, **options})


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mistral", "opt", "falcon"])
def test_scores_equal_whole_texts_scored_one_by_one(name):
    """Public reports: transformers #32929, #32159 (a prefix cache that is used again changes)."""
    model = tiny.head_model(name)
    a_task = shown.task(model, 8)
    masks = some_masks(model, 3)
    got = evaluator(model, a_task).measure(masks)
    for m, mask in enumerate(masks):
        for i, item in enumerate(a_task.locate):
            ids = model.tokenizer(a_task.join(item, item.answers[0]), return_tensors="pt").input_ids
            logits = masked_logits(model, ids[:, :-1], masks=mask[None])[0, -1]
            wanted = logits.log_softmax(-1)[ids[0, -1]]
            assert got.scores["logprob"][m, i] == pytest.approx(float(wanted), abs=1e-4)
            assert got.scores["accuracy"][m, i] == (logits.argmax() == ids[0, -1])


def test_effect_is_ablated_minus_intact_on_the_same_items(model, task):
    got = evaluator(model, task).measure(some_masks(model))
    assert set(got.baseline["accuracy"]) == {1.0}  # the answers are the model's own
    effects = got.scores["logprob"] - got.baseline["logprob"]
    assert np.allclose(got.item_effects(), effects, atol=1e-6)
    assert np.allclose(got.effects(), effects.mean(1), atol=1e-6)
    # Losing heads can only take a perfect accuracy down.
    assert (got.effects("accuracy") <= 0).all() and got.effects("accuracy").min() < 0


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_starting_at_the_first_ablated_layer_changes_no_bit(name, monkeypatch):
    model = tiny.head_model(name)
    assert model.can_start_late == (not name.startswith("falcon"))  # their layers return tuples
    a_task = shown.task(model, 16)
    masks = model.grid.single_masks()
    late = evaluator(model, a_task, chunk=3).measure(masks)
    monkeypatch.setattr(Evaluator, "_first_layer", lambda self, masks, base: 0)
    whole = evaluator(model, a_task, chunk=3).measure(masks)
    assert (late.scores["logprob"] == whole.scores["logprob"]).all()


@pytest.mark.parametrize("ablation", ["zero", "mean", "resample"])
def test_starting_from_heads_that_all_masks_share_changes_no_bit(ablation, monkeypatch):
    model = tiny.head_model("llama")
    a_task = shown.task(model, 16)
    shared = model.grid.mask([Head(0, 1), Head(1, 2)])
    masks = shared | model.grid.single_masks()[~shared]
    late = evaluator(model, a_task, chunk=3, ablation=ablation).measure(masks)
    monkeypatch.setattr(Evaluator, "_first_layer", lambda self, masks, base: 0)
    whole = evaluator(model, a_task, chunk=3, ablation=ablation).measure(masks)
    assert (late.scores["logprob"] == whole.scores["logprob"]).all()


def test_empty_mask_has_no_effect_at_all(model, task):
    got = evaluator(model, task).measure(np.vstack([some_masks(model, 2), model.grid.mask([])]))
    assert (got.item_effects()[-1] == 0).all()


@pytest.mark.parametrize("chunk", [1, 2, 3, 8])
def test_chunk_shape_and_order_of_masks_change_nothing_that_matters(model, task, chunk):
    """Public reports: lm-evaluation-harness #1645, #3055, #704 (scores depend on batch size)."""
    masks = some_masks(model)
    wanted = evaluator(model, task, chunk=4).measure(masks).scores["logprob"]
    got = evaluator(model, task, chunk=chunk).measure(masks[::-1]).scores["logprob"]
    assert np.allclose(got[::-1], wanted, atol=1e-4)


def test_what_is_stored_is_not_run_again(model, task, tmp_path, monkeypatch):
    masks = some_masks(model)
    first = evaluator(model, task, store=tmp_path / "s.sqlite").measure(masks)
    monkeypatch.setattr(Evaluator, "_score", lambda *a: pytest.fail("ran a stored mask"))
    again = evaluator(model, task, store=tmp_path / "s.sqlite")
    got = again.measure(masks)
    assert (got.scores["logprob"] == first.scores["logprob"]).all()
    assert again.evaluations == {"forward": 7, "backward": 0, "equivalents": 7}


def test_killed_run_resumes_with_the_same_numbers(model, task, tmp_path, monkeypatch):
    masks, score, calls = some_masks(model), Evaluator._score, []
    whole = evaluator(model, task, chunk=2).measure(masks)

    def dies(self, part, base):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(len(part))
        return score(self, part, base)

    monkeypatch.setattr(Evaluator, "_score", dies)
    store = tmp_path / "s.sqlite"
    with pytest.raises(KeyboardInterrupt):
        evaluator(model, task, chunk=2, store=store).measure(masks)
    assert len(Store(store)) == 3  # the intact model has a chunk to itself
    monkeypatch.setattr(Evaluator, "_score", score)
    resumed = evaluator(model, task, store=store)
    assert resumed.chunk == 2  # as recorded
    got = resumed.measure(masks)
    for name in whole.scores:
        assert (got.scores[name] == whole.scores[name]).all()
        assert (got.intact[name] == whole.intact[name]).all()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), RuntimeError("not enough memory")])
def test_chunk_is_halved_when_memory_runs_out(model, task, tmp_path, monkeypatch, error):
    masks, score = some_masks(model, 9), Evaluator._score
    wanted = evaluator(model, task).measure(masks)

    def too_much(self, part, base):
        if self.chunk > 2:
            raise error
        return score(self, part, base)

    first = evaluator(model, task, chunk=8, store=tmp_path / "s.sqlite")
    first.measure(masks[:3])  # measured in the large chunk, and kept
    monkeypatch.setattr(Evaluator, "_score", too_much)
    got = first.measure(masks)
    assert first.chunk == 2
    assert np.allclose(got.item_effects(), wanted.item_effects(), atol=1e-5)
    assert got.provenance["chunks"] == [2, 8]
    monkeypatch.setattr(Evaluator, "_score", score)


def test_one_mask_that_does_not_fit_is_a_clear_error(model, task, monkeypatch):
    def never(self, part, base):
        raise torch.OutOfMemoryError("x")

    monkeypatch.setattr(Evaluator, "_score", never)
    with pytest.raises(InputError, match="use fewer items"):
        evaluator(model, task, chunk=4).measure(some_masks(model))


def test_other_errors_are_not_taken_for_lack_of_memory(model, task, monkeypatch):
    def broken(self, part, base):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(Evaluator, "_score", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        evaluator(model, task).measure(some_masks(model))


def test_other_models_items_and_ablations_do_not_share_measurements(model, task, tmp_path):
    store = Store(tmp_path / "s.sqlite")
    masks = some_masks(model, 2)
    runs = [
        evaluator(model, task, store=store),
        evaluator(model, task, store=store, n_items=5),
        evaluator(model, task, store=store, split="verify"),
        evaluator(model, task, store=store, ablation="mean"),
        evaluator(model, task, store=store, ablation="resample"),
        evaluator(tiny.head_model("llama", "eager"), task, store=store),
    ]
    for run in runs:
        run.measure(masks)
    assert len(store) == len(runs) * 3  # two masks and the intact model


def test_mean_and_resample_ablation(model, task):
    masks = model.grid.single_masks()
    effects = {
        kind: evaluator(model, task, ablation=kind).measure(masks).effects()
        for kind in ("zero", "mean", "resample")
    }
    assert len({tuple(e.round(6)) for e in effects.values()}) == 3
    assert all(np.isfinite(e).all() for e in effects.values())


def test_mean_ablation_puts_the_mean_in_place(model, task):
    """The mean over the tokens of the locate items, computed here without the package's cache."""
    from csloc_utils.ablation import Ablation, forward
    from csloc_utils.references import token_means

    rows = [model.tokenizer(task.join(i, i.answers[0])).input_ids[:-1] for i in task.locate]
    shared = next(n for n in range(99) if len({tuple(r[: n + 1]) for r in rows}) > 1)
    seen = [[] for _ in range(model.grid.n_layers)]
    for row in rows:
        run = forward(model, torch.tensor([row]), torch.ones(1, len(row)).long(), keep_values=True)
        for layer, values in enumerate(run.head_values):
            seen[layer].append(values[0, shared:])
    wanted = [torch.cat(values).mean(0) for values in seen]
    got = token_means(model, task)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, wanted, strict=True))
    head, ids = Head(1, 2), torch.tensor([rows[0]])
    mask = model.grid.mask([head])
    off = masked_logits(model, ids, masks=mask[None], ablation=Ablation(wanted))[0, -1]
    answer = model.tokenizer(task.locate[0].answers[0]).input_ids[-1]
    measured = evaluator(model, task, ablation="mean").measure(mask)
    assert measured.scores["logprob"][0, 0] == pytest.approx(
        float(off.log_softmax(-1)[answer]), abs=1e-4
    )


def test_resample_needs_another_item(model, task):
    with pytest.raises(InputError, match="two or more"):
        evaluator(model, task, n_items=1, ablation="resample")


def test_counts(model, task):
    run = evaluator(model, task)
    run.measure(some_masks(model, 4))
    run.measure(some_masks(model, 4))
    run.measure(some_masks(model, 2), count=False)
    assert run.evaluations == {"forward": 8, "backward": 0, "equivalents": 8}
    assert run.baseline["logprob"].shape == (20,) and run.evaluations["forward"] == 9


def test_frame_round_trip(model, task):
    got = evaluator(model, task).measure(np.vstack([some_masks(model, 3), model.grid.mask([])]))
    frame = got.frame()
    assert len(frame) == 4 * 20
    assert list(frame.columns[:4]) == ["mask", "heads", "item", "fact"]
    back = Measurements.from_frame(frame, model.grid)
    assert (back.masks == got.masks).all() and (back.facts == got.facts).all()
    assert np.allclose(back.item_effects(), got.item_effects())
    assert frame.attrs["provenance"]["model"]["weights"] == model.fingerprint["weights"]


def test_items_are_a_seeded_sample_not_the_first(model, task):
    """Public report: lm-evaluation-harness #2598 (``--limit`` takes the first items)."""
    prompts = [i.prompt for i in evaluator(model, task, n_items=5).items]
    assert prompts != [i.prompt for i in task.locate[:5]]
    assert prompts == [i.prompt for i in evaluator(model, task, n_items=5).items]
    other = {i.prompt for i in evaluator(model, task, split="verify").items}
    assert not other & set(prompts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(ablation="noise"), "unknown ablation"),
        (dict(chunk=0), "chunk is 0"),
        (dict(split="test"), "unknown split"),
        (dict(n_items=0), "0"),
        (dict(n_items=21), "21"),
    ],
)
def test_bad_options(model, task, options, message):
    with pytest.raises(InputError, match=message):
        evaluator(model, task, **options)


def test_masks_of_another_model_are_refused(model, task):
    with pytest.raises(InputError, match="one column per head"):
        evaluator(model, task).measure(np.zeros((1, 13), bool))


def test_memory_stays_flat(model, task):
    """Public reports: ndif-team/nnsight #396, #389, #538 (memory grows with every trace)."""
    run = evaluator(model, task, chunk=4)
    run.measure(some_masks(model, 40))
    gc.collect()
    before = psutil.Process().memory_info().rss
    run.measure(some_masks(model, 80, seed=1))
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 50e6


def test_chunk_fits_memory(model, task, monkeypatch):
    class Little:
        available = 1

    run = evaluator(model, task)
    assert run._fitting_chunk() >= 1
    monkeypatch.setattr(measuring.psutil, "virtual_memory", lambda: Little)
    assert run._fitting_chunk() == 1
