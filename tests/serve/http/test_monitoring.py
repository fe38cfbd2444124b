"""The dashboard and the alert rules ask for what the server counts, and for nothing else."""

import json
import re
from pathlib import Path

import yaml

from ddm_ray.run.run import Run
from ddm_ray.serve.engine.versions import Version
from ddm_ray.serve.http.meters import Meters
from tests.serve.engine.test_multiplexed import multiplexer

SERVING = Path(__file__).parents[3] / "serving"


def names(expressions: list[str]) -> set[str]:
    return {name for expression in expressions for name in re.findall(r"\bddm_\w+", expression)}


def counted(run: Run) -> set[str]:
    """Names of all that the server says once something has happened."""
    engine = multiplexer()
    meters = Meters(lambda: engine)
    meters.answers.labels("/", "200").inc()
    meters.images.labels("once").inc()
    meters.degraded.labels("expert-000").inc()
    meters.seconds.labels("once").observe(1)
    meters.steps.labels("expert-000").inc()
    meters.segment(0, 3, 1, 0.5)
    meters.serves(Version(run, (None,), None))
    lines = meters.page().decode().splitlines()
    gauges = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    return gauges | {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


def test_the_dashboard_shows_what_is_counted(tiny_run: Run) -> None:
    dashboard = json.loads((SERVING / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown = names(expressions)
    assert shown <= counted(tiny_run)
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in shown}
    assert families == {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in counted(tiny_run)}
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


def test_alerts_watch_what_is_counted(tiny_run: Run) -> None:
    (group,) = yaml.safe_load((SERVING / "alerts.yaml").read_text())["groups"]
    assert names([rule["expr"] for rule in group["rules"]]) <= counted(tiny_run)
    assert all(rule["annotations"]["summary"] for rule in group["rules"])
