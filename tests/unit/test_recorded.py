"""A record answers as the evaluator did, says what it lacks, and is caught when it is wrong."""

import numpy as np
import pytest

import shown
import tiny
from csloc_utils import recorded as module
from csloc_utils.errors import InputError
from csloc_utils.measure import Evaluator
from csloc_utils.recorded import (
    RecordedEvaluator,
    record,
    recorded_json,
    recorded_tasks,
    spot_check,
)
from csloc_utils.search import greedy


def evaluator(**options):
    model = tiny.head_model("llama")
    return Evaluator(model, shown.task(model, 16), store=":memory:", progress=False, **options)


@pytest.fixture
def recorded(tmp_path):
    live = evaluator()
    greedy(live, 2)
    live.slopes(live.grid.single_masks()[:1], 0.75)
    assert record(live, tmp_path / "model" / "r.npz", "csloc …") == 12 + 11 + 1
    return RecordedEvaluator(tmp_path / "model" / "r.npz")


def test_searches_run_on_a_record_as_on_the_model(recorded):
    live, again = greedy(evaluator(), 2), greedy(recorded, 2)
    assert again.found == live.found and again.evaluations == live.evaluations
    for a, b in zip(again.table, live.table, strict=True):
        assert a["joint_effect"] == pytest.approx(b["joint_effect"], abs=1e-5)
    mask = recorded.grid.single_masks()[:1]
    assert np.allclose(recorded.slopes(mask, 0.75).effects, evaluator().slopes(mask, 0.75).effects)
    assert recorded.evaluations["equivalents"] == 12 + 11 + 3
    assert recorded.provenance["command"] == "csloc …"


def test_what_is_not_on_record_is_said(recorded):
    everything = np.ones((1, recorded.grid.size), bool)
    with pytest.raises(InputError, match="1 of 1 masks of shown are not on record"):
        recorded.measure(everything)
    with pytest.raises(InputError, match="not on record"):
        recorded.slopes(everything, 1.0)


def test_a_spot_check_tells_right_records_from_wrong_ones(recorded):
    check = spot_check(recorded, evaluator(), 5, seed=1).require()
    assert check.passed and check.largest < 1e-4 and len(check.masks) == 5
    recorded._scores["logprob"] += np.linspace(0, 1, len(recorded.masks))[:, None]
    with pytest.raises(InputError, match="differ by up to"):
        spot_check(recorded, evaluator(), 5, seed=1).require()
    with pytest.raises(InputError, match="other heads or items"):
        spot_check(recorded, evaluator(n_items=4))


def test_files_that_are_no_records(tmp_path):
    for content in (None, b"text"):
        path = tmp_path / "x.npz"
        if content:
            path.write_bytes(content)
        with pytest.raises(InputError, match="no record of measurements"):
            RecordedEvaluator(path)
    with pytest.raises(InputError, match="missing"):
        RecordedEvaluator("no-model/no-task")


def test_records_that_come_with_the_package():
    assert recorded_tasks("no-model") == []
    assert "multiplication" in recorded_tasks("smollm2-135m-q4")
    shipped = RecordedEvaluator("smollm2-135m-q4/multiplication")
    assert shipped.grid.shape == (30, 9) and len(shipped.items) == 24
    assert shipped.provenance["model"]["dtype"] == "float32"
    assert "record.py" in shipped.provenance["command"]
    assert greedy(shipped, 5).table[-1]["joint_effect"] < -5


def test_a_record_of_another_kind_is_read_or_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "data_path", lambda *parts: tmp_path.joinpath(*parts))
    (tmp_path / "recorded" / "m").mkdir(parents=True)
    (tmp_path / "recorded" / "m" / "atlas.json").write_text('{"k": "×"}', "utf8")
    assert recorded_json("m", "atlas") == {"k": "×"}
    monkeypatch.undo()
    assert recorded_json("no-such-model", "atlas") is None
