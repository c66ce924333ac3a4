import json
import warnings

import numpy as np
import pytest

from csloc_utils.console import print_verification
from csloc_utils.errors import InputError
from csloc_utils.heads import Head, HeadGrid
from csloc_utils.verify import bootstrap, verify
from fakes import PLANTED, FakeEvaluator, small_grid, tail

GRID = small_grid()
HEADS = [GRID.head(i) for i in PLANTED]
FAST = {"n_random": 40, "n_random_control": 6, "n_boot": 300}


def target(**options):
    options = {"n_items": 40, "items_per_fact": 2, "noise": 0.1, "name": "times", **options}
    return FakeEvaluator(GRID, tail(GRID), **options)


def controls():
    """A task that shares one head with the target, and one that shares none."""
    return {
        "plus": FakeEvaluator(GRID, tail(GRID, {40: -1.5, 7: -1.0}, seed=2), n_items=30, seed=2),
        "text": FakeEvaluator(GRID, tail(GRID, {7: -1.0}, seed=3), n_items=50, seed=3),
    }


def test_located_heads_beat_random_ones():
    result = verify(target(), HEADS, controls(), **FAST)
    logprob = result.target.drops["logprob"]
    assert logprob.drop == pytest.approx(8.3, abs=0.5)
    assert logprob.drop == pytest.approx(logprob.intact - logprob.ablated)
    assert logprob.low < logprob.drop < logprob.high
    assert result.target.drops["accuracy"].drop == 1.0
    assert result.target.beats("logprob") == 1.0
    assert result.target.p_value("logprob") == pytest.approx(1 / 41)
    assert np.abs(result.target.random["logprob"]).max() < 1.5


def test_random_heads_do_not_beat_random_heads():
    heads = [Head(2, 1), Head(9, 3), Head(17, 6)]
    shares = [
        verify(
            FakeEvaluator(GRID, tail(GRID, {}, seed=s), seed=s), heads, n_random=40, n_boot=2
        ).target.beats("logprob")
        for s in range(20)
    ]
    assert 0.25 < np.mean(shares) < 0.75


def test_drop_is_positive_for_damage_and_negative_for_help():
    helped = verify(FakeEvaluator(GRID, {5: +0.3}), [GRID.head(5)], **FAST).target
    assert helped.drops["logprob"].drop == pytest.approx(-0.3)
    assert helped.beaten("logprob") == 0 and helped.p_value("logprob") == 1.0


def test_ties_are_not_beaten():
    target = verify(FakeEvaluator(GRID, {}), HEADS, **FAST).target
    assert target.beaten("accuracy") == target.beaten("logprob") == 0
    assert target.p_value("accuracy") == 1.0


def test_specific_damage():
    result = verify(target(), HEADS, controls(), **FAST)
    for score in ("logprob", "accuracy"):
        drops = [control.drops[score].drop for control in result.controls.values()]
        expected = result.target.drops[score].drop - np.mean(drops)
        specific = result.specific[score]
        assert specific.value == pytest.approx(expected)
        assert specific.low <= specific.value <= specific.high
    assert result.controls["plus"].drops["logprob"].drop == pytest.approx(1.5, abs=0.4)
    assert verify(target(), HEADS, **FAST).specific is None


def test_random_sets_match_layers_and_controls_use_the_first_of_them():
    evaluators = controls()
    result = verify(target(), HEADS, evaluators, **FAST)
    layers = sorted(head.layer for head in HEADS)
    assert len(result.random_heads) == 40
    for heads in result.random_heads:
        assert sorted(head.layer for head in heads) == layers
        assert not set(heads) & set(HEADS)
    text = evaluators["text"]
    first = np.array([GRID.mask(heads) for heads in result.random_heads[:6]])
    expected = -text.measure(first).effects()
    np.testing.assert_allclose(result.controls["text"].random["logprob"], expected)


def test_verification_is_not_counted():
    evaluators = controls()
    evaluator = target()
    verify(evaluator, HEADS, evaluators, **FAST)
    assert evaluator.evaluations["forward"] == evaluators["plus"].evaluations["forward"] == 0
    assert evaluators["plus"].n_measured == 7


def test_few_distinct_random_sets_are_measured_once_and_reported():
    evaluator = target()
    result = verify(evaluator, HEADS[:1], n_random=100, n_boot=100)
    assert evaluator.n_measured == 1 + 8 + 3  # and the head alone, beside the others, without it
    assert result.to_dict()["random"]["n_distinct"] == 8
    masks = np.array([GRID.mask(heads) for heads in result.random_heads])
    np.testing.assert_allclose(
        result.target.random["logprob"], -evaluator.measure(masks).effects("logprob")
    )


def test_seeds():
    def numbers(seed, n_boot=300):
        options = {**FAST, "n_boot": n_boot}
        return verify(target(), HEADS, controls(), seed=seed, **options).to_dict()

    assert numbers(1) == numbers(1)
    assert numbers(1)["random"]["heads"] != numbers(2)["random"]["heads"]
    assert numbers(1)["random"] == numbers(1, n_boot=50)["random"]


def test_to_dict_is_json_and_complete():
    result = verify(target(), HEADS, controls(), **FAST)
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data == result.to_dict()
    assert data["heads"] == [str(head) for head in HEADS]
    assert data["target"]["task"] == "times"
    assert (data["target"]["n_items"], data["target"]["n_facts"]) == (40, 20)
    assert set(data["target"]["accuracy"]) == {"intact", "ablated", "drop", "low", "high"}
    assert data["random"]["n"] == 40 and len(data["random"]["logprob"]["drops"]) == 40
    assert data["random"]["logprob"]["beaten"] == 40
    assert set(data["controls"]) == {"plus", "text"}
    assert data["controls"]["plus"]["random"]["n"] == 6
    assert set(data["specific"]["logprob"]) == {"value", "low", "high"}
    assert data["settings"] == {"n_boot": 300, "confidence": 0.95, "seed": 0}
    without = json.loads(json.dumps(verify(target(), HEADS, n_random=0, n_boot=50).to_dict()))
    assert without["specific"] is None and without["controls"] == {}
    assert without["random"]["n"] == 0


def test_table():
    table = verify(target(), HEADS, controls(), **FAST).table()
    assert table["task"].tolist() == ["times"] * 2 + ["plus"] * 2 + ["text"] * 2
    assert table["role"].tolist() == ["target"] * 2 + ["control"] * 4
    np.testing.assert_allclose(table["drop"], table["intact"] - table["ablated"])
    assert (table["random_mean"] <= table["random_max"]).all()
    assert table["n_random"].tolist() == [40, 40, 6, 6, 6, 6]
    assert verify(target(), HEADS, n_random=0, n_boot=50).table()["beats"].isna().all()


@pytest.mark.parametrize("options", [{"items_per_fact": 40}, {"n_items": 1}])
def test_a_single_fact_gives_an_interval_of_width_zero(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = verify(target(**options), HEADS, {"same": target(**options)}, **FAST)
    for drop in result.target.drops.values():
        assert drop.low == pytest.approx(drop.drop) == pytest.approx(drop.high)
    assert result.specific["logprob"].low == pytest.approx(0) == result.specific["logprob"].high


def test_constant_drops_give_an_interval_of_width_zero():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        interval = bootstrap([(np.full(30, 0.25), np.arange(30))])
    assert (interval.value, interval.low, interval.high) == (0.25, 0.25, 0.25)


def test_bootstrap_resamples_facts_not_items():
    rng = np.random.default_rng(0)
    facts = np.repeat(np.arange(20), 10)
    values = rng.normal(size=20)[facts]
    by_fact = bootstrap([(values, facts)])
    by_item = bootstrap([(values, np.arange(200))])
    ratio = (by_fact.high - by_fact.low) / (by_item.high - by_item.low)
    assert ratio == pytest.approx(np.sqrt(10), rel=0.15)
    assert by_fact.value == pytest.approx(values.mean())


def test_bootstrap_weights_facts_by_their_items():
    values, facts = np.array([0.0, 1.0, 1.0, 1.0]), np.array(["a", "b", "b", "b"])
    interval = bootstrap([(values, facts)])
    assert (interval.value, interval.low, interval.high) == (0.75, 0.0, 1.0)


def test_bootstrap_coverage():
    """90 % intervals for a mean over 40 facts of unequal size cover it in about 90 % of sets."""
    rng = np.random.default_rng(0)
    facts = np.repeat(np.arange(40), np.tile([1, 2, 3, 2], 10))
    covered = 0
    for trial in range(300):
        values = 0.5 + rng.normal(size=40)[facts] + rng.normal(size=len(facts))
        interval = bootstrap([(values, facts)], n_boot=400, confidence=0.9, seed=trial)
        covered += interval.low <= 0.5 <= interval.high
    assert 0.84 < covered / 300 < 0.95


OTHER = FakeEvaluator(HeadGrid(2, 4, 4, 8), {})


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: verify(target(), []), "at least one"),
        (lambda: verify(target(), [HEADS[0]] * 2), "given twice"),
        (lambda: verify(target(), [Head(30, 0)]), "L30H0"),
        (lambda: verify(target(), GRID.heads[:136]), "at most 135"),
        (lambda: verify(target(), HEADS, {"x": OTHER}), "another model"),
        (lambda: verify(target(), HEADS, n_random=-1), "n_random"),
        (lambda: verify(target(), HEADS, n_random_control=1.5), "n_random_control"),
        (lambda: verify(target(), HEADS, n_boot=1), "n_boot"),
        (lambda: verify(target(), HEADS, confidence=95), "0.95"),
        (lambda: verify(target(), HEADS, seed=None), "seed"),
    ],
)
def test_bad_input(call, says):
    with pytest.raises(InputError, match=says):
        call()


def test_each_head_alone_and_beside_the_others():
    """A backup costs nothing alone and much beside the head it stands in for; a chain is shared."""
    grid = small_grid()
    backup = FakeEvaluator(grid, {3: -1.0}, interactions={(3, 90): -2.0})
    first, second = verify(backup, [grid.head(3), grid.head(90)], n_random=0).each
    assert (first.head, second.head) == ("L0H3", "L10H0")
    assert first.single.value == pytest.approx(1.0)
    assert first.given_others.value == pytest.approx(3.0)
    assert second.single.value == pytest.approx(0.0)
    assert second.given_others.value == pytest.approx(2.0)
    assert second.given_others.low < 2.0 < second.given_others.high


@pytest.mark.parametrize(("effect", "found"), [(-2.0, True), (0.0, False)])
def test_heads_that_cost_nothing_are_no_find(effect, found, capsys):
    grid = small_grid()
    heads = [grid.head(3), grid.head(90)]
    print_verification(verify(FakeEvaluator(grid, {3: effect}), heads, n_random=0))
    assert ("no head found" not in capsys.readouterr().out) == found
