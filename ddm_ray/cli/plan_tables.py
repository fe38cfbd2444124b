"""Tables of a plan for islands, as text at most 160 characters wide, and the lines of one for this machine."""

import io
from collections.abc import Callable

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ddm_ray.islands.machine import KindPlan, MachinePlan
from ddm_ray.islands.plan import DAY, HOUR, RunPlan
from ddm_ray.storage.run import Run

_UNITS = ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_LEFT = ("model", "island", "speed")


def tables(plan: RunPlan, egress_price: float | None) -> list[str]:
    """The tables of a plan, with the price of traffic if a GB has one."""
    made = [_models(plan), _memory(plan), _trainings(plan), _run(plan, egress_price)]
    return [_printed(each) for each in made]


def machine_lines(plan: MachinePlan, run: Run) -> list[str]:
    """The plan of a run on this machine: its rows, a table of its trainings, and what all take together."""
    whose = "of a GPU's memory free" if plan.use_gpu else "memory free"
    memory = f"{_si(plan.memory_free, 'B')} of {_si(plan.memory_total, 'B')} {whose}"
    disk = "" if plan.disk_free is None else f", {_si(plan.disk_free, 'B')} of the run's disk free"
    gpus = f"{plan.gpus} GPUs, " if plan.gpus else ""
    table = _table("", "model", "number", "left", "parameters", "steps", "memory", "state", "weights", "time of one")
    for each in plan.kinds:
        table.add_row(
            each.kind,
            str(each.number),
            f"{each.left:.3g}",
            _si(each.parameters),
            f"{each.steps:,}",
            ("" if each.memory_measured else "> ") + _si(each.memory, "B"),
            _si(each.state_bytes, "B"),
            _si(each.weights_bytes, "B"),
            "?" if each.seconds is None else f"{_time(each.seconds)}, {each.source}",
        )
    lines = [f"this machine: {plan.cores} cores, {gpus}{memory}{disk}", *_rows(plan), *_printed(table).split("\n")]
    lines += [f"{each.kind}: {each.source} (ddm plan {run.url} --calibrate)" for each in _unmeasured(plan)]
    time = "a time that isn't known" if plan.seconds is None else _time(plan.seconds)
    where = "on GPUs" if plan.use_gpu else "on the CPU"
    side_by_side = f"all, {plan.at_once} at a time {where}: {time}, a start of each comes on top"
    return [*lines, f"{side_by_side}; up to {_si(plan.disk, 'B')} more on the disk"]


def outlook_lines(plan: MachinePlan) -> list[str]:
    """The same in few lines."""
    kinds = [f"{each.number} x {each.kind} of {_si(each.parameters)} parameters" for each in plan.kinds]
    memory = max((each.memory for each in plan.kinds), default=0.0)
    free = "" if plan.disk_free is None else f" of {_si(plan.disk_free, 'B')} free"
    return [
        *_rows(plan),
        f"trains: {', '.join(kinds)}; more than {_si(memory, 'B')} of memory each, {plan.at_once} at a time here",
        f"disk: up to {_si(plan.disk, 'B')}{free}; hours: not measured, `ddm plan` takes trial steps",
    ]


def _rows(plan: MachinePlan) -> list[str]:
    if plan.rows is None:
        return [f"rows: known once they are prepared, in {plan.clusters} clusters"]
    size = "" if plan.rows_bytes is None else f", {_si(plan.rows_bytes, 'B')} prepared and in shards"
    if plan.rows_K is None:
        each = f"about {plan.rows / plan.clusters:,.0f} each"
        return [f"rows: {plan.rows:,} in {plan.clusters} clusters, {each}{size} at most"]
    each = f"{min(plan.rows_K):,} to {max(plan.rows_K):,} each to train on"
    return [f"rows: {plan.rows:,} in {plan.clusters} clusters, {each}{size}"]


def _unmeasured(plan: MachinePlan) -> list[KindPlan]:
    return [each for each in plan.kinds if each.seconds is None and each.left]


def _models(plan: RunPlan) -> Table:
    table = _table("one training", "model", "number", "left", "parameters", "FLOP", "state", "weights", "rows")
    for need in plan.needs:
        table.add_row(
            need.kind,
            str(len(need.left)),
            f"{sum(need.left.values()):.3g}",
            _si(need.parameters),
            _si(need.flops),
            _si(need.state_bytes, "B"),
            _si(need.weights_bytes, "B"),
            "?" if need.rows is None else _si(need.rows.files, "B"),
        )
    return table


def _memory(plan: RunPlan) -> Table:
    title = "memory a worker by ZeRO stage; activations, buffers and libraries come on top"
    if any(need.text_parameters is None for need in plan.needs):
        title += ", and the text encoder, whose size can't be told here"
    table = _table(title, "model", "workers", "ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3", "the islands'")
    for need in plan.needs:
        hows = {
            (each.workers.max, each.use_gpu, each.teachers if need.job.asked else None): each.zero_stage
            for each in (island.train for island in plan.islands.values())
        }
        for (workers, use_gpu, teachers), stage in hows.items():
            sizes = need.memory(workers, use_gpu, teachers)
            what = f"{workers} GPUs" if use_gpu else f"{workers} on CPUs"
            what += f", {teachers or 'all'} teachers" if need.job.asked else ""
            table.add_row(need.kind, what, *("-" if size is None else _si(size, "B") for size in sizes), str(stage))
    return table


def _trainings(plan: RunPlan) -> Table:
    table = _table(
        "one training on each island", "island", "model", "speed", "time", "states", "written", "a day", "read"
    )
    for name in plan.islands:
        for need in plan.needs:
            slow, fast = (outcome.trainings[name][need.kind] for outcome in (plan.slow, plan.fast))
            speed = plan.speeds[name]
            table.add_row(
                name,
                need.kind,
                f"{_span(*speed.of(need.kind), lambda flops: _si(flops, 'FLOP/s'))}, {speed.source}",
                _span(fast.seconds, slow.seconds, _time),
                _span(fast.num_states, slow.num_states, str),
                _si(slow.traffic.written, "B"),
                _si(slow.bytes_a_day, "B") if slow.seconds > DAY else "-",
                _si(slow.traffic.read, "B"),
            )
    return table


def _run(plan: RunPlan, egress_price: float | None) -> Table:
    columns = ("island", "trains", "time", "written", "read", "room for states", "price", "traffic's price")
    table = _table("the run", *columns)
    for name, island in plan.islands.items():
        slow, fast = plan.slow.shares[name], plan.fast.shares[name]
        prices = fast.price(island), slow.price(island)
        table.add_row(
            name,
            str(len(slow.artifacts)),
            _span(fast.seconds, slow.seconds, _time),
            _si(slow.traffic.written, "B"),
            _si(slow.traffic.read, "B"),
            _si(plan.room(island), "B"),
            "-" if prices[0] is None or prices[1] is None else _span(prices[0], prices[1], _money),
            "-" if egress_price is None else _span(fast.egress(egress_price), slow.egress(egress_price), _money),
        )
    trained = sum(len(share.artifacts) for share in plan.slow.shares.values())
    table.add_row("all", str(trained), _span(plan.fast.seconds, plan.slow.seconds, _time))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=SIMPLE, pad_edge=False, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in _LEFT else "right")
    return table


def _printed(table: Table) -> str:
    text = io.StringIO()
    Console(file=text, width=160).print(table)
    return text.getvalue().rstrip()


def _si(value: float, unit: str = "") -> str:
    """A number of three digits with the unit's prefix."""
    for size, prefix in _UNITS:
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def _span(low: float, high: float, shown: Callable[[float], str]) -> str:
    """Both ends, or one where they look the same."""
    ends = list(dict.fromkeys(shown(value) for value in (low, high)))
    return " to ".join(ends)


def _time(seconds: float) -> str:
    for size, unit in ((DAY, "days"), (HOUR, "h"), (60.0, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _money(price: float) -> str:
    return f"{price:,.2f}"
