"""The README of an edited checkpoint: what was changed, what is known about it, and what is not."""

from __future__ import annotations

import json
import platform
import re
import textwrap
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from csloc_utils import __version__
from csloc_utils.errors import InputError
from csloc_utils.heads import Head, HeadGrid
from csloc_utils.sources import KNOWN_MODELS

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_SCORES = {"logprob": "log-probability", "accuracy": "accuracy"}
_PACKAGES = ("torch", "transformers", "nnsight")

_NO_GUARANTEE = """\
Switching heads off, or weakening them, does not guarantee that the capability is gone. Other heads
can take over, the model may still answer when asked in other words, and further training may bring
the capability back. Nor does it guarantee that nothing else has changed: only what is listed above
was measured, on the items that were scored. Do not rely on this edit to make a model safe."""


def read_evidence(path: Path, heads: Sequence[Head], grid: HeadGrid) -> dict[str, Any]:
    """Read the report of ``csloc locate --json`` that says what switching these heads off does.

    Parameters
    ----------
    path : Path
    heads : sequence of Head
        The heads to be edited, in any order.
    grid : HeadGrid
        Heads of the model to be edited.

    Returns
    -------
    dict

    Raises
    ------
    InputError
        If it is no such report, was written without verification, or is about other heads or a
        model of another size.
    """
    try:
        report = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no JSON"
        raise InputError(f"cannot read {path}: {reason}; give a file of `locate --json`") from error
    try:
        if "verify" in report:
            _evidence(report), _side_effects(report)
        check_evidence(report, heads, grid)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is no report of csloc: give a file of `locate --json`") from error
    return report


def check_evidence(
    report: Mapping[str, Any],
    heads: Sequence[Head],
    grid: HeadGrid,
    fingerprint: Mapping[str, str] | None = None,
) -> None:
    """Raise `InputError` if a report of ``csloc locate`` is not about these heads of this model.

    Weights can be compared only where both have the same dtype.
    """
    if "verify" not in report:
        raise InputError("the report holds no verification: run `csloc locate` without --no-verify")
    verified = report["verify"]["heads"]
    if sorted(verified) != sorted(map(str, heads)):
        raise InputError(
            f"the report verifies {', '.join(verified)}, not {', '.join(map(str, heads))}: "
            "edit these heads, or give another report"
        )
    model = report["model"]
    same_size = (model["layers"], model["heads"]) == (grid.n_layers, grid.n_heads)
    if not same_size or not (
        fingerprint is None or _same_weights(report, fingerprint) is not False
    ):
        raise InputError(
            f"the report is about another model ({model['name']}), not the one to be edited: "
            "run `csloc locate` on this one"
        )


def model_card(
    *,
    name: str,
    fingerprint: Mapping[str, str],
    heads: Sequence[Head],
    kind: str,
    scale: float = 0.0,
    tensors: Sequence[str] = (),
    reference: str = "",
    evidence: Mapping[str, Any] | None = None,
    command: str = "",
) -> str:
    """Return the card as Markdown, with front matter as the hub reads it.

    Parameters
    ----------
    name : str
        The source model; a hub id also becomes the card's ``base_model``.
    fingerprint : mapping of str to str
        Of the source model; see :class:`csloc_utils.models.HeadModel`.
    heads : sequence of Head
    kind : {"zero", "mean", "scale"}
    scale : float
        Factor of the heads, for "scale".
    tensors : sequence of str
        Names of the tensors that differ from the source's.
    reference : str, optional
        What texts the means come from, for "mean".
    evidence : mapping, optional
        Report of ``csloc locate --json``; see `read_evidence`.
    command : str, optional
        The command that made the edit.
    """
    from huggingface_hub import ModelCardData

    hub_id = KNOWN_MODELS[name].location if name in KNOWN_MODELS else name
    data = ModelCardData(
        base_model=hub_id if _HUB_ID.fullmatch(hub_id) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["csloc", "attention-heads", "model-editing"],
    )
    names = ", ".join(map(str, heads))
    done = {
        "zero": "switched off (zero ablation)",
        "mean": "replaced by their mean (mean ablation)",
        "scale": f"multiplied by {scale:g}",
    }[kind]
    how = {
        "zero": "the columns of the attention output projection that read these heads are zero",
        "mean": "the columns of the attention output projection that read these heads are zero, "
        "and what they made of the heads' means is added to its bias",
        "scale": "the columns of the attention output projection that read these heads are "
        f"multiplied by {scale:g}",
    }[kind]
    edit = [
        ("source model", name),
        *((f"source {key}", f"`{fingerprint[key]}`") for key in ("weights", "config", "dtype")),
        ("heads (layer, query head, from 0)", names),
        ("edit", done),
        *([("means over", reference)] if reference else []),
        ("changed tensors", ", ".join(f"`{t}`" for t in tensors)),
    ]
    versions = {"csloc": __version__, "python": platform.python_version()}
    versions |= {package: fingerprint[package] for package in _PACKAGES}
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name}, {len(heads)} attention {'head' if len(heads) == 1 else 'heads'} {done}",
        textwrap.fill(
            f"A copy of {name} in which {how}. All other weights are the source's. "
            "The licence of the source model applies.",
            100,
            break_long_words=False,
            break_on_hyphens=False,
        ),
        "## Edit",
        _table(("", ""), edit),
        "## Evidence",
        *_about_evidence(evidence, kind, scale, fingerprint),
        "## What this does not guarantee",
        _NO_GUARANTEE,
        "## How it was made",
        *([textwrap.indent(command, "    ")] if command else []),
        f"On {datetime.now(timezone.utc):%Y-%m-%d}, with "
        + ", ".join(f"{package} {version}" for package, version in versions.items())
        + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _about_evidence(
    report: Mapping[str, Any] | None, kind: str, scale: float, fingerprint: Mapping[str, str]
) -> list[str]:
    if report is None:
        return [
            "None was given with this edit: neither its effect nor its side effects are known "
            "from this card. (`csloc locate --json` makes a report, `csloc edit --evidence` adds "
            "it.)"
        ]
    measured = f"These numbers were measured with {report['ablation']} ablation"
    if _same_weights(report, fingerprint) is None:
        measured += f", in {report['model']['fingerprint']['dtype']}"
    cautions = [f"{measured}, while the source model ran; not on this checkpoint."]
    if kind == "scale":
        cautions.append(f"What multiplying by {scale:g} does was not measured.")
    elif kind != report["ablation"]:
        cautions.append(f"What {kind} ablation does was not measured.")
    return [*_evidence(report), " ".join(cautions), "## Side effects", *_side_effects(report)]


def _evidence(report: Mapping[str, Any]) -> list[str]:
    """What the heads' ablation did to the target, beside random heads, as Markdown blocks."""
    verify = report["verify"]
    target, random = verify["target"], verify["random"]
    rows = []
    for score in (score for score in _SCORES if score in target):
        special = (verify.get("specific") or {}).get(score)
        less = f"{random[score]['beaten']} of {random['n']}" if random["n"] else "–"
        rows.append((*_drop(score, target[score]), special and _interval(special, "value"), less))
    level = f"{verify['settings']['confidence']:.0%}"
    columns = (
        "score",
        "intact",
        "ablated",
        f"drop [{level}]",
        f"specific [{level}]",
        "random sets",
    )
    return [
        f"Task {_cell(target['task'])}, {target['n_items']} items ({target['n_facts']} facts) that "
        "did not choose the heads. Drop: intact minus ablated. Specific: the drop minus the mean "
        "drop of the control tasks. Random sets: how many sets of random heads of the same layers "
        f"cost less. From a report of {_cell(report['date'])} on {_cell(report['model']['name'])}.",
        _table(columns, rows),
    ]


def _side_effects(report: Mapping[str, Any]) -> list[str]:
    """What the heads' ablation did to the control tasks, as Markdown blocks."""
    controls = report["verify"]["controls"]
    if not controls:
        return ["No control task was measured."]
    rows = [
        (_cell(name), control["n_items"], *_drop(score, control[score]))
        for name, control in controls.items()
        for score in _SCORES
        if score in control
    ]
    level = f"{report['verify']['settings']['confidence']:.0%}"
    return [
        _table(("control task", "items", "score", "intact", "ablated", f"drop [{level}]"), rows)
    ]


def _same_weights(report: Mapping[str, Any], fingerprint: Mapping[str, str]) -> bool | None:
    """Whether a report is about these weights; None where their dtypes differ."""
    theirs = report["model"]["fingerprint"]
    if theirs["dtype"] != fingerprint["dtype"]:
        return None
    return theirs["weights"] == fingerprint["weights"]


def _drop(score: str, drop: Mapping[str, float]) -> tuple[str, ...]:
    intact, ablated = f"{drop['intact']:.3f}", f"{drop['ablated']:.3f}"
    return _SCORES[score], intact, ablated, _interval(drop, "drop")


def _interval(interval: Mapping[str, float], value: str) -> str:
    return f"{interval[value]:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def _cell(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns)]
    lines += [["–" if value in (None, "") else str(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
