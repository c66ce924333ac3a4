"""Several tasks on the same masks: universal and specific heads told apart, controls taken off."""

import doctest

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from csloc_utils import joint
from csloc_utils.designs import stratified
from csloc_utils.errors import InputError
from csloc_utils.joint import MultiTaskHeadLasso, contrast
from csloc_utils.recovery import HeadLasso
from csloc_utils.screening import _beyond

N_HEADS = 90
UNIVERSAL, SHARED = [10, 50], 70
SPECIFIC = {0: [3], 1: [20, 33], 2: [81]}
NAMES = ["sums", "rhymes", "code"]


def truth():
    effects = np.zeros((3, N_HEADS))
    effects[:, UNIVERSAL] = [[-2.5, -1.5]]
    effects[:2, SHARED] = -1.2
    for task, heads in SPECIFIC.items():
        effects[task, heads] = -1.5
    return effects


def planted(n_masks=240, noise=0.2, seed=0):
    masks = stratified(n_masks, N_HEADS, 4, seed)
    noise = np.random.default_rng(seed + 1).normal(0, noise, (n_masks, 3))
    return masks, masks @ truth().T + noise


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_universal_shared_and_specific_heads_are_told_apart(seed):
    fit = MultiTaskHeadLasso().fit(*planted(seed=seed))
    assert np.flatnonzero(fit.universal_).tolist() == UNIVERSAL
    for task, heads in SPECIFIC.items():
        assert np.flatnonzero(fit.specific_[task]).tolist() == heads
    roles = fit.roles(NAMES).set_index("head")
    assert roles["role"].to_dict() == {
        **dict.fromkeys(UNIVERSAL, "universal"),
        SHARED: "shared",
        **dict.fromkeys(sum(SPECIFIC.values(), []), "specific"),
    }
    assert roles.loc[SHARED, "tasks"] == "sums, rhymes"
    assert roles.loc[81, "tasks"] == "code"
    assert roles.index[:3].tolist() == [*UNIVERSAL, SHARED]
    assert np.allclose(roles[NAMES], fit.coef_[:, roles.index].T)


def test_only_damage_makes_a_head_needed():
    masks, effects = planted()
    fit = MultiTaskHeadLasso().fit(masks, -effects)  # every planted head now does good
    assert not fit.needed_[:, UNIVERSAL].any() and (fit.coef_[:, UNIVERSAL] > 0.5).all()
    assert not (fit.needed_ & (fit.coef_ >= 0)).any()


def test_share_is_the_stated_rule():
    masks, effects = planted()
    for share in (0.25, 0.7, 1.0):
        fit = MultiTaskHeadLasso(share=share).fit(masks, effects)
        largest = fit.coef_.min(axis=1)
        for task in range(3):
            rule = [c < 0 and c <= share * largest[task] for c in fit.coef_[task]]
            assert fit.needed_[task].tolist() == rule
    assert np.flatnonzero(fit.needed_.any(axis=0)).tolist() == [10]  # only the largest is left


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("alpha", [0.01, 0.1])
@pytest.mark.parametrize("copies", [1, 3])
def test_one_task_or_copies_of_it_give_what_the_lasso_of_one_task_gives(standardize, alpha, copies):
    masks, effects = planted()
    settings = {"alpha": alpha, "standardize": standardize}
    one = HeadLasso(**settings).fit(masks, effects[:, 0])
    fit = MultiTaskHeadLasso(**settings).fit(masks, np.repeat(effects[:, :1], copies, axis=1))
    assert np.allclose(fit.coef_, one.coef_, atol=5e-3)
    assert np.allclose(fit.intercept_, one.intercept_, atol=5e-3)
    assert np.allclose(fit.predict(masks), one.predict(masks)[:, None], atol=2e-2)
    assert fit.top(5).tolist() == one.top(5).tolist()


def test_a_single_task_has_specific_heads_and_no_universal_ones():
    masks, effects = planted()
    fit = MultiTaskHeadLasso().fit(masks, effects[:, :1])
    assert not fit.universal_.any() and set(fit.roles()["role"]) == {"specific"}


def test_tasks_help_each_other_find_a_head_that_all_need():
    """A head too weak to stand out on one task does when three tasks agree."""
    alone, together = [], []
    for seed in range(30):
        masks = stratified(120, N_HEADS, 4, seed)
        noise = np.random.default_rng(seed + 1000).normal(0, 0.5, (120, 3))
        effects = masks[:, [44]] * -0.6 + noise
        alone.append(HeadLasso().fit(masks, effects[:, 0]).top(1)[0] == 44)
        fit = MultiTaskHeadLasso().fit(masks, effects)
        together.append(np.argmin(fit.coef_.sum(axis=0)) == 44)
    assert np.mean(together) > 0.8 > np.mean(alone) + 0.1


def test_the_penalty_shrinks_specific_heads_more_than_universal_ones():
    masks, effects = planted(noise=0.0)
    kept = MultiTaskHeadLasso().fit(masks, effects).coef_[0] / np.where(truth()[0], truth()[0], 1)
    assert kept[SPECIFIC[0][0]] < kept[UNIVERSAL].min() < 1


def test_order_of_masks_and_tasks_does_not_matter():
    masks, effects = planted()
    rng = np.random.default_rng(5)
    rows, tasks = rng.permutation(len(masks)), [2, 0, 1]
    fit = MultiTaskHeadLasso().fit(masks, effects)
    other = MultiTaskHeadLasso().fit(masks[rows], effects[rows][:, tasks])
    assert np.allclose(other.coef_, fit.coef_[tasks], atol=5e-3)
    assert (other.needed_ == fit.needed_[tasks]).all()


def test_a_task_in_other_units_changes_nothing_else():
    masks, effects = planted()
    fit = MultiTaskHeadLasso().fit(masks, effects)
    other = MultiTaskHeadLasso().fit(masks, effects * [1, 100, 0.01] + [0, 7, 0])
    assert np.allclose(other.coef_, fit.coef_ * [[1], [100], [0.01]], rtol=1e-6)
    assert np.allclose(other.intercept_, fit.intercept_ * [1, 100, 0.01] + [0, 7, 0])
    assert (other.needed_ == fit.needed_).all()
    raw = MultiTaskHeadLasso(standardize=False).fit(masks, effects * [1, 100, 1])
    assert not np.allclose(raw.coef_[0], fit.coef_[0], atol=5e-3)


def test_scikit_learn_conventions():
    masks, effects = planted()
    fit = clone(MultiTaskHeadLasso(alpha=0.02, share=0.5)).fit(masks, effects)
    assert fit.alpha == 0.02 and fit.share == 0.5
    assert fit.predict(masks).shape == effects.shape and fit.score(masks, effects) > 0.8
    assert (fit.importances_ == -fit.coef_).all()
    assert (fit.support_ == fit.coef_.any(axis=0)).all()
    assert fit.top(3, task=2).tolist() == np.argsort(fit.coef_[2])[:3].tolist()
    with pytest.raises(NotFittedError):
        MultiTaskHeadLasso().predict(masks)


def test_heads_that_more_tasks_need_come_first_however_strong_the_others():
    effects = np.zeros((3, N_HEADS))
    effects[[0, 1, 2], [60, 61, 62]] = -3.0
    effects[:2, 7] = -1.2
    masks = stratified(240, N_HEADS, 4, 0)
    roles = MultiTaskHeadLasso().fit(masks, masks @ effects.T).roles()
    assert roles["role"].tolist() == ["shared"] + ["specific"] * 3 and roles["head"][0] == 7


def test_heads_that_were_not_selected_are_ordered_by_what_is_left_to_explain():
    fit = MultiTaskHeadLasso(alpha=10.0).fit(*planted())
    assert not fit.coef_.any()
    assert fit.top(1, task=2)[0] == UNIVERSAL[0]
    assert fit.top(3, task=2).tolist() == np.argsort(fit.residual_covariances_[2])[:3].tolist()


def test_without_any_needed_head_there_are_no_roles():
    fit = MultiTaskHeadLasso(alpha=10.0).fit(*planted())
    assert not fit.coef_.any() and not fit.needed_.any()
    assert fit.roles(NAMES).empty and fit.roles(NAMES).columns.tolist()[:2] == ["head", "role"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e[:, 0], "n_masks, n_tasks"),
        (lambda e: e[:-1], "240 masks"),
        (lambda e: e[:, :0], "a column for every task"),
        (lambda e: np.where(e == e.max(), np.nan, e), "NaN or infinite"),
        (lambda e: e * [1, 0, 1], "task 1"),
        (lambda e: [["a", "b"]], "no array of numbers"),
    ],
)
def test_bad_effects_are_explained(change, message):
    masks, effects = planted()
    with pytest.raises(InputError, match=message):
        MultiTaskHeadLasso().fit(masks, change(effects))


def test_other_bad_input_is_explained():
    masks, effects = planted()
    for share in (0, 1.1, "a"):
        with pytest.raises(InputError, match="share"):
            MultiTaskHeadLasso(share=share).fit(masks, effects)
    with pytest.raises(InputError, match="at least two"):
        MultiTaskHeadLasso().fit(masks[:1], effects[:1])
    fit = MultiTaskHeadLasso().fit(masks, effects)
    with pytest.raises(InputError, match="same model"):
        fit.predict(masks[:, 1:])
    for names in (["a", "b"], ["a", "b", "b"]):
        with pytest.raises(InputError, match="names for 3 tasks"):
            fit.roles(names)
    with pytest.raises(InputError, match="rename"):
        fit.roles(["head", "b", "c"])
    for call in (lambda: fit.top(0), lambda: fit.top(2, task=3)):
        with pytest.raises(InputError, match="whole number"):
            call()


def test_contrast_takes_off_damage_and_never_rewards_a_gain():
    target = np.array([-2.0, -2.0, -2.0, 0.0])
    controls = np.array([[-2.0, -2.0], [-1.0, 0.0], [+3.0, +1.0], [-1.0, +5.0]])
    assert contrast(target, controls).tolist() == [0.0, -1.5, -2.0, 0.5]
    assert contrast(target, controls, weight=0).tolist() == target.tolist()
    assert contrast(target, controls, weight=2).tolist() == [2.0, -1.0, -2.0, 1.0]


def test_contrast_forgives_up_to_the_tolerance():
    target, controls = np.zeros(3), np.array([[-0.4], [-0.5], [-0.75]])
    assert contrast(target, controls, tolerance=0.5).tolist() == [0.0, 0.0, 0.25]


def test_contrast_in_shares_of_what_a_task_can_lose():
    target, controls = np.array([-1.0, -2.0]), np.array([[-5.0, -1.0], [0.0, -2.0]])
    got = contrast(target, controls, units=[2.0, 10.0, 4.0])
    assert got == pytest.approx([-0.5 + (0.5 + 0.25) / 2, -1.0 + 0.5 / 2])
    scaled = contrast(3 * target, 3 * controls, units=[6.0, 30.0, 12.0])
    assert scaled == pytest.approx(got)  # the unit of measurement drops out


def test_contrast_is_what_the_screened_search_uses():
    rng = np.random.default_rng(0)
    target, controls = rng.normal(size=50), rng.normal(size=(50, 3))
    assert contrast(target, controls) == pytest.approx(_beyond(target, list(controls.T)))


def test_regressing_the_contrast_finds_the_targets_own_heads_first():
    masks, effects = planted()
    assert HeadLasso().fit(masks, effects[:, 1]).top(1)[0] in UNIVERSAL
    fit = HeadLasso().fit(masks, contrast(effects[:, 1], effects[:, [0, 2]]))
    assert set(fit.top(2).tolist()) == set(SPECIFIC[1])
    assert np.abs(fit.coef_[UNIVERSAL]).max() < 0.2


@pytest.mark.parametrize(
    ("target", "controls", "settings", "message"),
    [
        (np.zeros(3), np.zeros(3), {}, "n_controls"),
        (np.zeros(3), np.zeros((4, 1)), {}, "n_controls"),
        (np.zeros(3), np.zeros((3, 0)), {}, "at least one"),
        (np.full(3, np.nan), np.zeros((3, 1)), {}, "NaN"),
        (np.zeros(3), np.zeros((3, 1)), {"weight": -1}, "weight"),
        (np.zeros(3), np.zeros((3, 1)), {"tolerance": np.nan}, "tolerance"),
        (np.zeros(3), np.zeros((3, 1)), {"units": [1.0]}, "give 2 positive"),
        (np.zeros(3), np.zeros((3, 1)), {"units": [1.0, 0.0]}, "give 2 positive"),
    ],
)
def test_bad_contrasts_are_explained(target, controls, settings, message):
    with pytest.raises(InputError, match=message):
        contrast(target, controls, **settings)


def test_the_example_in_the_docstring_is_true():
    assert doctest.testmod(joint).failed == 0
