import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from csloc_utils import plots
from csloc_utils.errors import InputError
from csloc_utils.heads import Head, HeadGrid
from csloc_utils.verify import verify
from fakes import PLANTED, FakeEvaluator, small_grid, tail

GRID = small_grid()
EFFECTS = FakeEvaluator(GRID, tail(GRID)).head_effects
HEADS = [GRID.head(i) for i in PLANTED]
CURVE = pd.DataFrame(
    {
        "n_masks": [50, 100, 50, 100] * 2,
        "recall": [0.2, 0.8, 0.4, 1.0, 0.0, 0.6, 0.2, 0.8],
        "design": ["stratified"] * 4 + ["bernoulli"] * 4,
    }
)


@pytest.fixture(autouse=True)
def close_figures():
    with plt.rc_context():
        plots.set_style()
        yield
    plt.close("all")


@pytest.fixture(scope="module")
def verification():
    controls = {"plus": FakeEvaluator(GRID, {40: -1.5}), "text": FakeEvaluator(GRID, {7: -0.1})}
    target = FakeEvaluator(GRID, tail(GRID), name="times")
    return verify(target, HEADS, controls, n_random=20, n_random_control=4, n_boot=100)


def test_every_plot_draws_on_the_given_axes(verification):
    calls = [
        lambda ax: plots.head_map(EFFECTS, GRID, mark=HEADS, ax=ax),
        lambda ax: plots.sorted_effects(EFFECTS, GRID, ax=ax),
        lambda ax: plots.recovery_curve(CURVE, ax=ax),
        lambda ax: plots.predicted_vs_measured(EFFECTS, 2 * EFFECTS, ax=ax),
        lambda ax: plots.damage_bars(verification, ax=ax),
    ]
    for call in calls:
        figure, ax = plt.subplots()
        assert call(ax) is ax
        figure.canvas.draw()
        assert ax.get_title() == "" and ax.get_xlabel()
        assert len(plt.get_fignums()) == 1
        plt.close(figure)


@pytest.mark.parametrize("shape", [(30, 9), (32, 32), (2, 4), (80, 64), (1, 1)])
def test_head_map_of_any_grid(shape):
    grid = HeadGrid(*shape, n_kv_heads=1, head_width=8)
    ax = plots.head_map(np.linspace(-1, 0, grid.size), grid)
    ax.figure.canvas.draw()
    assert len(ax.get_xticks()) <= 17 and ax.get_xticklabels()[0].get_text() == "0"


def test_head_map_puts_heads_where_their_layer_and_index_are():
    values = np.zeros(GRID.size)
    values[GRID.flat(Head(13, 4))] = -2.0
    for given in (values, values.reshape(GRID.shape)):
        ax = plots.head_map(given, GRID, mark=[Head(13, 4)])
        drawn = ax.collections[0].get_array()
        assert drawn.shape == (9, 30) and drawn[4, 13] == -2.0 and drawn.sum() == -2.0
        assert ax.patches[0].get_xy() == (13, 4)


def test_head_map_colours():
    def scale(values, **options):
        mesh = plots.head_map(values, GRID, **options).collections[0]
        return mesh.cmap.name, mesh.norm.vmin, mesh.norm.vmax

    assert scale(EFFECTS) == ("PuOr", -3.0, 3.0)
    assert scale(-np.abs(EFFECTS)) == ("PuOr", -3.0, 3.0)
    assert scale(np.abs(EFFECTS)) == ("viridis", 0.0, 3.0)
    assert scale(EFFECTS, limit=0.5) == ("PuOr", -0.5, 0.5)
    assert scale(np.zeros(GRID.size)) == ("viridis", 0.0, 1.0)
    assert scale(np.full(GRID.size, np.nan))[0] == "viridis"


def test_sorted_effects_names_the_most_needed_heads():
    ax = plots.sorted_effects(EFFECTS, GRID, k=3)
    assert {text.get_text() for text in ax.texts} == {"L4H4", "L13H4", "L13H5"}
    top = ax.collections[1].get_offsets()
    assert top[0].tolist() == [1.0, -3.0]
    assert len(plots.sorted_effects(EFFECTS, GRID, k=50).texts) == 12


def test_names_of_heads_with_equal_effects_do_not_overlap():
    ax = plots.sorted_effects(np.r_[np.full(10, -1.0), np.zeros(260)], GRID, k=10)
    ax.figure.canvas.draw()
    boxes = sorted((text.get_window_extent() for text in ax.texts), key=lambda box: box.y0)
    # The middles of neighbouring lines of text are further apart than the letters are high.
    assert len(boxes) == 10 and np.diff([box.y0 for box in boxes]).min() > 9 * 110 / 72 * 0.75


def test_recovery_curve_is_the_mean_over_seeds():
    ax = plots.recovery_curve(CURVE)
    assert ax.lines[0].get_ydata().tolist() == pytest.approx([0.3, 0.9])
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["stratified", "bernoulli"]
    assert plots.recovery_curve(CURVE.drop(columns="design")).get_legend() is None


def test_predicted_vs_measured_states_its_numbers():
    predicted = np.linspace(-3, 0, 30)
    ax = plots.predicted_vs_measured(predicted, 1.7 * predicted)
    assert ax.texts[0].get_text() == "r = 1.00\nslope = 1.70\nn = 30"
    assert ax.get_xlim() == ax.get_ylim()
    ax = plots.predicted_vs_measured(predicted, -predicted)
    assert "r = \N{MINUS SIGN}1.00" in ax.texts[0].get_text()
    assert plots.predicted_vs_measured([0.0], [0.0]).texts[0].get_text() == "n = 1"


@pytest.mark.parametrize("score", ["accuracy", "logprob"])
def test_damage_bars(verification, score):
    ax = plots.damage_bars(verification, score)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["times", "plus", "text"]
    widths = [bar.get_width() for bar in ax.patches]
    drops = [verification.target, *verification.controls.values()]
    assert widths == pytest.approx([damage.drops[score].drop for damage in drops])
    dots = [len(c.get_offsets()) for c in ax.collections if len(c.get_offsets()) > 1]
    assert dots[-3:] == [20, 4, 4]
    assert ("nats" in ax.get_xlabel()) == (score == "logprob")


def test_damage_bars_without_controls_and_random_heads():
    alone = verify(FakeEvaluator(GRID, tail(GRID)), HEADS, n_random=0, n_boot=50)
    labels = [text.get_text() for text in plots.damage_bars(alone).get_legend().get_texts()]
    assert labels == ["target"]


def test_damage_bars_keeps_target_and_control_of_the_same_name_apart():
    same = verify(
        FakeEvaluator(GRID, tail(GRID), name="times"),
        HEADS,
        {"times": FakeEvaluator(GRID, {})},
        n_random=3,
        n_boot=50,
    )
    labels = [label.get_text() for label in plots.damage_bars(same).get_yticklabels()]
    assert labels == ["times (target)", "times"]


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: plots.head_map(EFFECTS[:-1], GRID), "one a head"),
        (lambda: plots.head_map(EFFECTS, GRID, limit=0), "positive"),
        (lambda: plots.head_map(EFFECTS, GRID, mark=[Head(30, 0)]), "L30H0"),
        (lambda: plots.sorted_effects(EFFECTS.reshape(GRID.shape), GRID), "one a head"),
        (lambda: plots.sorted_effects(EFFECTS, GRID, k=0), "k is 0"),
        (lambda: plots.recovery_curve(CURVE.drop(columns="recall")), "no column recall"),
        (lambda: plots.recovery_curve(CURVE[:0]), "no rows"),
        (lambda: plots.predicted_vs_measured([1.0], [1.0, 2.0]), "same length"),
    ],
)
def test_bad_input(call, says):
    with pytest.raises(InputError, match=says):
        call()


def test_damage_bars_of_an_unknown_score(verification):
    with pytest.raises(InputError, match="logprob, accuracy"):
        plots.damage_bars(verification, "bleu")
