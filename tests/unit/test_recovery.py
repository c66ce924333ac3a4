import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Lasso
from sklearn.model_selection import cross_val_score

from csloc_utils.designs import bernoulli, stratified
from csloc_utils.errors import InputError
from csloc_utils.recovery import HeadLasso, recall, recovery_curve
from fakes import PLANTED

N_HEADS = 270
TRUTH = np.zeros(N_HEADS)
TRUTH[list(PLANTED)] = list(PLANTED.values())


def planted(n_masks=150, noise=0.1, seed=0, design="stratified"):
    if design == "stratified":
        masks = stratified(n_masks, N_HEADS, 5, seed)
    else:
        masks = bernoulli(n_masks, N_HEADS, 0.02, seed)
    noise = np.random.default_rng(seed + 100).normal(0, noise, n_masks)
    return masks, masks @ TRUTH + noise


@pytest.mark.parametrize("design", ["stratified", "bernoulli"])
def test_finds_planted_heads_in_order(design):
    masks, effects = planted(300 if design == "bernoulli" else 150, design=design)
    fit = HeadLasso().fit(masks, effects)
    assert set(fit.top(5).tolist()) == set(PLANTED)
    assert fit.top(2).tolist() == [40, 121]


def test_sign_needed_heads_come_first_and_harmful_ones_never():
    truth = np.zeros(40)
    truth[3], truth[7] = -1.0, +3.0
    masks = stratified(60, 40, 4, 0)
    fit = HeadLasso().fit(masks, masks @ truth)
    assert fit.coef_[3] < 0 < fit.coef_[7]
    assert fit.importances_[3] > 0 > fit.importances_[7]
    assert fit.top(1)[0] == 3
    assert fit.top(40)[-1] == 7


def test_shuffled_effects_give_nothing_like_the_planted_heads():
    masks, effects = planted()
    rng = np.random.default_rng(0)
    recalls = [
        recall(HeadLasso().fit(masks, rng.permutation(effects)).top(5), PLANTED) for _ in range(20)
    ]
    assert np.mean(recalls) < 0.1


@pytest.mark.parametrize("standardize", [True, False])
def test_equals_scikit_learn(standardize):
    masks, effects = planted(noise=0.5)
    target = (effects - effects.mean()) / effects.std() if standardize else effects
    scale = effects.std() if standardize else 1.0
    plain = Lasso(alpha=0.01, max_iter=5000).fit(masks.astype(float), target)
    fit = HeadLasso(standardize=standardize).fit(masks, effects)
    np.testing.assert_allclose(fit.coef_, plain.coef_ * scale, atol=1e-12)
    expected = plain.predict(masks.astype(float)) * scale
    expected += effects.mean() if standardize else 0.0
    np.testing.assert_allclose(fit.predict(masks), expected, atol=1e-10)
    negative = int((plain.coef_ < 0).sum())
    assert fit.top(negative).tolist() == np.argsort(plain.coef_)[:negative].tolist()
    assert (fit.support_ == (plain.coef_ != 0)).all()
    assert fit.n_iter_ == plain.n_iter_


def test_coefficients_are_in_units_of_the_effect():
    masks, effects = planted(600, noise=0.0)
    fit = HeadLasso(alpha=1e-4).fit(masks, effects)
    np.testing.assert_allclose(fit.coef_, TRUTH, atol=0.05)
    assert abs(fit.intercept_) < 0.05


def test_rescaling_and_shifting_the_effects():
    masks, effects = planted()
    fit, scaled = HeadLasso().fit(masks, effects), HeadLasso().fit(masks, 100 * effects + 7)
    np.testing.assert_allclose(scaled.coef_, 100 * fit.coef_, atol=1e-8)
    np.testing.assert_allclose(scaled.predict(masks), 100 * fit.predict(masks) + 7)
    assert (scaled.top(5) == fit.top(5)).all()


def test_order_of_masks_and_heads_does_not_matter():
    masks, effects = planted()
    rng = np.random.default_rng(1)
    rows, columns = rng.permutation(len(masks)), rng.permutation(N_HEADS)
    fit = HeadLasso().fit(masks, effects)
    by_row = HeadLasso().fit(masks[rows], effects[rows])
    by_column = HeadLasso().fit(masks[:, columns], effects)
    np.testing.assert_allclose(by_row.coef_, fit.coef_, atol=1e-3)
    np.testing.assert_allclose(by_column.coef_, fit.coef_[columns], atol=1e-2)
    assert (by_row.top(5) == fit.top(5)).all()
    assert (columns[by_column.top(5)] == fit.top(5)).all()


def test_ties_go_to_the_head_that_would_enter_next():
    masks, effects = planted(noise=0.3)
    strong = HeadLasso(alpha=0.05).fit(masks, effects)
    selected = int((strong.coef_ < 0).sum())
    assert 0 < selected < 5
    nxt = strong.top(selected + 1)[-1]
    alpha = 0.05
    while (HeadLasso(alpha=alpha).fit(masks, effects).coef_ < 0).sum() == selected:
        alpha *= 0.99
    entered = HeadLasso(alpha=alpha).fit(masks, effects).coef_ < 0
    assert entered[nxt] and not (strong.coef_ < 0)[nxt]


def test_a_head_that_is_never_ablated_gets_zero():
    masks, effects = planted()
    masks[:, 11] = False
    fit = HeadLasso().fit(masks, effects)
    assert fit.coef_[11] == 0 and fit.residual_covariances_[11] == 0


def test_scikit_learn_conventions():
    masks, effects = planted()
    before, effects_before = masks.copy(), effects.copy()
    model = HeadLasso(alpha=0.02, max_iter=1234)
    copy = clone(model)
    assert copy.get_params() == {"alpha": 0.02, "standardize": True, "max_iter": 1234}
    assert model.fit(masks, effects) is model
    assert (masks == before).all() and (effects == effects_before).all()
    assert model.n_features_in_ == N_HEADS
    with pytest.raises(NotFittedError):
        copy.predict(masks)
    with pytest.raises(NotFittedError):
        copy.top(1)
    assert cross_val_score(HeadLasso(), *planted(300), cv=5).mean() > 0.8
    numbers = HeadLasso(alpha=0.02).fit(masks.astype(int), effects.tolist())
    np.testing.assert_array_equal(numbers.coef_, model.coef_)


def test_recall_and_recovery_curve():
    assert recall([1, 2, 3], [2, 3, 9, 10]) == 0.5
    masks, effects = planted(200)
    curve = recovery_curve(masks, effects, list(PLANTED), [20, 100, 200])
    assert curve["n_masks"].tolist() == [20, 100, 200]
    assert curve["recall"].iloc[-1] == 1.0 > curve["recall"].iloc[0]


MASKS, EFFECTS = planted(20)
FIT = HeadLasso().fit(MASKS, EFFECTS)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: HeadLasso().fit(MASKS, np.r_[np.nan, EFFECTS[1:]]), "1 of 20 effects are NaN"),
        (lambda: HeadLasso().fit(MASKS, np.r_[np.inf, EFFECTS[1:]]), "infinite"),
        (lambda: HeadLasso().fit(MASKS, np.zeros(20)), "same effect"),
        (lambda: HeadLasso().fit(MASKS, np.full(20, 0.1) + 1e-17), "same effect"),
        (lambda: HeadLasso().fit(MASKS[:1], EFFECTS[:1]), "at least two"),
        (lambda: HeadLasso().fit(MASKS[0], EFFECTS), "2-D"),
        (lambda: HeadLasso().fit(MASKS[:, :0], EFFECTS), "shape"),
        (lambda: HeadLasso().fit(MASKS * 0.5, EFFECTS), "other than 0 and 1"),
        (lambda: HeadLasso().fit(np.where(MASKS, np.nan, 0), EFFECTS), "other than 0 and 1"),
        (lambda: HeadLasso().fit([["a"]], [1.0]), "not an array of numbers"),
        (lambda: HeadLasso().fit(MASKS, ["x"] * 20), "not an array of numbers"),
        (lambda: HeadLasso().fit(MASKS, EFFECTS[:-1]), "one effect for every mask"),
        (lambda: HeadLasso().fit(MASKS, EFFECTS[:, None]), "one effect for every mask"),
        (lambda: FIT.predict(MASKS[:, :10]), "10 heads but the fit had 270"),
        (lambda: FIT.top(0), "k is 0"),
        (lambda: FIT.top(271), "from 1 to 270"),
        (lambda: recall([1], []), "at least one"),
        (lambda: recovery_curve(MASKS, EFFECTS, [1], [21]), "number of masks"),
    ],
)
def test_bad_input(call, says):
    with pytest.raises(InputError, match=says):
        call()
