"""The report: metrics as one self-contained HTML page, or as a table for the terminal."""

import base64
import html
import io
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ddm_ray.evaluate.chart import line_chart
from ddm_ray.evaluate.features import NUM_FEATURES

MODEL_COLUMNS = {
    "model": "model",
    "frechet": "Fréchet distance",
    "accuracy": "accuracy",
    "precision": "precision",
    "recall": "recall",
    "cluster_tv": "cluster TV",
    "expert_rows_per_image": "expert rows / image",
    "router_rows_per_image": "router rows / image",
    "seconds_per_image": "ms / image",
}
TERMINAL_COLUMNS = {
    "model": "model",
    "frechet": "distance",
    "accuracy": "accuracy",
    "precision": "precis.",
    "recall": "recall",
    "cluster_tv": "TV",
    "expert_rows_per_image": "NFE",
    "seconds_per_image": "ms/img",
}
STYLE = """
:root { color-scheme: light dark;
  --ink: #1d1f24; --dim: #687080; --paper: #fcfcfa; --line: #dcdfe4; --mark: #e8f1e4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --dim: #98a0ae; --paper: #16181c; --line: #343840; --mark: #24352a; } }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2.5rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p, li { max-width: 46rem; } .dim, figcaption { color: var(--dim); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .93rem; }
th, td { text-align: right; padding: .3rem .75rem; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; } td.best { background: var(--mark); }
tr.real td { color: var(--dim); } figure { margin: 1rem 0; } img { max-width: 100%; border-radius: 6px; }
svg { max-width: 100%; height: auto; } svg text { fill: var(--dim); font-size: 12px; }
"""


def render(metrics: dict[str, Any], grid_png: bytes, experts_png: bytes) -> str:
    """report.html, with its pictures inside."""
    run, count = html.escape(metrics["run"]), metrics["num_samples"]
    sampling = metrics["sampling"]
    parts = [
        f"<h1>{run}: {metrics['num_clusters']} experts beside the monolith</h1>",
        f'<p class="dim">{count} samples of each model, the same labels and seeds;'
        f" {html.escape(sampling['solver'])}, {sampling['steps']} steps,"
        f" guidance {sampling['guidance_scale']:g}; {metrics['num_real']} real training rows,"
        f" {metrics['num_heldout']} held out.</p>",
        "".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences(metrics)),
        "<h2>Samples</h2>",
        _figure(grid_png, "Columns share label and seed; the first line is real training rows of these classes."),
        "<h2>Quality and cost of sampling</h2>",
        _models_table(metrics),
        f"<ul>{''.join(f'<li>{html.escape(note)}</li>' for note in notes(metrics))}</ul>",
        *_loss_section(metrics),
        "<h2>Cost of training</h2>",
        f"<p>{html.escape(_training_sentence(metrics['training']))}</p>",
        _training_table(metrics["training"]),
        "<h2>What each expert learned</h2>",
        _figure(experts_png, "Real rows of each cluster; below, its expert alone, given the same labels."),
        f'<p class="dim">{html.escape(", ".join(f"{k} {v}" for k, v in metrics["versions"].items()))},'
        f" evaluation seed {metrics['seed']}.</p>",
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{run}: evaluation</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def print_table(metrics: dict[str, Any]) -> str:
    """The table of models and what follows from it, as text at most 100 characters wide."""
    table = Table(box=SIMPLE, pad_edge=False)
    for key, heading in TERMINAL_COLUMNS.items():
        table.add_column(heading, justify="left" if key == "model" else "right", no_wrap=True)
    for row in [*metrics["models"], *metrics["real"]]:
        table.add_row(*(_cell(key, row) for key in TERMINAL_COLUMNS))
    text = io.StringIO()
    console = Console(file=text, width=100, force_terminal=False, highlight=False)
    console.print(table)
    for sentence in [*sentences(metrics), _training_sentence(metrics["training"])]:
        console.print(sentence, markup=False)
    return text.getvalue()


def sentences(metrics: dict[str, Any]) -> list[str]:
    """What the numbers say, and how far they can be trusted; worded from the numbers alone."""
    best = min(metrics["models"], key=lambda row: row["frechet"])
    monolith = next(row for row in metrics["models"] if row["model"] == "monolith")
    rivals = [row for row in metrics["models"] if row is not monolith]
    found = [f"Lowest Fréchet distance: {best['model']} ({best['frechet']:.3g})."]
    if rivals:
        rival = min(rivals, key=lambda row: row["frechet"])
        change = rival["frechet"] / monolith["frechet"] - 1
        noise = (rival["frechet_std"] ** 2 + monolith["frechet_std"] ** 2) ** 0.5
        found.append(
            f"The mixture's best strategy, {rival['model']}, is {abs(change):.0%}"
            f" {'above' if change > 0 else 'below'} the monolith's {monolith['frechet']:.3g};"
            f" the difference, {rival['frechet'] - monolith['frechet']:+.2g}, has a standard deviation of"
            f" {noise:.2g} by resampling."
        )
    found.append("Every model was trained once, with one seed: a difference may be the luck of a training run.")
    return found


def notes(metrics: dict[str, Any]) -> list[str]:
    """How each column is measured."""
    count, rows = metrics["num_samples"], metrics["num_real"]
    heldout = next((row for row in metrics["real"] if row["accuracy"] is not None), None)
    lines = [
        f"Fréchet distance: between {count} samples and the {rows} training rows, in the {NUM_FEATURES}"
        " features (of mean variance 1) of a small classifier fitted to those rows; ± is the standard"
        " deviation when the samples are drawn again. It shrinks as the number of samples grows:"
        " compare equal numbers only.",
        f"Real, drawn again: training rows themselves, with replacement; no sampler should be expected below"
        f" {count} of them.",
        "Accuracy: how often that classifier sees the class that was asked for.",
        "Precision and recall: by balls to the third nearest neighbour in these features (arXiv 1904.06991).",
        "Cluster TV: total variation between the samples' clusters (that of the nearest training row in these"
        " features) and those which their labels lead to expect, 0 to 1.",
        "Rows per image: evaluations of an expert, and of the router, for one image."
        " ms / image: time of one CPU core (on an accelerator: elapsed time), experts and router together.",
    ]
    if heldout:
        lines[2] += f" On held-out real rows it is right in {heldout['accuracy']:.1%}."
        lines[1] += f" Held out: {heldout['n']} rows never trained on; compare with as many drawn again."
    return lines


def _cell(key: str, row: dict[str, Any]) -> str:
    value = row.get(key)
    if value is None:
        return "–"
    if key == "frechet":
        return f"{value:.3g} ± {row['frechet_std']:.2g}"
    if key == "seconds_per_image":
        return f"{1000 * value:.1f}"
    if key.endswith("per_image"):
        return f"{value:g}"
    return str(value) if isinstance(value, str) else f"{value:.3f}"


def _models_table(metrics: dict[str, Any]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in MODEL_COLUMNS.values())
    lowest = min(row["frechet"] for row in metrics["models"])
    lines = []
    for kind, rows in (("model", metrics["models"]), ("real", metrics["real"])):
        for row in rows:
            mark = ' class="best"' if kind == "model" and row["frechet"] == lowest else ""
            cells = "".join(
                f"<td{mark if key == 'frechet' else ''}>{html.escape(_cell(key, row))}</td>" for key in MODEL_COLUMNS
            )
            lines.append(f'<tr class="{kind}">{cells}</tr>')
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _loss_section(metrics: dict[str, Any]) -> list[str]:
    losses = metrics["heldout_loss"]
    if not losses:
        return []
    lines = "".join(
        f"<tr><td>{html.escape(row['model'])}</td><td>{row['loss']:.4f} ± {row['std_error']:.2g}</td>"
        f"<td>{row['loss'] / losses[0]['loss'] - 1:+.1%}</td></tr>"
        for row in losses
    )
    relative = {
        row["model"]: [own / base for own, base in zip(row["by_t"], losses[0]["by_t"], strict=True)] for row in losses
    }
    return [
        "<h2>Held-out loss</h2>",
        f"<p>{_router_sentence(metrics['router'])}</p>",
        f"<p>Flow-matching loss per pixel on {metrics['num_heldout']} held-out rows, the same noise and times"
        " for all; ± is the standard error over rows. <i>own cluster</i> gives each row to its own cluster's"
        " expert. A lower loss need not mean better samples.</p>",
        f"<table><tr><th>velocity by</th><th>loss</th><th>against {html.escape(losses[0]['model'])}</th></tr>"
        f"{lines}</table>",
        f"<figure>{line_chart(relative)}"
        "<figcaption>Loss relative to the monolith's, by t (0 data, 1 noise).</figcaption></figure>",
    ]


def _router_sentence(router: dict[str, Any]) -> str:
    return (
        f"The router, given noised held-out rows at all t alike, names the row's cluster in {router['accuracy']:.1%};"
        f" its cross-entropy is {router['cross_entropy']:.3f} nats, {router['fitted_cross_entropy']:.3f} at the"
        f" temperature that fits best, {router['temperature']:.2f} (1: calibrated; router_temperature sets it)."
    )


def _training_sentence(training: dict[str, Any]) -> str:
    return (
        f"Training FLOPs of all experts together: {training['experts_flops']:.3g},"
        f" {training['experts_over_monolith']:.3f} times the monolith's;"
        f" the router adds {training['router_over_experts']:.1%}."
    )


def _training_table(training: dict[str, Any]) -> str:
    lines = "".join(
        f"<tr><td>{html.escape(job['job'])}</td><td>{job['parameters']:,}</td><td>{job['steps']:,}</td>"
        f"<td>{job['rows_seen']:,}</td><td>{job['flops']:.3g}</td><td>{job['seconds']:.0f}</td>"
        f"<td>{job['attempts']}</td></tr>"
        for job in training["jobs"]
    )
    columns = ("job", "parameters", "steps", "rows seen", "FLOPs", "seconds", "attempts")
    head = "".join(f"<th>{column}</th>" for column in columns)
    return f'<div class="scroll"><table><tr>{head}</tr>{lines}</table></div>'


def _figure(png: bytes, caption: str) -> str:
    data = base64.b64encode(png).decode()
    image = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"
