"""The serving explorer: latency against throughput and cost, what an arrival rate makes of it, and where time goes."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import plotly.graph_objects as go

from lessonlib.accelerators import Accelerator
from lessonlib.capacity import SLO, BatchChoice, OperatingPoint, Service, ServingCost, TokenTime, plan
from lessonlib.checks import check_number, check_share
from lessonlib.explorers import base
from lessonlib.models import ModelConfig
from lessonlib.units import fmt

COUNTS = [1, 2, 4, 8]
GROUP_SIZES = {16: None, 8: None, 4: 128}  # of the weights, by their bits
KV_BITS = [16, 8]
PROMPT_LENS = [50, 100, 200, 500, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000]
OUTPUT_LENS = [10, 20, 50, 100, 200, 300, 500, 1000, 2000, 4000, 8000]
RATES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50, 70, 100, 150, 200, 300, 500, 1000]
PRICES = [0, 0.2, 0.3, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 15]  # 0: the catalog's
TTFT_LIMITS = [0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 30]  # s
TPOT_LIMITS = [2, 5, 7, 10, 15, 20, 25, 30, 40, 50, 75, 100, 150, 200, 500]  # ms
YELLOW = "#F0E442"  # of the same colors
PARTS = {  # of TPOT: its name, color, pattern
    "weights_s": ("weights", base.SKY, ""),
    "kv_s": ("KV cache", YELLOW, "/"),
    "compute_s": ("arithmetic", base.GREEN, "x"),
    "prefill_s": ("others' prefill", "#a6a6a6", "."),
    "overhead_s": ("overhead", "#ffffff", "-"),
}
LEGEND = (  # in rows of four: two of the left panel, two of the right
    "in time, by batch", "late", "weights", "KV cache", "knee", "now", "others' prefill", "arithmetic", "limit",
    "breaks the SLO", "overhead", "TPOT limit",
)  # fmt: skip
BARS = ("alone", "now", "knee")
PANELS = ((0.0, 0.5), (0.64, 1.0))  # share of the width
WIDEST_LIMIT = 1.3  # a limit that is this many times larger than all that is drawn is outside
BUSY = 0.8  # utilization from which queues are worth a word
NARROW, WIDE = 0.155, 0.42  # shares of the right panel that hold a time, and a time with its name


@dataclass(frozen=True)
class Setting:
    """What the controls say. Raises ValueError for an efficiency outside 0 to 1 or a negative overhead."""

    model: ModelConfig
    accelerator: Accelerator
    num_accelerators: int = 1
    weight_bits: int = 16
    """4: in groups of 128"""
    kv_bits: float = 16
    prompt_len: int = 1000
    output_len: int = 200
    rate_per_s: float = 10
    usd_per_hour: float = 0
    """of one accelerator; 0: the catalog's price"""
    ttft_limit_s: float = 1
    tpot_limit_ms: float = 25
    efficiency: float = 1.0
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        check_share("efficiency", self.efficiency)
        check_number("overhead_s", self.overhead_s)

    @property
    def slo(self) -> SLO:
        """Both limits."""
        return SLO(self.ttft_limit_s, self.tpot_limit_ms / 1000)

    @cached_property
    def service(self) -> Service:
        """The requests on their accelerators. Raises ValueError if heads cannot be divided or not one request fits."""
        found = plan(
            self.model,
            self.accelerator,
            context_len=self.prompt_len + self.output_len,
            tensor_parallel=self.num_accelerators,
            weight_bits=self.weight_bits,
            group_size=GROUP_SIZES.get(self.weight_bits),
            kv_bits=self.kv_bits,
        )
        if not found.fits:
            raise ValueError(found.message)
        price = self.usd_per_hour or None
        return Service(found, self.prompt_len, self.output_len, price, self.efficiency, self.overhead_s)

    @cached_property
    def curve(self) -> tuple[ServingCost, ...]:
        """Batches from 1 to the most that fit, the knee's among them."""
        costs = {cost.batch_size: cost for cost in (*self.service.curve(), self.knee.cost) if cost}
        return tuple(costs[batch] for batch in sorted(costs))

    @cached_property
    def knee(self) -> BatchChoice:
        """The cheapest batch that meets the SLO."""
        return self.service.knee(self.slo)

    @cached_property
    def now(self) -> OperatingPoint | None:
        """Where requests settle at the arrival rate, on as many copies as it takes; None if no batch meets the SLO."""
        return self.service.at_rate(self.rate_per_s, self.slo)

    @property
    def limit_name(self) -> str:
        """The limit that ends what is in time."""
        if self.knee.limited_by == "TTFT":
            return f"TTFT limit {fmt(self.slo.ttft_s, 's')}"
        return f"TPOT limit {fmt(self.slo.tpot_s, 's')}"


def serving_figure(setting: Setting) -> go.Figure:
    """The whole figure for a setting; `update_serving_figure` changes it in place. Raises ValueError as that does."""
    figure = _empty_figure()
    update_serving_figure(figure, setting)
    return figure


def _empty_figure() -> go.Figure:
    figure = base.new_figure(
        "", "", height=520, margin={"l": 85, "r": 20, "t": 105, "b": 60}, barmode="stack", bargap=0.35,
        hoverlabel={"align": "left", "bgcolor": "white"},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 13},
                "entrywidth": 128, "traceorder": "normal"},
        xaxis={"domain": PANELS[0], "title": "tokens/s for each user (1 / TPOT)", "showgrid": True,
               "gridcolor": "#eeeeee"},
        yaxis={"title": "output tokens/s per accelerator", "showgrid": True, "gridcolor": "#eeeeee", "type": "log"},
        xaxis2={"domain": PANELS[1], "anchor": "y2", "title": "time per output token (TPOT)", "showgrid": True,
                "gridcolor": "#eeeeee"},
        yaxis2={"anchor": "x2", "range": [-0.6, 2.6], "tickvals": [2, 1, 0], "ticktext": BARS},
    )  # fmt: skip
    figure.add_scatter(
        name="breaks the SLO", mode="lines", line={"width": 0}, fill="toself", fillcolor="rgba(0,0,0,0)",
        fillpattern={"shape": "/", "fgcolor": "#bbbbbb", "size": 8, "solidity": 0.15}, hoverinfo="skip",
    )  # fmt: skip
    figure.add_scatter(name="limit", mode="lines", line={"color": base.RED, "width": 2, "dash": "dash"})
    numbers: dict[str, Any] = {"mode": "lines+markers+text", "textfont": {"size": 12}}
    figure.add_scatter(
        name="in time, by batch",
        line={"color": base.BLUE, "width": 3},
        marker={"size": 6},
        textposition="top right",
        **numbers,
    )
    figure.add_scatter(
        name="late", line={"color": base.RED, "width": 2, "dash": "dot"}, marker={"size": 6, "symbol": "x"},
        textposition="top right", **numbers,
    )  # fmt: skip
    edge = {"color": base.BLACK, "width": 1}
    figure.add_scatter(
        name="knee", mode="markers", marker={"color": base.ORANGE, "size": 16, "symbol": "diamond", "line": edge}
    )
    figure.add_scatter(
        name="now", mode="markers", marker={"color": base.PURPLE, "size": 14, "symbol": "square", "line": edge}
    )
    right: dict[str, Any] = {"xaxis": "x2", "yaxis": "y2"}
    for name, color, pattern in PARTS.values():
        figure.add_bar(
            name=name, orientation="h", y=[2, 1, 0], marker={"color": color, "line": edge, "pattern": {
                "shape": pattern, "fgcolor": base.BLACK, "fillmode": "overlay", "fgopacity": 0.3, "size": 7,
                "solidity": 0.15}},
            textposition="inside", insidetextanchor="middle", textangle=0, constraintext="none",
            insidetextfont={"color": base.BLACK, "size": 12}, **right,
        )  # fmt: skip
    figure.add_scatter(
        name="TPOT limit", mode="lines", y=[-0.6, 2.6], line={"color": base.RED, "width": 2, "dash": "dash"}, **right
    )
    for rank, name in enumerate(LEGEND):
        figure.update_traces(legendrank=rank, selector={"name": name})
    return figure.update_traces(hovertemplate="%{customdata}<extra></extra>", selector={"hoverinfo": None})


def update_serving_figure(figure: go.Figure, setting: Setting) -> None:
    """Draw a setting in one update. Raises ValueError, after clearing the picture, where nothing can be served."""
    try:
        _ = setting.curve
    except ValueError:
        with figure.batch_update():
            for trace in figure.data:
                trace.x = []
            figure.layout.yaxis2.ticktext = BARS
        raise
    with figure.batch_update():
        _draw_curve(figure, setting)
        _draw_parts(figure, setting)


def _draw_curve(figure: go.Figure, setting: Setting) -> None:
    region, limit, in_time, late, knee_mark, now_mark = figure.data[:6]
    knee, now, curve = setting.knee, setting.now, setting.curve
    sources = f"{base.hover_source(setting.model.source)}<br>{base.hover_source(setting.accelerator.source)}"
    heights = [cost.tokens_per_s_per_accelerator for cost in curve]
    low, high = min(heights), max(heights)
    if now:
        low = min(low, now.tokens_per_s_per_accelerator)
    low, high = low / 1.7, high * 2
    fastest = curve[0].tokens_per_s_per_user
    slowest = 1 / knee.longest_tpot_s if knee.longest_tpot_s else None  # that meets both limits, if any does
    inside = slowest is not None and slowest <= WIDEST_LIMIT * fastest
    end = 1.12 * max(fastest, slowest if slowest and inside else 0)
    broken = slowest if slowest and inside else end
    region.x, region.y = [0, broken, broken, 0, 0], [low, low, high, high, low]
    limit.x, limit.y = ([slowest] * 2 if inside else [None] * 2), [low, high]
    limit.name = setting.limit_name if inside else f"{setting.limit_name[:4]} limit not met"
    limit.customdata = [f"slower is over the {setting.limit_name}"] * 2
    numbered = _numbered([cost.batch_size for cost in curve], knee.batch_size)
    for trace, costs in (
        (in_time, [cost for cost in curve if cost.batch_size <= knee.batch_size]),
        (late, [cost for cost in curve if cost.batch_size >= knee.batch_size] if curve[-1] != knee.cost else []),
    ):
        trace.x = [cost.tokens_per_s_per_user for cost in costs] or [None]  # an empty trace would leave the legend
        trace.y = [cost.tokens_per_s_per_accelerator for cost in costs] or [None]
        trace.text = [f"{cost.batch_size:,}" if cost.batch_size in numbered else "" for cost in costs]
        trace.customdata = [_hover(cost) for cost in costs] or [""]
    for mark, point in ((knee_mark, knee.cost), (now_mark, now)):
        mark.x = [point.tokens_per_s_per_user if point else None]
        mark.y = [point.tokens_per_s_per_accelerator if point else None]
    knee_mark.name = f"knee: batch {knee.batch_size:,}" if knee.cost else "no knee"
    knee_mark.customdata = [f"<b>knee</b>, {_hover(knee.cost)}" if knee.cost else ""]
    copies = f", {now.copies:,} copies" if now and now.copies > 1 else ""
    now_mark.name = f"now {fmt(setting.rate_per_s)}/s{copies}" if now else "now: never in time"
    now_mark.customdata = [f"<b>now</b>, {_hover_now(now)}" if now else ""]
    for trace in (in_time, late, knee_mark, now_mark):
        trace.hovertemplate = f"%{{customdata}}<br>{sources}<extra></extra>"
    figure.layout.xaxis.range = [0, end]
    figure.layout.yaxis.range = np.log10([low, high]).tolist()
    base.log_ticks(figure.layout.yaxis, (low, high), "")


def _numbered(batches: list[int], knee: int) -> set[int]:
    """The batches whose number stands beside the curve: about every fourfold, up to somewhat before the knee."""
    found = {batches[index] for index in np.searchsorted(batches, 4 ** np.arange(16)) if index < len(batches)}
    return {batch for batch in found if not knee or batch < knee / 2.5}


def _hover(cost: ServingCost) -> str:
    said = (
        f"{cost.batch_size:,} at once: {fmt(cost.requests_per_s, 'requests/s', 3)}<br>TTFT {fmt(cost.ttft_s, 's', 3)}, "
        f"TPOT {fmt(cost.tpot_s, 's', 3)}, {fmt(cost.tokens_per_s_per_user, 'tokens/s', 3)} for each user<br>"
        f"{fmt(cost.tokens_per_s_per_accelerator, 'tokens/s', 3)} per accelerator"
    )
    if cost.num_accelerators > 1:
        said += f", {fmt(cost.tokens_per_s, 'tokens/s', 3)} in all"
    return f"{said}<br>{_prices(cost)}"


def _hover_now(now: OperatingPoint) -> str:
    each = f" on each of {now.copies:,} copies" if now.copies > 1 else ""
    return (
        f"{fmt(now.rate_per_s, 'requests/s')}, {now.in_flight:,.1f} in flight{each}<br>"
        f"TTFT {fmt(now.ttft_s, 's', 3)}, TPOT {fmt(now.tpot_s, 's', 3)}<br>"
        f"{fmt(now.tokens_per_s, 'tokens/s', 3)} in all, {now.utilization:.0%} of what the knee makes<br>"
        f"{_prices(now.cost)}"
    )


def _prices(cost: ServingCost) -> str:
    if cost.usd_per_hour is None:
        return "no price is known"
    return f"{fmt(cost.input, '', 2)} and {fmt(cost.output, '', 2)} USD per million input and output tokens"


def _draw_parts(figure: go.Figure, setting: Setting) -> None:
    *bars, limit = figure.data[6:]
    rows = _bars(setting)
    longest = max(time.total_s for _, _, time in rows if time)
    tpot_limit_s = setting.slo.tpot_s
    inside = tpot_limit_s <= WIDEST_LIMIT * longest
    end = 1.08 * max(longest, tpot_limit_s if inside else 0)
    for (field, (name, _, _)), bar in zip(PARTS.items(), bars, strict=True):
        sizes = [getattr(time, field) if time else 0.0 for _, _, time in rows]
        bar.x = sizes
        bar.text = [_label(name, size, end) for size in sizes]
        bar.customdata = [
            f"{name}: {fmt(size, 's', 3)} of {fmt(time.total_s, 's', 3)}" if time else ""
            for size, (_, _, time) in zip(sizes, rows, strict=True)
        ]
    limit.x = [tpot_limit_s] * 2 if inside else [None] * 2
    limit.name = f"TPOT limit {fmt(tpot_limit_s, 's')}" if inside else "TPOT limit outside"
    limit.customdata = [f"TPOT limit {fmt(tpot_limit_s, 's')}"] * 2
    figure.layout.xaxis2.range = [0, end]
    ticks = _ticks(end)
    figure.layout.xaxis2.tickvals, figure.layout.xaxis2.ticktext = ticks, [fmt(tick, "s") for tick in ticks]
    figure.layout.yaxis2.ticktext = [
        f"{name}<br>batch {fmt(batch, '', 3)}<br>{fmt(time.total_s, 's', 3)}" if time else f"{name}<br>never in time"
        for name, batch, time in rows
    ]


def _bars(setting: Setting) -> list[tuple[str, float, TokenTime | None]]:
    """Name, batch and parts of TPOT: of a request alone, at the present rate and at the knee, as far as there are."""
    knee, now = setting.knee, setting.now
    return [
        ("alone", 1, setting.curve[0].token_time),
        ("now", now.batch_size, now.token_time) if now else ("now", 0, None),
        ("knee", knee.batch_size, knee.cost.token_time) if knee.cost else ("knee", 0, None),
    ]


def _ticks(end: float) -> list[float]:
    """Two to five round numbers from 0 to `end`."""
    power = 10.0 ** np.floor(np.log10(end))
    step = next(share * power for share in (0.5, 1, 2) if end / power / share < 5)
    return (step * np.arange(end // step + 1)).tolist()


def _label(name: str, size: float, end: float) -> str:
    """What stands in a part of a bar: as much as it has room for."""
    if size < NARROW * end:
        return ""
    time = fmt(size, "s", 2)
    return f"{name} {time}" if size > WIDE * end and len(name) < 10 else time


def describe(setting: Setting) -> str:
    """The picture in words."""
    service, knee, now = setting.service, setting.knee, setting.now
    each = " on each" if setting.num_accelerators > 1 else ""
    left = fmt(service.plan.tightest.kv_budget_bytes, "B", 3, binary=True)
    said = [
        f"{setting.model.name} fits on {setting.num_accelerators} x {setting.accelerator.name}: {left}{each} are left "
        f"for the KV cache, room for {service.most:,} requests of {setting.prompt_len:,} prompt and "
        f"{setting.output_len:,} output tokens."
    ]
    if setting.prompt_len + setting.output_len > setting.model.max_context:
        said.append(f"(The model itself was made for {setting.model.max_context:,} tokens at most.)")
    promise = f"TTFT up to {fmt(setting.slo.ttft_s, 's')}, TPOT up to {fmt(setting.slo.tpot_s, 's')}"
    if now is None or knee.cost is None:
        alone = setting.curve[0]
        said.append(
            f"Even alone a request breaks the SLO ({promise}): TTFT {fmt(alone.ttft_s, 's', 3)}, TPOT "
            f"{fmt(alone.tpot_s, 's', 3)} ({_most_of(alone.token_time)}). No number of copies helps: it takes more or "
            "faster accelerators for each, fewer bits, shorter prompts, or a longer limit."
        )
        return " ".join(said)
    rate = f"{fmt(setting.rate_per_s)} request{'s' if setting.rate_per_s != 1 else ''}/s"
    if now.copies > 1:
        said.append(
            f"{rate} are {fmt(now.load, '', 3)} times what one can serve in time: it takes {now.copies:,} copies."
        )
    said.append(
        f"At {rate} {'each copy' if now.copies > 1 else 'it'} has {fmt(now.in_flight, '', 3)} in flight: TTFT "
        f"{fmt(now.ttft_s, 's', 3)}, TPOT {fmt(now.tpot_s, 's', 3)} ({_most_of(now.token_time)}); "
        f"{fmt(now.tokens_per_s_per_user, '', 3)} tokens/s for each user, {fmt(now.tokens_per_s)} in all; "
        f"{_prices(now.cost)}{_at_price(setting, now)}."
    )
    why = "more do not fit" if knee.beyond is None else f"{knee.batch_size + 1:,} break the {knee.limited_by} limit"
    said.append(
        f"The knee, the cheapest point within the SLO ({promise}), is {knee.batch_size:,} at once ({why}): "
        f"{fmt(knee.cost.requests_per_s, '', 3)} requests/s, {fmt(knee.cost.tokens_per_s_per_user, '', 3)} tokens/s "
        f"for each user, {fmt(knee.cost.tokens_per_s)} in all; {_prices(knee.cost)}. "
        f"{'Each copy' if now.copies > 1 else 'This rate'} is at {now.utilization:.0%} of that."
    )
    if now.utilization > BUSY:
        said.append("So near the limit requests also queue, which comes on top of TTFT.")
    if service.flat_from and service.flat_from <= knee.batch_size:
        said.append(
            f"From {service.flat_from:,} at once arithmetic takes longer than reading the weights: more are slower and "
            "no cheaper."
        )
    return " ".join(said)


def _most_of(time: TokenTime) -> str:
    field = max(PARTS, key=lambda part: getattr(time, part))
    return f"{getattr(time, field) / time.total_s:.0%} {PARTS[field][0]}"


def _at_price(setting: Setting, now: OperatingPoint) -> str:
    if now.usd_per_hour is None:
        return f" for {setting.accelerator.name}: set one"
    return f", at {now.usd_per_hour:,.2f} USD an hour for all"


def table(setting: Setting) -> str:
    """The curve and the present rate, and the parts of TPOT, as two HTML tables."""
    rows = [_row(f"{cost.batch_size:,}", cost, cost) for cost in setting.curve]
    if setting.knee.cost:
        rows.append(_row(f"knee: {setting.knee.batch_size:,}", setting.knee.cost, setting.knee.cost))
    if setting.now:
        rows.append(_row(f"now: {fmt(setting.now.batch_size, '', 3)}", setting.now, setting.now.cost))
    header = ["batch", "TTFT", "TPOT", "tokens/s per user", "per accelerator", "in all", "USD/million in", "out"]
    caption = f"{setting.model.name} on {setting.num_accelerators} x {setting.accelerator.name}"
    parts = [
        [name, *(fmt(getattr(time, part), "s", 3) for part in PARTS), fmt(time.total_s, "s", 3)]
        for name, _, time in _bars(setting)
        if time
    ]
    named = ["", *(name for name, _, _ in PARTS.values()), "TPOT"]
    return base.table_html(header, rows, caption) + base.table_html(named, parts, "Where the time of a token goes")


def _row(name: str, point: ServingCost | OperatingPoint, cost: ServingCost) -> list[str]:
    rates = [point.tokens_per_s_per_user, point.tokens_per_s_per_accelerator, point.tokens_per_s]
    known = cost.usd_per_hour is not None
    prices = [fmt(price, "", 3) for price in (cost.input, cost.output)] if known else ["", ""]
    return [name, fmt(point.ttft_s, "s", 3), fmt(point.tpot_s, "s", 3), *(fmt(rate, "", 3) for rate in rates), *prices]


class ServingExplorer(base.Explorer):
    """A deployment: whether it fits, how fast and dear it is at each batch, at an arrival rate, and under an SLO.

    `model` is a key of the catalog or a ModelConfig of your own, `machine` joins the accelerators. `efficiency` is the
    share of the peak that prefill reaches, `overhead_s` what every step takes besides. Further keyword arguments set
    the controls.
    """

    def __init__(
        self,
        model: ModelConfig | str = "llama-3.1-8b",
        machine: Accelerator | None = None,
        efficiency: float = 1.0,
        overhead_s: float = 0.0,
        **values: Any,
    ) -> None:
        self._choices = base.Choices(model, machine, "h100-sxm", "bf16")
        self._timing: dict[str, Any] = {"efficiency": efficiency, "overhead_s": overhead_s}
        controls = {
            **self._choices.controls,
            "num_accelerators": base.slider("Accelerators", COUNTS, 1),
            "usd_per_hour": base.slider("USD/hour each", PRICES, 0, labels={0: "catalog"}),
            "weight_bits": base.slider("Weight bits", list(GROUP_SIZES), 16, labels={4: "4, groups of 128"}),
            "kv_bits": base.slider("KV bits", KV_BITS, 16),
            "prompt_len": base.slider("Prompt (tokens)", PROMPT_LENS, 1000),
            "output_len": base.slider("Output (tokens)", OUTPUT_LENS, 200),
            "ttft_limit_s": base.slider("TTFT limit (s)", TTFT_LIMITS, 1),
            "tpot_limit_ms": base.slider("TPOT limit (ms)", TPOT_LIMITS, 25),
            "rate_per_s": base.slider("Requests/s", RATES, 10),
        }
        self.controls = controls
        self._problem = ""
        super().__init__(controls, _empty_figure(), values)  # which may be all there is to draw

    @property
    def setting(self) -> Setting:
        """What the controls say now."""
        return Setting(**self._choices.values(self.controls), **self._timing)

    def redraw(self) -> str:
        setting = self.setting
        self._problem = ""
        try:
            update_serving_figure(self.figure, setting)
        except ValueError as error:
            said = str(error).replace("tensor_parallel", "the number of accelerators")
            self._problem = f"This cannot be served: {said.removesuffix('.')}."
            return self._problem
        return describe(setting)

    def table(self) -> str:
        return "" if self._problem else table(self.setting)
