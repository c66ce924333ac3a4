"""The yardstick on made-up cases with known answers, and on what is recorded."""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from csloc_utils import plots, yardstick
from csloc_utils.errors import InputError
from csloc_utils.tasks import data_path

ROOT = Path(__file__).resolve().parents[2]
FACTS = [f"f{i}" for i in range(10)]


def case(task, method, damage, budget=41, seed=0, control=0.0, heads=("L0H0",)):
    drops = {s: [damage] * 10 for s in ("logprob", "accuracy", "probability")}
    controls = {"c": dict.fromkeys(drops, control)}
    return dict(model="m", task=task, seed=seed, method=method, budget=budget, seconds=1.0,
                equivalents=budget, heads=list(heads), drops=drops, controls=controls)  # fmt: skip


def band(task, most):
    return dict(
        model="m", task=task, seed=0, method="random", budget=0, mean_drops=[0, most], facts=FACTS
    )


ROWS = [
    case("a", "greedy", 4.0, 1341), band("a", 1.0),
    case("b", "greedy", 2.0, 1341), band("b", 1.0),
    case("c", "greedy", 2.0, 1341), band("c", 3.0),  # no better than random sets: does not count
    case("a", "ours", 6.0, control=1.0), case("b", "ours", 1.0), case("b", "ours", 1.4, seed=1),
    case("a", "sweep", 3.0, 271, heads=["L0H0"]), case("b", "sweep", 1.0, 271, heads=["L0H1"]),
]  # fmt: skip


def test_only_tasks_count_on_which_greedy_beats_all_random_sets():
    assert yardstick.counted(ROWS) == ["a", "b"]


def test_share_is_clipped_on_every_task_and_averaged_over_seeds_first():
    table = yardstick.tabulate(ROWS).set_index("method")
    assert table.loc["ours", "share"] == pytest.approx((1 + 0.6) / 2)
    assert table.loc["ours", "worst"] == pytest.approx(0.6)
    assert table.loc["ours", "worst task"] == "b"
    assert table.loc["greedy", "share"] == table.loc["greedy", "low"] == 1
    assert table.loc["ours", "specific"] == pytest.approx((5.0 + 1.2) / 2)
    assert table.loc["ours", "recall"] == pytest.approx(0.5)


def test_greedy_is_averaged_over_its_seeds_too():
    rows = [*ROWS, case("b", "greedy", 3.0, 1341, seed=1)]
    table = yardstick.tabulate(rows).set_index("method")
    assert table.loc["ours", "share"] == pytest.approx((1 + 1.2 / 2.5) / 2)
    assert table.loc["greedy", "share"] == 1


def test_intervals_come_from_the_facts():
    rows = [dict(r) for r in ROWS]
    rows[6] = case("a", "ours", 2.0)
    rows[6]["drops"] = rows[6]["drops"] | {"logprob": list(np.linspace(0, 4, 10))}
    wide = yardstick.tabulate(rows).set_index("method").loc["ours"]
    assert wide["high"] - wide["low"] > 0.05


def test_non_inferiority_is_judged_task_by_task():
    got = yardstick.non_inferior(ROWS, ("ours", 41), ("sweep", 271))
    assert got["difference"].to_dict() == pytest.approx({"a": 0.25, "b": 0.1})
    assert got["non-inferior"].all()
    got = yardstick.non_inferior(ROWS, ("sweep", 271), ("ours", 41))
    assert not got["non-inferior"].any()


def test_a_line_that_was_cut_off_is_left_out_and_a_broken_file_is_said(tmp_path):
    path = tmp_path / "r.jsonl"
    assert yardstick.read_cases(path) == []
    path.write_text('{"model": "m", "task": "a"}\n{"model": "m", "ta')
    assert yardstick.read_cases(path, "m") == [{"model": "m", "task": "a"}]
    assert yardstick.read_cases(path, "other") == []
    path.write_text("no json\n")
    with pytest.raises(InputError, match="no record of cases"):
        yardstick.read_cases(path)


def test_the_recorded_cases_make_a_table_and_a_figure():
    rows = yardstick.read_cases(data_path("recorded", "search.jsonl"), "smollm2-135m-q4")
    table = yardstick.tabulate(rows)
    assert {"greedy", "screened", "sweep"} <= set(table["method"])
    ax = plots.cost_curves(table)
    assert len(ax.get_legend().get_texts()) == table["method"].nunique()
    plt.close(ax.figure)


def test_the_benchmark_runs_and_resumes_on_a_world(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "benchmarks"))
    import search as benchmark

    source, record = benchmark.Simulated(60), tmp_path / "r.jsonl"
    wanted = list(benchmark.cases(["world 0"], ["greedy", "sweep", "screened", "gradient"], 1))
    benchmark.run(source, iter(wanted[:2]), record)
    before = record.read_text()
    benchmark.run(source, iter(wanted), record)
    assert record.read_text().startswith(before)
    rows = yardstick.read_cases(record, "simulated-60")
    assert sum(r["method"] == "greedy" for r in rows) == 1
    table = yardstick.tabulate(rows).set_index(["method", "budget"])
    assert table.loc[("screened", 41), "equivalents"] == 41
    assert table.loc[("screened", 61), "share"] > table.loc[("gradient", 4), "share"] - 0.05
    sys.modules.pop("search", None)
