"""Slopes along keep-strengths: against finite differences, and against the scores they derive."""

import numpy as np
import pytest
import torch

import shown
import tiny
from csloc_utils.errors import InputError
from csloc_utils.gradients import _run, mean_score
from csloc_utils.measure import Evaluator
from csloc_utils.scoring import combine, probe_logits
from csloc_utils.tasks import Item, Task


def evaluator(model, task, **options):
    return Evaluator(model, task, store=":memory:", progress=False, **options)


def tasks(model):
    prompts = shown.questions(6)
    answers = shown.own_answers(model, prompts)
    two = [Item(p, (f"{a} 7", "8")) for p, a in zip(prompts, answers, strict=True)]
    choice = [Item(p, choices=("A", "B 5", "3"), correct=i % 3) for i, p in enumerate(prompts)]
    texts = [Item(p, (f"{a} 5 6",)) for p, a in zip(prompts, answers, strict=True)]
    rules = {"continuation": two, "choice": choice, "text": texts}
    return [Task(k, k, k, "1 = 2\n", v[:3], v[3:], 0) for k, v in rules.items()]


def score_at(run, keep, score, ablations):
    """The mean score at keep-strengths, in whole rows without a prefix cache."""
    encoded = run._encoded
    rows = [torch.tensor(row) for row in encoded.rows]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    attention = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in rows], True)
    places = torch.from_numpy(encoded.positions)
    with torch.no_grad():
        logits = _run(run.model, ids, attention, keep, ablations[1], places, None)[0]
        return float(mean_score(encoded, logits, score))


@pytest.mark.parametrize("score", ["logprob", "margin"])
@pytest.mark.parametrize("rule", range(3))
def test_differentiable_scores_are_the_scores(rule, score):
    model = tiny.head_model("llama")
    run = evaluator(model, tasks(model)[rule])
    keep = torch.ones(model.grid.size)
    assert score_at(run, keep, score, run._ablations) == pytest.approx(
        run.baseline[score].mean(), abs=1e-5
    )


@pytest.mark.parametrize("ablation", ["zero", "mean"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "neox", "gemma2", "qwen3"])
def test_slopes_are_those_of_finite_differences(name, ablation):
    model = tiny.head_model(name)
    run = evaluator(model, shown.task(model, 12), ablation=ablation)
    mask = model.grid.mask([model.grid.head(2)])
    got = run.slopes(mask[None], strength=0.8).effects[0]
    for head in (0, 2, 7, 11):
        keep = torch.where(torch.from_numpy(mask), 0.0, 0.8).double()
        step = torch.zeros_like(keep)
        step[head] = 0.02
        values = [
            score_at(run, (keep + s).float(), "logprob", run._ablations) for s in (step, -step)
        ]
        assert -got[head] == pytest.approx((values[0] - values[1]) / 0.04, abs=2e-2, rel=0.05)


def test_slopes_go_with_single_effects():
    model = tiny.head_model("llama")
    run = evaluator(model, shown.task(model))
    single = run.measure(model.grid.single_masks()).effects()
    guess = run.slopes(np.zeros((1, model.grid.size), bool)).effects[0]
    assert np.corrcoef(single, guess)[0, 1] > 0.5


def test_a_pass_counts_three_and_is_stored(tmp_path, monkeypatch):
    model = tiny.head_model("llama")
    masks = model.grid.single_masks()[:2]
    run = evaluator(model, shown.task(model))
    run.store = store = type(run.store)(tmp_path / "s.sqlite")
    run._context = store.context(run._key(), run.scores)
    first = run.slopes(masks, 0.5).effects
    assert run.evaluations == {"forward": 2, "backward": 2, "equivalents": 6}
    monkeypatch.setattr("csloc_utils.measure.score_slopes", lambda *a: pytest.fail("ran again"))
    assert (run.slopes(masks, 0.5).effects == first).all()
    with pytest.raises(BaseException, match="ran again"):
        run.slopes(masks, 0.75)


def test_scores_without_a_slope_are_refused():
    model = tiny.head_model("llama")
    run = evaluator(model, shown.task(model))
    with pytest.raises(InputError, match="no gradient"):
        run.slopes(np.zeros((1, model.grid.size), bool), score="accuracy")
    with pytest.raises(InputError, match="from 0 to 1"):
        run.slopes(np.zeros((1, model.grid.size), bool), strength=1.5)


def test_the_margin_is_positive_exactly_where_greedy_decoding_writes_the_answer():
    model = tiny.head_model("llama")
    for task in tasks(model):
        run = evaluator(model, task)
        measured = run.measure(model.grid.single_masks())
        margin, accuracy = measured.scores["margin"], measured.scores["accuracy"]
        if task.scoring != "text":
            assert ((margin > 0) == (accuracy > 0.5)).all()


def test_a_tie_that_greedy_decoding_wins_counts_as_written():
    model = tiny.head_model("llama")
    encoded = evaluator(model, shown.task(model, 4))._encoded
    logits = torch.zeros(len(encoded.rows), encoded.positions.shape[1], len(tiny.WORDS))
    written = logits.argmax(-1)[0, 0]
    _, margin = probe_logits(encoded, logits)
    assert ((margin[0] > 0) == (encoded.probes[:, 2] == int(written))).all()
    assert combine(encoded, *probe_logits(encoded, logits))["accuracy"].max() <= 1
