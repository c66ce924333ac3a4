"""Which Lasso solver for thousands of heads? scikit-learn, celer and skglm, side by side.

    python tests/benchmarks/solvers.py        # celer and skglm if they are installed

One fit with the paper's penalty on 1,000 masks of 4,096 heads, three rounds in turn, medians; and
the largest difference of the coefficients from scikit-learn's. What remains of a solver's first
call (compilation) is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
from sklearn.linear_model import Lasso

from csloc_utils.designs import stratified

N_HEADS, N_MASKS, SIZE, ALPHA, ROUNDS = 4096, 1000, 82, 0.01, 3


def solvers() -> Iterator[tuple[str, Callable[[], Lasso]]]:
    """Name and maker of every solver that is installed."""
    yield "scikit-learn", lambda: Lasso(alpha=ALPHA, max_iter=10_000, tol=1e-6)
    try:
        import celer

        yield f"celer {celer.__version__}", lambda: celer.Lasso(alpha=ALPHA, tol=1e-6)
    except ImportError:
        print("celer is not installed")
    try:
        import skglm

        yield f"skglm {skglm.__version__}", lambda: skglm.Lasso(alpha=ALPHA, tol=1e-6)
    except ImportError:
        print("skglm is not installed")


def main() -> None:
    """Fit in turn, and print a table."""
    rng = np.random.default_rng(0)
    masks = stratified(N_MASKS, N_HEADS, SIZE, 0)
    truth = np.zeros(N_HEADS)
    truth[rng.choice(N_HEADS, 20, replace=False)] = -rng.uniform(0.5, 3, 20)
    truth += -rng.exponential(0.01, N_HEADS)
    effects = masks @ truth + 0.3 * rng.normal(size=N_MASKS)
    design = np.asfortranarray(masks, float)
    effects = (effects - effects.mean()) / effects.std()
    known = dict(solvers())
    seconds: dict[str, list[float]] = {name: [] for name in known}
    coefficients = {name: make().fit(design, effects).coef_ for name, make in known.items()}
    for _ in range(ROUNDS):
        for name, make in known.items():
            start = time.perf_counter()
            make().fit(design, effects)
            seconds[name].append(time.perf_counter() - start)
    reference = coefficients["scikit-learn"]
    for name, times in seconds.items():
        ratio = np.median(times) / np.median(seconds["scikit-learn"])
        far = np.abs(coefficients[name] - reference).max()
        print(
            f"{name}: {np.median(times):.2f} s, {ratio:.2f} of scikit-learn's, coefficients differ "
            f"by {far:.1e} at most, {np.count_nonzero(coefficients[name])} not zero"
        )


if __name__ == "__main__":
    main()
