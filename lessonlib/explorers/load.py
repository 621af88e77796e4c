"""The load explorer: what users of a server wait for at an arrival rate, and the rate from which too many wait long."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import ipywidgets as widgets
import numpy as np
import plotly.graph_objects as go

from lessonlib.accelerators import Accelerator
from lessonlib.batching import SLO, LoadCurve, Lognormal, Report, Server, at_rate, load_curve
from lessonlib.explorers import base
from lessonlib.models import ModelConfig
from lessonlib.units import fmt

RATES = [0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 7, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 70, 80, 100, 120, 150, 200]
MOST_RATE = 2.2  # the right panel ends at this many times the capacity
BATCH_LIMITS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
TOKEN_BUDGETS = [0, 64, 128, 256, 512, 1024, 2048, 4096]  # 0: whole prompts
KV_SHARES = [5, 10, 20, 30, 50, 70, 90, 100]  # %
MEAN_LENS = [10, 20, 50, 100, 150, 200, 300, 500, 750, 1000, 1500, 2000]
TTFT_LIMITS = [0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2]  # s
TPOT_LIMITS = [5, 10, 15, 20, 25, 30, 40, 50, 75, 100, 200]  # ms
PERCENTS = np.arange(101)
TIMES = (5e-4, 200)  # s
LATENCIES = {"TTFT": (base.BLUE, "solid", "longdash"), "TPOT": (base.RED, "dashdot", "dot")}  # color, line, its limit
LEGEND = ("TTFT", "TPOT", "goodput", "TTFT limit", "TPOT limit", "all in time", "capacity", "knee", "now")
PANELS = ((0.0, 0.44), (0.58, 1.0))  # share of the width


@dataclass(frozen=True)
class Setting:
    """What the controls say."""

    model: ModelConfig
    accelerator: Accelerator
    rate_per_s: float = 10
    max_batch_size: int = 64
    token_budget: int = 512
    """0: whole prompts"""
    kv_percent: float = 90
    prompt_len: int = 500
    output_len: int = 150
    ttft_limit_s: float = 1
    tpot_limit_ms: float = 50

    @property
    def slo(self) -> SLO:
        """Both limits."""
        return SLO(self.ttft_limit_s, self.tpot_limit_ms / 1000)

    @property
    def kv_budget_bytes(self) -> float:
        """The cache's share of what the weights leave; below 0 where they do not fit."""
        return self.kv_percent / 100 * ((self.accelerator.memory_bytes or 0.0) - self.model.weight_bytes())

    @cached_property
    def curve(self) -> LoadCurve:
        """The server at rising rates. Raises ValueError if it cannot serve such requests at all."""
        if self.kv_budget_bytes <= 0:
            short = fmt(self.model.weight_bytes() - (self.accelerator.memory_bytes or 0.0), "B", 3)
            raise ValueError(
                f"the weights of {self.model.name} are {short} larger than the memory of {self.accelerator.name}"
            )
        server = Server(
            self.model,
            self.accelerator,
            max_batch_size=self.max_batch_size,
            token_budget=self.token_budget or None,
            kv_budget_bytes=self.kv_budget_bytes,
        )
        return _curve(server, self.prompt_len, self.output_len)

    @cached_property
    def report(self) -> Report:
        """The server at the present rate."""
        return _report(self.curve, self.rate_per_s)


@lru_cache(maxsize=64)
def _curve(server: Server, prompt_len: int, output_len: int) -> LoadCurve:
    longest = server.model.max_context // 2
    return load_curve(server, Lognormal(prompt_len, maximum=longest), Lognormal(output_len, maximum=longest))


@lru_cache(maxsize=256)
def _report(curve: LoadCurve, rate_per_s: float) -> Report:
    return curve.server.run(at_rate(curve.requests, rate_per_s))


def load_figure(setting: Setting) -> go.Figure:
    """The whole figure for a setting; `update_load_figure` changes it in place. Raises ValueError as that does."""
    figure = _empty_figure()
    update_load_figure(figure, setting)
    return figure


def _empty_figure() -> go.Figure:
    figure = base.new_figure(
        "", "", height=500, margin={"l": 75, "r": 20, "t": 95, "b": 60},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 13},
                "entrywidth": 175, "traceorder": "normal"},
        xaxis={"domain": PANELS[0], "title": "time", "showgrid": True, "gridcolor": "#eeeeee",
               "range": np.log10(TIMES).tolist()},
        yaxis={"title": "share of requests within that time", "range": [0, 102], "ticksuffix": " %",
               "showgrid": True, "gridcolor": "#eeeeee"},
        xaxis2={"domain": PANELS[1], "anchor": "y2", "title": "arrival rate (requests/s)",
                "showgrid": True, "gridcolor": "#eeeeee"},
        yaxis2={"anchor": "x2", "title": "goodput (requests/s)", "showgrid": True, "gridcolor": "#eeeeee"},
    )  # fmt: skip
    base.log_ticks(figure.layout.xaxis, TIMES, "s")
    for name, (color, dash, limit_dash) in LATENCIES.items():
        figure.add_scatter(name=name, mode="lines", y=PERCENTS, line={"color": color, "width": 3, "dash": dash})
        figure.add_scatter(
            name=f"{name} limit", mode="lines", y=[0, 102], line={"color": color, "width": 1.5, "dash": limit_dash}
        )
    right: dict[str, Any] = {"xaxis": "x2", "yaxis": "y2"}
    figure.add_scatter(
        name="all in time",
        mode="lines",
        line={"color": "#999999", "width": 2, "dash": "dot"},
        hoverinfo="skip",
        **right,
    )
    figure.add_scatter(
        name="goodput", mode="lines+markers", line={"color": base.GREEN, "width": 3},
        marker={"size": 6, "symbol": "circle"}, **right,
    )  # fmt: skip
    figure.add_scatter(name="capacity", mode="lines", line={"color": base.BLACK, "width": 1.5, "dash": "dash"}, **right)
    figure.add_scatter(
        name="knee", mode="markers", marker={"color": base.ORANGE, "size": 16, "symbol": "diamond",
                                             "line": {"color": base.BLACK, "width": 1}}, **right,
    )  # fmt: skip
    figure.add_scatter(
        name="now", mode="markers", marker={"color": base.PURPLE, "size": 14, "symbol": "square",
                                            "line": {"color": base.BLACK, "width": 1}}, **right,
    )  # fmt: skip
    figure.update_traces(hovertemplate="%{customdata}<extra></extra>", selector={"hoverinfo": None})
    for rank, name in enumerate(LEGEND):
        figure.update_traces(legendrank=rank, selector={"name": name})
    return figure


def update_load_figure(figure: go.Figure, setting: Setting) -> None:
    """Simulate, and draw what came of it in one update. Raises ValueError, after clearing the picture, if it cannot."""
    try:
        curve, report = setting.curve, setting.report
    except ValueError:
        with figure.batch_update():
            for trace in figure.data:
                trace.x = trace.y = []
        raise
    latencies, (all_in_time, goodput, capacity, knee, now) = figure.data[:4], figure.data[4:]
    slo, rate = setting.slo, setting.rate_per_s
    limits = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s}
    knee_per_s = curve.knee_per_s(slo)
    end = MOST_RATE * curve.capacity_per_s
    sources = f"{base.hover_source(setting.model.source)}<br>{base.hover_source(setting.accelerator.source)}"
    with figure.batch_update():
        for (name, limit_s), trace, limit in zip(limits.items(), latencies[::2], latencies[1::2], strict=True):
            times = list(report.percentiles(f"{name.lower()}_s", PERCENTS).values())
            trace.x, trace.y = times, PERCENTS[: len(times)]
            trace.customdata = [
                f"{percent}% of requests: {name} of {fmt(time, 's', 3)} or less"
                for percent, time in zip(PERCENTS, times, strict=False)
            ]
            limit.x, limit.y = [limit_s] * 2, [0, 102]
            limit.customdata = [f"{name} limit {fmt(limit_s, 's')}"] * 2
            limit.name = f"{name} limit {fmt(limit_s, 's')}"
        all_in_time.x, all_in_time.y = [0, curve.capacity_per_s], [0, curve.capacity_per_s]
        good, shares = curve.goodput_per_s(slo), curve.slo_shares(slo)
        goodput.x, goodput.y = [0, *curve.rates_per_s], [0, *good]
        goodput.customdata = ["no load"] + [
            f"{at:,.3g} requests/s: {share:.0%} in time, goodput {per_s:,.3g} requests/s<br>{sources}"
            for at, share, per_s in zip(curve.rates_per_s, shares, good, strict=True)
        ]
        capacity.x, capacity.y = [curve.capacity_per_s] * 2, [0, 1.05 * curve.capacity_per_s]
        capacity.name = f"capacity {fmt(curve.capacity_per_s, '/s', 3)}"
        capacity.customdata = [f"it can finish {curve.capacity_per_s:,.3g} requests/s at most<br>{sources}"] * 2
        knee.x, knee.y = ([knee_per_s], [curve.goodput_at(knee_per_s, slo)]) if knee_per_s else ([None], [None])
        knee.name = f"knee {fmt(knee_per_s, '/s', 3)}" if knee_per_s else "no knee"
        knee.customdata = [f"up to {knee_per_s:,.3g} requests/s nine in ten requests are in time"]
        outside = rate > end
        share = report.slo_share(slo)
        now.x, now.y = [min(rate, 0.98 * end)], [rate * share]
        now.marker.symbol = "triangle-right" if outside else "square"
        now.name = f"now {fmt(rate, '/s')}{', outside' if outside else ''}"
        now.customdata = [f"now {fmt(rate)} requests/s: {share:.0%} in time"]
        figure.layout.xaxis2.range = [0, end]
        figure.layout.yaxis2.range = [0, 1.1 * curve.capacity_per_s]


def describe(setting: Setting) -> str:
    """The picture in words."""
    curve, report, slo = setting.curve, setting.report, setting.slo
    rate, knee = setting.rate_per_s, curve.knee_per_s(slo)
    share = report.slo_share(slo)
    ttft, tpot = report.percentiles("ttft_s", (50, 99)), report.percentiles("tpot_s", (50, 99))
    said = [
        f"{setting.model.name} on {setting.accelerator.name}, {fmt(rate)} request{'s' if rate != 1 else ''}/s of about "
        f"{setting.prompt_len:,} prompt and {setting.output_len:,} output tokens, at most {setting.max_batch_size} at "
        f"once, {fmt(setting.kv_budget_bytes, 'B', 3)} of KV cache:",
        f"median TTFT {fmt(ttft['p50'], 's', 2)}, 99% within {fmt(ttft['p99'], 's', 2)};",
        f"median TPOT {fmt(tpot['p50'], 's', 2)}, 99% within {fmt(tpot['p99'], 's', 2)}.",
        f"{share:.0%} of the requests are in time (TTFT up to {fmt(slo.ttft_s, 's')}, TPOT up to "
        f"{fmt(slo.tpot_s, 's')}): goodput {fmt(rate * share, '', 3)} requests/s.",
    ]
    if report.num_preemptions:
        said.append(f"{report.num_preemptions} times a running request lost its cache for lack of blocks.")
    if rate > curve.capacity_per_s:
        said.append(
            f"That is more than it can ever serve ({fmt(curve.capacity_per_s, '', 3)} requests/s): the queue grows as "
            "long as the load lasts."
        )
    if knee:
        where = "below" if rate < knee else "above"
        said.append(
            f"The knee, up to which nine in ten are in time for as long as the load lasts, is at {fmt(knee, '', 3)} "
            f"requests/s; this is {where}."
        )
    else:
        said.append("There is no knee: even at a third of what it can serve, more than one in ten is late.")
    return " ".join(said)


def table(setting: Setting) -> str:
    """The server at each rate, as an HTML table."""
    curve, slo = setting.curve, setting.slo
    rates = [*curve.rates_per_s.tolist(), setting.rate_per_s]
    reports = [*curve.reports, setting.report]
    rows = []
    for rate, report in sorted(zip(rates, reports, strict=True), key=lambda pair: pair[0]):
        share = report.slo_share(slo)
        times = [report.percentiles(name, (50, 99)) for name in ("ttft_s", "tpot_s")]
        cells = [fmt(time, "s", 2) for percentiles in times for time in percentiles.values()]
        rows.append([f"{fmt(rate, '', 3)}/s", *cells, f"{share:.0%}", f"{fmt(rate * share, '', 3)}/s"])
    header = ["arrival rate", "TTFT p50", "p99", "TPOT p50", "p99", "in time", "goodput"]
    return base.table_html(header, rows, f"{setting.model.name} on {setting.accelerator.name}")


class LoadExplorer(base.Explorer):
    """A server under load: TTFT and TPOT of its requests, and goodput against arrival rate with its knee.

    `model` is a key of the catalog or a ModelConfig of your own, `machine` joins the accelerators. It is simulated
    anew when a slider is let go. Further keyword arguments set the controls.
    """

    busy_note = "Simulating ..."

    def __init__(
        self, model: ModelConfig | str = "llama-3.1-8b", machine: Accelerator | None = None, **values: Any
    ) -> None:
        self._choices = base.Choices(model, machine, "h100-sxm", "bf16")

        def slider(description: str, options: list, value: float, **labels: Any) -> widgets.SelectionSlider:
            return base.slider(description, options, value, on_release=True, **labels)

        controls = {
            **self._choices.controls,
            "rate_per_s": slider("Requests/s", RATES, 10),
            "max_batch_size": slider("Batch limit", BATCH_LIMITS, 64),
            "token_budget": slider("Chunk (tokens)", TOKEN_BUDGETS, 512, labels={0: "whole prompts"}),
            "kv_percent": slider("KV share (%)", KV_SHARES, 90),
            "prompt_len": slider("Prompt (mean)", MEAN_LENS, 500),
            "output_len": slider("Output (mean)", MEAN_LENS, 150),
            "ttft_limit_s": slider("TTFT limit (s)", TTFT_LIMITS, 1),
            "tpot_limit_ms": slider("TPOT limit (ms)", TPOT_LIMITS, 50),
        }
        self.controls = controls
        self._problem = ""
        super().__init__(controls, _empty_figure(), values)

    @property
    def setting(self) -> Setting:
        """What the controls say now."""
        return Setting(**self._choices.values(self.controls))

    def redraw(self) -> str:
        setting = self.setting
        self._problem = ""
        try:
            update_load_figure(self.figure, setting)
        except ValueError as error:
            self._problem = (
                f"This cannot be served: {error}. Choose more memory or a larger share of it, a smaller model, or "
                "shorter requests."
            )
            return self._problem
        return describe(setting)

    def table(self) -> str:
        return "" if self._problem else table(self.setting)
