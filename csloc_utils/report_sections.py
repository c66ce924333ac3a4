"""What the page of ``csloc report`` says, section by section, as HTML.

Every function takes the result that ``csloc locate --json`` wrote, and nothing is measured anew.
Sentences are chosen by the numbers: a run that verified nothing, or found nothing, says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from csloc_utils import report_text as html
from csloc_utils.report_figures import damage_figure, heads_figure, map_figure

Run = Mapping[str, Any]
_METHODS = {
    "screened": "conditional screening: gradients name candidates, a few are measured",
    "paper": "the paper's: random masks and a Lasso regression",
    "sweep": "a sweep: every head off alone",
    "race": "a race: a sweep that drops heads as soon as they are settled",
    "greedy": "greedy: the worst head given those already found, again and again",
}
_COLUMNS = {
    "effect": "effect",
    "joint_effect": "joint effect so far",
    "single_effect": "effect alone",
    "predicted": "guess from the slope",
    "rank": "place by that guess",
    "n_masks": "masks with the head off",
    "status": "in the first k",
    "n_items": "items scored",
    "accuracy_effect": "effect on accuracy",
}


def loses(run: Run) -> bool | None:
    """Whether held-out items show for certain that the heads are needed; None if not verified."""
    target = run.get("verify", {}).get("target")
    return None if target is None else target[html.leading(target)]["low"] > 0


def title(run: Run) -> str:
    """Return the page's heading."""
    return f"<h1>Heads of {escape(run['task']['name'])} in {escape(run['model']['name'])}</h1>"


def asked(run: Run) -> str:
    """What was asked: task, model, method, command and date."""
    task, model = run["task"], run["model"]
    of = f"{model['layers']} layers of {model['heads']} heads"
    rows = {
        "Task": f"{task['name']}: {task['capability']}" if task["capability"] else task["name"],
        "Model": f"{model['name']}, {of}, {model['fingerprint']['dtype']}",
        "Method": f"{_METHODS[run['method']]}; k = {run['k']}",
        "Score": html.SCORES.get(run["score"], run["score"]) + f", {run['ablation']} ablation",
        "Command": run["command"],
        "Date": run["date"],
    }
    return html.facts(rows)


def answer(run: Run) -> str:
    """Return the answer, in one sentence."""
    heads, task = html.found(run), run["task"]["name"]
    if not run["gate"]["passed"]:
        text = (
            f"{run['model']['name']} does not show the capability {task} on these items, so "
            "nothing is said about its heads."
        )
    elif "verify" not in run:
        text = (
            f"The search names {html.listed(heads)} for {task}; nothing was verified on other "
            "items, so this is a guess to be checked and not a finding."
        )
    else:
        verify = run["verify"]
        heads, target = verify["heads"], verify["target"]
        score, random = html.leading(target), verify["random"]
        cost = f"{html.drop_in_words(score, target[score])} on {target['n_items']} held-out items"
        if not loses(run):
            text = (
                f"No head was found: without {html.listed(heads)}, {task} loses {cost}, which "
                "may be nothing."
            )
        else:
            text = f"Without {html.listed(heads)}, {task} loses {cost}"
            if random["n"]:
                beaten, n = random[score]["beaten"], random["n"]
                share = f"each of {n}" if beaten == n else f"{beaten} of {n}"
                text += f", more than with {share} random sets of heads off"
            text += "."
    return f'<p class="answer">{escape(text)}</p>'


def heads(run: Run) -> str:
    """Return the heads with their intervals, alone and given the others."""
    if not html.found(run):
        return html.paragraph("None: the gate is closed.")
    each = run.get("verify", {}).get("each")
    if each:
        confidence = run["verify"]["settings"]["confidence"]
        score = html.leading(run["verify"]["target"])
        rows = [
            (h["head"], html.interval(h["single"]), html.interval(h["given_others"])) for h in each
        ]
        table = html.table(("head", "off alone", "off beside the others"), rows)
        return table + html.paragraph(
            f"Drop in {html.unit(score)} on held-out items, with its {confidence:.0%} interval "
            "(over facts, for each head by itself). A backup does nothing alone; of two heads in a "
            "row the second adds nothing."
        )
    rows = [(row["head"], html.number(row["effect"])) for row in run["heads"][: run["k"]]]
    return html.table(("head", "effect"), rows) + html.paragraph(
        "Not verified: these effects were measured on the items that chose the heads and flatter "
        "them, and they have no interval. Negative = needed."
    )


def recovery(run: Run) -> str:
    """What the search measured, and for a regression whether its assumptions hold."""
    if not html.found(run):
        return html.paragraph("No search was run.")
    spent = run["evaluations"]
    passes = f"{spent['forward']} forward and {spent['backward']} backward passes"
    text = f"{spent['equivalents']} evaluations ({passes}) on {run['task']['items']} items. "
    rows = run["heads"][: max(run["k"], 10)]
    columns = [c for c in _COLUMNS if c in rows[0]]
    cells = [(row["head"], *(html.number(row[c]) for c in columns)) for row in rows]
    names = [
        "coefficient" if (c, run["method"]) == ("effect", "paper") else _COLUMNS[c] for c in columns
    ]
    if run["method"] == "race":
        text += "The race is settled. " if run["settled"] else "The race is not settled. "
    if run.get("contrast"):
        text += f"A head counted for what these tasks do not lose as well: {run['contrast']}. "
    if run["method"] == "paper":
        text += f"Masks of {run['mask_size']} heads, {run['design']} design. "
        if never := run["never_ablated"]:
            text += f"Never off, so nothing is known of them: {len(never)} heads. "
    text += f"Effects are in {html.unit(run['score'])}; negative = needed."
    result = html.paragraph(text) + html.table(("head", *names), cells)
    return result + _diagnostics(run.get("diagnosis")) if run["method"] == "paper" else result


def _diagnostics(made: Mapping[str, Any] | None) -> str:
    if not made:
        return html.paragraph(
            "Diagnostics of the regression are not in this result: too few masks, or an old run."
        )
    rows = {
        "Masks": str(made["n_masks"]),
        "Coverage": f"a head is off in {made['least']} to {made['most']} masks, "
        f"a pair of heads in {made['pair_coverage']:.2f} on average",
        "Coherence": f"{html.number(made['coherence'])} (1: some heads were always off together)",
        "Held-out R²": f"{html.number(made['held_out_r2'])} on masks that the fit did not see",
    }
    cautions = "".join(html.paragraph(f"Caution: {warning}.") for warning in made["warnings"])
    return "<h3>Do the assumptions hold?</h3>" + html.facts(rows) + cautions


def verification(run: Run) -> str:
    """Return the check on held-out items, beside random heads and control tasks."""
    if "verify" not in run:
        return html.paragraph("Nothing was verified in this run.")
    verify, rows = run["verify"], []
    damages = [(verify["target"], verify["random"], "target")]
    damages += [(c, c["random"], name) for name, c in verify["controls"].items()]
    for damage, random, name in damages:
        for score in (s for s in html.SCORES if s in damage):
            drop, drawn = damage[score], random.get(score)
            beaten = f"{drawn['beaten']} of {random['n']}" if drawn else "–"
            rows.append(
                (
                    damage["task"] + " (target)" if name == "target" else name,
                    html.SCORES[score].replace("-", "\N{NON-BREAKING HYPHEN}"),
                    *(html.number(drop[key]) for key in ("intact", "ablated")),
                    html.interval(drop, "drop"),
                    html.number(drawn and drawn["mean"]),
                    beaten,
                )
            )
    columns = ("task", "score", "intact", "ablated", "drop", "random mean", "random sets beaten")
    special = [
        "Specific damage (target minus the controls' mean), "
        f"{html.SCORES.get(s, s)}: {html.interval(i)}."
        for s, i in (verify["specific"] or {}).items()
    ]
    note = (
        "Drop: intact − ablated, all heads off together, with its "
        f"{verify['settings']['confidence']:.0%} interval over facts. Random sets: as many random "
        "heads of the same layers."
    )
    return html.table(columns, rows) + html.paragraph(" ".join([*special, note]))


def universal(run: Run) -> str:
    """Whether other tasks need the heads too, and how that was decided."""
    if "verify" not in run or not run["verify"]["controls"]:
        return html.paragraph("Not known: this run measured no control task.")
    harmed = []
    controls = run["verify"]["controls"]
    for name, control in controls.items():
        score, random = html.leading(control), control["random"]
        more = score not in random or random[score]["beaten"] == random["n"]
        if control[score]["low"] > 0 and more:
            harmed.append(f"{name} ({html.drop_in_words(score, control[score])})")
    rule = (
        "Decided so: a control counts as harmed if its drop is above zero for certain (its "
        "interval) and larger than under every random set of heads. The heads were off together, "
        "so which of them a control needs is not known; csloc ablate with one head and the "
        "control as its task tells."
    )
    if harmed:
        text = f"At least one of the heads is needed by other tasks as well: {'; '.join(harmed)}."
    else:
        text = f"No sign of universal heads: none of {html.listed(list(controls))} is harmed."
    return html.paragraph(text) + html.paragraph(rule)


def gate(run: Run) -> str:
    """Whether the model shows the capability at all."""
    made = run["gate"]
    verdict = "passed" if made["passed"] else "closed"
    rows = {
        "Verdict": verdict,
        "Items": str(made["n_items"]),
        "Accuracy": f"{made['accuracy']:.2f}, by chance {made['chance']:.2f}",
        "Above chance": html.interval(made["above_chance"]),
    }
    if made["above_permuted"] != made["above_chance"]:
        rows["Own above others' answers"] = f"{html.interval(made['above_permuted'])} nats"
    return html.facts(rows) + html.paragraph("The gate is passed if the intervals lie above zero.")


def provenance(run: Run) -> str:
    """Hashes and versions."""
    model, task = run["model"]["fingerprint"], run["task"]
    rows = {
        "Model weights": model["weights"],
        "Model configuration": model["config"],
        "Number format, device": f"{model['dtype']}, {model['device']}",
        "Items": f"{task['fingerprint']} ({task['source']}, seed {task['seed']})",
        "Versions": ", ".join(f"{name} {v}" for name, v in run["versions"].items()),
    }
    return html.facts(rows)


def again(run: Run, name: str) -> str:
    """How to make the result and this page again."""
    lines = [run["command"], f"csloc report {name}"]
    return f"<pre>{escape(chr(10).join(lines))}</pre>" + html.paragraph(
        "The same command on the same machine gives the same numbers: items, masks and intervals "
        f"are drawn with seed {run['seed']}. Another device or number format changes later digits."
    )


# All that depend on the run alone, in the order of the page.
SECTIONS = (
    asked,
    answer,
    heads,
    heads_figure,
    map_figure,
    recovery,
    verification,
    damage_figure,
    universal,
    gate,
    provenance,
)
