"""Draw the README's picture from measurements: ``python book/picture.py``.

One head at a time is switched off while the model multiplies; the five whose loss costs most are
framed. A sweep of all heads takes some minutes the first time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from csloc_utils import plots
from csloc_utils.measure import Evaluator
from csloc_utils.models import load_model
from csloc_utils.search import sweep
from csloc_utils.tasks import load_task

TARGET = Path(__file__).parent / "assets" / "heads.png"


def main() -> None:
    """Measure, or read what the store holds, and draw."""
    plots.set_style()
    model = load_model("smollm2-135m-q4", dtype="float32")
    result = sweep(Evaluator(model, load_task("multiplication"), n_items=24), k=5)
    effects = result.extra["measurements"].effects()
    ax = plots.head_map(
        effects,
        model.grid,
        label="effect on log p(answer)",
        mark=result.found,
        limit=float(np.abs(effects).max().round(1)),
    )
    ax.figure.savefig(TARGET, bbox_inches="tight", dpi=160)
    print(TARGET)


if __name__ == "__main__":
    main()
