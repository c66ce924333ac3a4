"""Head sets on every task: the tables, the comparison of lists, the figures and the command."""

from __future__ import annotations

import json

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

import shown
import tiny
from csloc_utils import cli, comparison_plots, mapping, models, plots
from csloc_utils.atlas import Atlas, atlas
from csloc_utils.errors import GateError, InputError
from csloc_utils.heads import Head, HeadGrid
from csloc_utils.intervals import bootstrap
from csloc_utils.measure import Evaluator
from csloc_utils.search import greedy, sweep
from csloc_utils.tasks import Item, Task
from csloc_utils.transfer import dose, halves, locate_all, overlap, rank_correlations, shares
from fakes import FakeEvaluator, small_grid, tail

GRID = small_grid()
OWN = {"times": Head(4, 4), "plus": Head(13, 4), "all": Head(1, 3)}
ALL = {GRID.flat(OWN["all"]): -1.0}


def judges(**options):
    """Two tasks with a head of their own, and one that has none; one head serves all three."""
    effects = {
        "times": {GRID.flat(OWN["times"]): -3.0} | ALL,
        "plus": {GRID.flat(OWN["plus"]): -2.0, GRID.flat(OWN["times"]): -0.5} | ALL,
        "text": ALL,
    }
    return {
        name: FakeEvaluator(GRID, given, seed=i, name=name, **options)
        for i, (name, given) in enumerate(effects.items())
    }


@pytest.fixture(scope="module")
def made():
    return atlas(judges(), {name: [head] for name, head in OWN.items()}, n_random=8, n_boot=200)


def test_a_drop_is_positive_for_damage_and_stands_in_its_cell(made):
    drops = pd.DataFrame(made.drops["logprob"], made.sets, made.tasks)
    expected = pd.DataFrame(
        [[3, 0.5, 0], [0, 2, 0], [1, 1, 1]], ["times", "plus", "all"], ["times", "plus", "text"]
    )
    np.testing.assert_allclose(drops, expected, atol=1e-12)
    assert made.own.tolist() == [[True, False, False], [False, True, False], [False] * 3]
    table = made.table().query("score == 'logprob'").set_index(["heads_of", "task"])
    cell = table.loc[("times", "plus")]
    assert cell["ablated"] == pytest.approx(cell["intact"] - 0.5) and not cell["own"]
    assert (table["drop"] >= table["low"] - 1e-9).all()
    assert (table["drop"] <= table["high"] + 1e-9).all()


def test_drops_are_paired_item_by_item(made):
    """The intact scores of items differ far more than their drops do."""
    judge = judges()["plus"]
    drops, facts = made.cell("logprob", made.sets.index("all"), made.tasks.index("plus"))
    np.testing.assert_allclose(drops, judge.sensitivity)
    np.testing.assert_array_equal(facts, judge.facts)


def test_intervals_are_bootstraps_over_facts():
    few = judges(n_items=24, items_per_fact=8)
    many = judges(n_items=24)
    sets = {"all": [OWN["all"]]}
    wide, narrow = (atlas(j, sets, n_random=0, n_boot=500) for j in (few, many))
    assert wide.n_facts == (3, 3, 3) and narrow.n_facts == (24, 24, 24)
    by_hand = bootstrap([(few["times"].sensitivity, few["times"].facts)], n_boot=500)
    assert (wide.low["logprob"][0, 0], wide.high["logprob"][0, 0]) == pytest.approx(
        (by_hand.low, by_hand.high)
    )
    assert not np.allclose(wide.low["logprob"], narrow.low["logprob"])


def test_random_sets_are_matched_by_layer_and_hold_none_of_the_heads(made):
    for name, head in OWN.items():
        assert len(made.random_heads[name]) == 8
        for (other,) in made.random_heads[name]:
            assert other.layer == head.layer and other != head
    # What they cost stands beside the set they belong to.
    for a, name in enumerate(made.sets):
        for draw, heads in enumerate(made.random_heads[name]):
            for b, judge in enumerate(judges().values()):
                cost = -judge.measure(GRID.mask(heads)[None]).effects()[0]
                assert made.random["logprob"][a, draw, b] == pytest.approx(cost)


def test_random_sets_do_not_depend_on_the_other_sets(made):
    alone = atlas(judges(), {"plus": [OWN["plus"]]}, n_random=8, n_boot=20)
    assert alone.random_heads["plus"] == made.random_heads["plus"]


def test_the_band_and_what_lies_in_it():
    rng = np.random.default_rng(0)
    layer = {GRID.flat(Head(4, i)): e for i, e in enumerate(-rng.uniform(0.1, 0.2, 9))}
    layer[GRID.flat(Head(4, 4))] = -3.0
    both = {"a": FakeEvaluator(GRID, layer), "b": FakeEvaluator(GRID, layer | {40: -0.15})}
    made = atlas(both, {"a": [Head(4, 4)]}, n_random=30, n_boot=20)
    low, high = made.band("logprob")
    draws = made.random["logprob"][0, :, 0]
    assert set(low[:, 0]) | set(high[:, 0]) <= set(draws) and low[0, 0] < high[0, 0]
    assert np.mean(draws > high[0, 0]) <= 0.05 and np.mean(draws < low[0, 0]) <= 0.05
    assert made.within("logprob").tolist() == [[False, True]]
    none = atlas(both, {"a": [Head(4, 4)]}, n_random=0, n_boot=20)
    assert np.isnan(none.band("logprob")).all() and not none.within("logprob").any()
    assert none.table()["beats"].isna().all()


def test_specificity_is_own_less_others(made):
    frame = made.specificity().query("score == 'logprob'").set_index("task")
    assert list(frame.index) == ["times", "plus"]
    assert frame.loc["times", "specific"] == pytest.approx(3 - (0.5 + 0) / 2)
    assert frame.loc["times", "low"] < frame.loc["times", "specific"] < frame.loc["times", "high"]
    one = {"times": judges()["times"]}
    assert atlas(one, {"times": [OWN["times"]]}, 0, n_boot=20).specificity().empty


def test_shares_of_the_own_damage(made):
    frame = shares(made).query("score == 'logprob'").set_index(["heads_of", "task"])
    assert set(frame.index) == {
        ("plus", "times"),
        ("all", "times"),
        ("times", "plus"),
        ("all", "plus"),
    }
    # Both drops are proportional to the same sensitivities, so a paired share does not vary.
    for pair, share in {
        ("times", "plus"): 0.25,
        ("all", "plus"): 0.5,
        ("all", "times"): 1 / 3,
    }.items():
        assert frame.loc[pair, ["share", "low", "high"]].tolist() == pytest.approx([share] * 3)
    harmless = atlas(judges(), {"times": [OWN["times"]], "text": [Head(9, 0)]}, 0, n_boot=50)
    frame = shares(harmless).set_index(["heads_of", "task", "score"])
    assert np.isnan(frame.loc[("times", "text", "logprob"), "share"])


def test_an_atlas_travels_through_json(made):
    again = Atlas.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made and again.table().equals(made.table())
    assert again.specificity().equals(made.specificity())
    empty = atlas(judges(), {"plus": [OWN["plus"]]}, n_random=0, n_boot=20)
    assert Atlas.from_dict(json.loads(json.dumps(empty.to_dict()))) == empty


def test_only_some_tasks(made):
    part = made.only(["text", "plus"])
    assert part.sets == ("plus",) and part.tasks == ("text", "plus")
    np.testing.assert_allclose(part.drops["logprob"], [[0, 2]], atol=1e-12)
    whole = made.table().set_index(["heads_of", "task", "score"])
    for row in part.table().itertuples():
        expected = whole.loc[(row.heads_of, row.task, row.score)]
        assert (row.low, row.high, row.random_high) == tuple(
            expected[["low", "high", "random_high"]]
        )
    assert Atlas.from_dict(part.to_dict()) == part
    specific = part.specificity().query("score == 'logprob'")["specific"]
    assert specific.tolist() == pytest.approx([2.0])
    for tasks in (["rhyme"], ["text"]):
        with pytest.raises(InputError):
            made.only(tasks)


BAD = [
    (dict(judges={}), "no task"),
    (dict(heads={}), "no head set"),
    (dict(heads={"a": []}), "no head given"),
    (dict(heads={"a": [Head(1, 1), Head(1, 1)]}), "twice"),
    (dict(heads={"a": [Head(99, 0)]}), "99"),
    (dict(heads={"a": GRID.heads[:136]}), "leave no"),
    (dict(n_random=-1), "n_random"),
    (dict(seed=-1), "seed"),
    (dict(n_boot=1), "n_boot"),
    (dict(confidence=1.0), "confidence"),
    (
        dict(judges=judges() | {"b": FakeEvaluator(HeadGrid(2, 2, 1, 8), {})}),
        "another model",
    ),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_bad_input_measures_nothing(given, message):
    options = dict(judges=judges(), heads={"times": [OWN["times"]]}) | given
    with pytest.raises(InputError, match=message):
        atlas(**options)
    assert not any(judge.n_measured for judge in options["judges"].values())


def test_unknown_score(made):
    with pytest.raises(InputError, match="bleu"):
        made.band("bleu")


def test_dose_adds_heads_in_order():
    order = [OWN["times"], OWN["all"], OWN["plus"]]
    frame = dose(judges(), order, sizes=[0, 3, 1, 2, 1], n_boot=50)
    drops = frame.query("score == 'logprob'").pivot(index="size", columns="task", values="drop")
    assert list(drops.index) == [0, 1, 2, 3]
    np.testing.assert_allclose(drops["times"], [0, 3, 4, 4], atol=1e-12)
    np.testing.assert_allclose(drops["text"], [0, 0, 1, 1], atol=1e-12)
    row = frame.query("task == 'plus' and size == 2 and score == 'logprob'").iloc[0]
    assert row["heads"] == "L4H4,L1H3" and row["low"] < row["drop"] < row["high"]
    assert row["ablated"] == pytest.approx(row["intact"] - row["drop"])
    assert dose(judges(), order, n_boot=20)["size"].unique().tolist() == [1, 2, 3]
    for sizes in ([], [4], [-1]):
        with pytest.raises(InputError):
            dose(judges(), order, sizes)


def test_overlap_counts_shared_heads_and_what_chance_gives():
    lists = {"a": GRID.heads[:5], "b": GRID.heads[3:8], "c": GRID.heads[50:60]}
    frame = overlap(lists, GRID.size).set_index(["a", "b"])
    assert list(frame.index) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert frame.loc[("a", "b"), ["shared", "jaccard"]].tolist() == [2, 2 / 8]
    assert frame.loc[("a", "c"), ["shared", "jaccard", "p_value"]].tolist() == [0, 0, 1]
    assert frame.loc[("a", "c"), "expected_shared"] == pytest.approx(5 * 10 / 270)
    rng = np.random.default_rng(0)
    by_lot = [len(set(rng.permutation(270)[:5]) & set(range(5))) >= 2 for _ in range(20000)]
    assert frame.loc[("a", "b"), "p_value"] == pytest.approx(np.mean(by_lot), abs=0.002)
    for bad in ({"a": []}, {"a": GRID.heads[:2]}, {"a": GRID.heads[:2], "b": [Head(0, 0)] * 2}):
        with pytest.raises(InputError):
            overlap(bad, GRID.size)


def test_rank_correlations():
    x = np.arange(10.0)
    x[3] = np.nan
    frame = rank_correlations({"x": x, "cube": -(np.arange(10.0) ** 3), "flat": np.ones(10)})
    assert frame["rho"].round(9).tolist()[:1] == [-1] and frame["rho"].isna().tolist() == [
        False,
        True,
        True,
    ]
    assert frame["n_heads"].tolist() == [9, 9, 10]
    for bad in ({"x": x}, {"x": x, "y": x[:4]}, {"x": x, "y": np.full(10, np.nan)}):
        with pytest.raises(InputError):
            rank_correlations(bad)


def test_halves_say_whether_a_sweep_repeats_itself():
    clear = FakeEvaluator(GRID, tail(GRID))
    noisy = FakeEvaluator(GRID, tail(GRID, {}, scale=0.001), noise=1.0)
    good, bad = (halves(sweep(e).extra["measurements"], n_draws=6, seed=3) for e in (clear, noisy))
    assert (
        (good["shared"] == 5).all() and (good["jaccard"] == 1).all() and (good["rho"] > 0.99).all()
    )
    assert (bad["shared"] < 5).all() and (bad["rho"].abs() < 0.4).all()
    # Halves hold different facts: all items of one fact stay together.
    single = FakeEvaluator(GRID, tail(GRID), n_items=4, items_per_fact=4)
    with pytest.raises(InputError, match="one fact"):
        halves(sweep(single).extra["measurements"])
    with pytest.raises(InputError, match="no sweep"):
        halves(greedy(clear, 2).extra["rounds"][1])


@pytest.fixture
def style():
    with plt.rc_context():
        plots.set_style()
        yield
    plt.close("all")


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_atlas_map_frames_own_cells_and_brackets_what_random_heads_cost(made, style):
    ax = comparison_plots.atlas_map(made)
    assert [p.get_xy() for p in ax.patches] == [(0, 0), (1, 1)]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["times", "plus", "all"]
    assert texts(ax) == ["3.0", "0.5", "(0.0)", "(0.0)", "2.0", "(0.0)", "1.0", "1.0", "1.0"]
    bold = [text.get_text() for text in ax.texts if text.get_fontweight() == "bold"]
    assert bold == ["3.0", "0.5", "2.0", "1.0", "1.0", "1.0"]
    assert "nats" in ax.get_xlabel() and ax.get_title() == ""
    points = comparison_plots.atlas_map(made, "accuracy", ax=plt.subplots()[1])
    assert "points" in points.get_xlabel() and "100" in texts(points)
    with pytest.raises(InputError):
        comparison_plots.atlas_map(made, "bleu")


def test_overlap_map_is_a_triangle(style):
    lists = {"a": GRID.heads[:5], "b": GRID.heads[3:8], "c": GRID.heads[50:60]}
    pairs = overlap(lists, GRID.size)
    ax = comparison_plots.overlap_map(pairs)
    assert texts(ax) == ["0.25", "", "0.00", "0.00"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["b", "c"]
    assert texts(comparison_plots.overlap_map(pairs, "shared")) == ["2", "", "0", "0"]
    with pytest.raises(InputError, match="rho"):
        comparison_plots.overlap_map(pairs, "rho")
    with pytest.raises(InputError, match="no rows"):
        comparison_plots.overlap_map(pairs.iloc[:0])


def test_dose_curves_have_one_line_a_task(style):
    frame = dose(judges(), [OWN["times"], OWN["plus"]], n_boot=50)
    ax = comparison_plots.dose_curves(frame[frame["score"] == "logprob"], "plus")
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["plus (its own heads)", "times", "text"]
    line = ax.containers[1].lines[0]
    np.testing.assert_allclose(line.get_ydata(), [3, 3])
    for bad, target in ((frame, "plus"), (frame[frame["score"] == "accuracy"], "rhyme")):
        with pytest.raises(InputError):
            comparison_plots.dose_curves(bad, target)


# On a model: a tiny one, on questions that it masters because the answers are its own.


def mastered(model, name, part):
    prompts = shown.questions(60)[part]
    items = [Item(p, (a,)) for p, a in zip(prompts, shown.own_answers(model, prompts), strict=True)]
    half = len(items) // 2
    return Task(name, name, "continuation", shown.PREFIX, items[:half], items[half:], 0)


def wrong(task):
    answers = np.random.default_rng(0).permutation([i.answers[0] for i in task.locate])
    items = [Item(i.prompt, (str(a),)) for i, a in zip(task.locate, answers, strict=True)]
    return Task("wrong", "wrong", "continuation", shown.PREFIX, items, task.verify[:8], 0)


@pytest.fixture(scope="module")
def model():
    return tiny.head_model("llama")


@pytest.fixture(scope="module")
def tasks(model):
    one, two = mastered(model, "one", slice(0, 32)), mastered(model, "two", slice(32, 60))
    return [one, wrong(one), two]


def test_a_survey_locates_and_verifies_on_disjoint_items(model, tasks):
    told = []
    result = mapping.survey(
        model,
        tasks,
        k=2,
        n_random=3,
        n_items=6,
        n_verify=10,
        report=lambda survey, name: told.append((name, name in survey.found)),
        store=":memory:",
        progress=False,
    )
    assert told == [("one", True), ("wrong", False), ("two", True)]
    assert result.left_out == ["wrong"] and result.atlas.tasks == ("one", "two")
    assert result.atlas.sets == ("one", "two") and result.atlas.n_items == (10, 10)
    for task in (tasks[0], tasks[2]):
        used = {item.prompt for item in result.judges[task.name].items}
        assert used <= {item.prompt for item in task.verify}
        assert used.isdisjoint(item.prompt for item in task.locate)
        locator = {task.name: Evaluator(model, task, n_items=6, store=":memory:", progress=False)}
        assert locate_all(locator, 2)[task.name].found == result.found[task.name].found
        assert result.found[task.name].evaluations["equivalents"] == 17
    judge = result.judges["two"]
    drop = -judge.measure(model.grid.mask(result.found["one"].found)[None]).effects()[0]
    assert result.atlas.drops["logprob"][0, 1] == pytest.approx(drop)
    report = json.loads(json.dumps(mapping.survey_report(result, model, "command")))
    assert Atlas.from_dict(report["atlas"]) == result.atlas
    assert report["gates"]["wrong"]["passed"] is False and list(report["found"]) == ["one", "two"]
    with pytest.raises(GateError, match="one of one, wrong"):
        mapping.survey(model, tasks[:2], 1, 0, 6, 6, store=":memory:", progress=False)


@pytest.fixture(scope="module")
def folder(model, tasks, tmp_path_factory):
    path = tmp_path_factory.mktemp("atlas")
    tiny.hf_model("llama").save_pretrained(path / "model")
    model.tokenizer.save_pretrained(path / "model")
    for task in tasks:
        lines = [{"task": {"name": task.name, "prefix": shown.PREFIX}}] + [
            {"prompt": item.prompt, "answer": item.answers[0], "split": split}
            for split in ("locate", "verify")
            for item in getattr(task, split)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (path / f"{task.name}.jsonl").write_text(text)
    (path / "copy.jsonl").write_text((path / "two.jsonl").read_text())
    return path


@pytest.fixture
def run(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CSLOC_CACHE", str(tmp_path / "cache"))

    def call(line):
        status = cli.main(line.split())
        return status, *capsys.readouterr()

    return call


ATLAS = "atlas --model model --k 2 --random 3 --items 6 --dtype float32 --quiet"


def test_the_command(run, tmp_path, monkeypatch):
    out, drawn = tmp_path / "out.json", tmp_path / "map.png"
    line = f"{ATLAS} --tasks one.jsonl,wrong.jsonl,two.jsonl --json {out} --out {drawn}"
    status, text, errors = run(line)
    assert status == 0 and errors == ""
    report = json.loads(out.read_text())
    made = Atlas.from_dict(report["atlas"])
    assert made.tasks == ("one", "two") and made.settings["n_random"] == 3
    assert made.n_items == (16, 14)  # fewer than asked for
    assert report["command"].startswith("csloc atlas") and report["model"]["dtype"] == "float32"
    assert {"torch", "transformers", "weights"} <= set(report["model"]) and report["csloc"]
    cell = f"{round(100 * made.drops['accuracy'][0, 1])} ["
    assert "wrong (" in text and "left out" in text and cell in text
    assert ", ".join(map(str, made.heads["two"])) in text and "specific damage" in text
    assert drawn.read_bytes().startswith(b"\x89PNG")

    def only_gate(self, masks, base):
        assert not masks.any(), "ran a stored mask"
        return score(self, masks, base)

    score = Evaluator._score
    monkeypatch.setattr(Evaluator, "_score", only_gate)
    assert run(line)[0] == 0
    again = json.loads(out.read_text())
    assert again["atlas"]["drops"] == report["atlas"]["drops"]


def test_too_few_capabilities(run, tmp_path):
    out = tmp_path / "out.json"
    status, _, errors = run(f"{ATLAS} --tasks one.jsonl,wrong.jsonl --json {out}")
    assert status == 1 and "two or more" in errors and errors.count("\n") == 1
    report = json.loads(out.read_text())
    assert list(report["found"]) == ["one"] and "atlas" not in report


BAD_LINES = [
    ("", "--tasks"),
    ("--tasks one.jsonl", "two or more"),
    ("--tasks none", "two or more"),
    ("--tasks one.jsonl,no-such-task", "unknown task"),
    ("--tasks one.jsonl,missing.jsonl", "no such file"),
    ("--tasks one.jsonl,one.jsonl", "each task once"),
    ("--tasks two.jsonl,copy.jsonl", "each task once"),
    ("--tasks one.jsonl,lm-eval:piqa", "csloc locate"),
    ("--tasks one.jsonl,two.jsonl --k 0", "k is 0"),
    ("--tasks one.jsonl,two.jsonl --k 7", "more than half"),
    ("--tasks one.jsonl,two.jsonl --random -1", "random"),
    ("--tasks one.jsonl,two.jsonl --items 0", "items"),
    ("--tasks one.jsonl,two.jsonl --verify-items 0", "items"),
    ("--tasks one.jsonl,two.jsonl --score bleu", "unknown score"),
    ("--tasks one.jsonl,two.jsonl --seed -1", "seed"),
    ("--tasks one.jsonl,two.jsonl --out map.txt", "a kind of picture"),
    ("--tasks one.jsonl,two.jsonl --out no/such/map.png", "no folder"),
    ("--tasks one.jsonl,two.jsonl --json model", "it is a folder"),
    ("--tasks one.jsonl,two.jsonl --dtype int3", "unknown dtype"),
]


@pytest.mark.parametrize(("options", "message"), BAD_LINES)
def test_bad_input_is_one_line_before_the_weights_load(run, monkeypatch, options, message):
    monkeypatch.setattr(
        models.transformers.AutoModelForCausalLM,
        "from_pretrained",
        lambda *a, **k: pytest.fail("loaded the weights"),
    )
    status, _, errors = run(f"atlas --model model {options}")
    assert status == 2
    assert errors.startswith("csloc: error: ") and errors.count("\n") == 1
    assert message in errors and "Traceback" not in errors
