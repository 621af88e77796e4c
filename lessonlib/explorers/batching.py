"""The batching explorer: the same requests in static and in continuous batches, one timeline above the other."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ipywidgets as widgets
import numpy as np
import plotly.graph_objects as go

from lessonlib.batching import (
    REFERENCE_LENS,
    Lognormal,
    Timeline,
    fewest_steps,
    read_lengths,
    simulate,
)
from lessonlib.explorers import base

LANES = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64]
COUNTS = [4, 8, 12, 16, 24, 32, 48, 64, 100, 150, 200]
MEAN_LEN, SPREAD, LONGEST = 60, 1.2, 400  # of random lengths, in tokens
SEEDS = list(range(10))
POLICIES = ("static", "continuous")
BARS, NUMBERS, IDLE = (base.BLUE, base.SKY), ("white", base.BLACK), "#eeeeee"  # neighbors in a lane take turns
LABELED_LANES = 8  # with more, a lane is too narrow for a number
PANELS = {"static": (0.56, 1.0), "continuous": (0.0, 0.44)}  # share of the height


@dataclass(frozen=True)
class Setting:
    """What the controls say."""

    output_lens: tuple[int, ...] = REFERENCE_LENS
    lanes: int = 4

    @cached_property
    def timelines(self) -> dict[str, Timeline]:
        """The same requests under both policies."""
        return {policy: simulate(self.output_lens, self.lanes, policy) for policy in ("static", "continuous")}


def random_lengths(count: int, seed: int) -> tuple[int, ...]:
    """Output lengths (tokens) as chats have them: most of them short, a few very long."""
    drawn = Lognormal(MEAN_LEN, SPREAD, LONGEST).draw(np.random.default_rng(seed), count)
    return tuple(drawn.tolist())


def batching_figure(setting: Setting) -> go.Figure:
    """The whole figure for a setting; `update_batching_figure` changes it in place."""
    figure = base.new_figure(
        "", "lane", height=560, barmode="overlay", bargap=0.12,
        margin={"l": 70, "r": 20, "t": 60, "b": 60},
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.12, "yanchor": "top", "font": {"size": 13}},
        uniformtext={"minsize": 11, "mode": "hide"},
        xaxis={"anchor": "y2", "tickformat": ",", "showgrid": True, "gridcolor": "#eeeeee",
               "title": "step (each running request gets one token)"},
        yaxis={"domain": PANELS["static"], "showgrid": False, "title": "lane"},
        yaxis2={"domain": PANELS["continuous"], "showgrid": False, "title": "lane", "anchor": "x"},
    )  # fmt: skip
    for policy, axis in zip(POLICIES, ("y", "y2"), strict=True):
        first = policy == "static"
        figure.add_bar(
            name="request (its number)", orientation="h", yaxis=axis, showlegend=first, legendgroup="request",
            textposition="inside", insidetextanchor="middle", textangle=0, insidetextfont={"size": 13},
            marker={"line": {"color": "white"}},
        )  # fmt: skip
        figure.add_bar(
            name="idle lane", orientation="h", yaxis=axis, showlegend=first, legendgroup="idle",
            marker={
                "color": IDLE, "line": {"width": 0},
                "pattern": {"shape": "/", "fgcolor": "#999999", "bgcolor": IDLE, "size": 7, "solidity": 0.25},
            },
        )  # fmt: skip
        figure.add_scatter(
            name="all done", mode="lines", yaxis=axis, showlegend=first, legendgroup="done", hoverinfo="skip",
            line={"color": base.BLACK, "width": 2, "dash": "dash"},
        )  # fmt: skip
        figure.add_annotation(
            xref="paper", yref="paper", x=0, y=PANELS[policy][1], xanchor="left", yanchor="bottom",
            showarrow=False, font={"size": 14},
        )  # fmt: skip
    figure.update_traces(hovertemplate="%{customdata}<extra></extra>", selector={"type": "bar"})
    update_batching_figure(figure, setting)
    return figure


def update_batching_figure(figure: go.Figure, setting: Setting) -> None:
    """Draw both timelines in one update."""
    longest = max(timeline.steps for timeline in setting.timelines.values())
    lanes = setting.lanes
    ticks = list(range(1, lanes + 1)) if lanes <= LABELED_LANES else [1, *range(lanes // 4, lanes + 1, lanes // 4)]
    with figure.batch_update():
        figure.layout.xaxis.range = [0, longest * 1.02]
        for number, policy in enumerate(POLICIES):
            timeline = setting.timelines[policy]
            requests, idle, done = figure.data[3 * number : 3 * number + 3]
            _draw_requests(requests, setting, timeline)
            _draw_idle(idle, timeline)
            done.x, done.y = [timeline.steps] * 2, [0.4, lanes + 0.6]
            axis = figure.layout.yaxis if policy == "static" else figure.layout.yaxis2
            axis.range, axis.tickvals = [lanes + 0.6, 0.4], ticks
            figure.layout.annotations[
                number
            ].text = f"<b>{policy}</b>: {timeline.steps:,} steps, {timeline.utilization:.1%} of the lanes' steps used"


def _draw_requests(trace: Any, setting: Setting, timeline: Timeline) -> None:
    spans = timeline.spans
    lengths = spans["end"] - spans["start"]
    trace.base, trace.x, trace.y = spans["start"], lengths, spans["lane"] + 1
    trace.text = [str(number + 1) for number in spans["request"]] if setting.lanes <= LABELED_LANES else None
    trace.marker.color = [BARS[turn % 2] for turn in timeline.turns]
    trace.insidetextfont.color = [NUMBERS[turn % 2] for turn in timeline.turns]
    trace.marker.line.width = 1 if setting.lanes <= LABELED_LANES else 0.3
    trace.customdata = [
        f"<b>request {request + 1}</b>: {tokens:,} tokens<br>lane {lane + 1}, steps {start + 1:,} to {end:,}"
        for (request, lane, start, end), tokens in zip(spans.tolist(), lengths.tolist(), strict=True)
    ]


def _draw_idle(trace: Any, timeline: Timeline) -> None:
    idle = timeline.idle
    trace.base, trace.x, trace.y = idle["start"], idle["end"] - idle["start"], idle["lane"] + 1
    trace.customdata = [f"lane {lane + 1} is idle for {end - start:,} steps" for lane, start, end in idle.tolist()]


def describe(setting: Setting) -> str:
    """The picture in words."""
    lens, lanes = setting.output_lens, setting.lanes
    static, continuous = (setting.timelines[policy] for policy in POLICIES)
    each = f"{min(lens):,} to {max(lens):,}" if min(lens) < max(lens) else f"{lens[0]:,}"
    requests = "1 request" if len(lens) == 1 else f"{len(lens)} requests"
    said = [
        f"{requests} of {each} tokens ({sum(lens):,} in all) on {lanes} lane{'s' if lanes > 1 else ''}.",
        f"Static batching takes {static.steps:,} steps and uses {static.utilization:.1%} of what the lanes could make;",
        f"continuous batching takes {continuous.steps:,} steps and uses {continuous.utilization:.1%}.",
    ]
    if static.steps == continuous.steps:
        said.append("Here both take equally long.")
    else:
        said.append(f"That is {static.steps / continuous.steps:.2f} times as many tokens a step.")
    fewest = fewest_steps(lens, lanes)
    why = "the longest request" if fewest == max(lens) else "all lanes busy in every step"
    said.append(f"No order of the requests takes fewer than {fewest:,} ({why}).")
    return " ".join(said)


def table(setting: Setting) -> str:
    """When each request ran, as an HTML table."""
    static, continuous = (setting.timelines[policy].spans for policy in POLICIES)
    rows = [
        [f"request {request + 1}", f"{end - start:,}", str(lane + 1), f"{start + 1:,} to {end:,}",
         str(lane_2 + 1), f"{start_2 + 1:,} to {end_2:,}"]
        for (request, lane, start, end), (_, lane_2, start_2, end_2) in zip(
            static.tolist(), continuous.tolist(), strict=True
        )
    ]  # fmt: skip
    header = ["request", "tokens", "static: lane", "steps", "continuous: lane", "steps"]
    return base.table_html(header, rows, f"{len(rows)} requests on {setting.lanes} lanes")


class BatchingExplorer(base.Explorer):
    """Static and continuous batching of the same requests, drawn as timelines of their lanes.

    `lengths` is "reference" (the course's sixteen), "random" (`num_requests` of them, by `seed`) or "own"
    (`own_list`, as typed). Keyword arguments set the controls.
    """

    def __init__(self, **values: Any) -> None:
        controls = {
            "lengths": widgets.Dropdown(
                options=[("the reference sixteen", "reference"), ("random", "random"), ("your own list", "own")],
                value="reference",
                description="Lengths",
            ),
            "lanes": base.slider("Lanes", LANES, 4),
            "num_requests": base.slider("Requests", COUNTS, 32),
            "seed": base.slider("Seed", SEEDS, 0),
            "own_list": widgets.Text(
                value=", ".join(map(str, REFERENCE_LENS)),
                description="Your own list",
                placeholder="tokens of each request, such as 200, 12, 8",
                continuous_update=False,
            ),
        }
        self._output_lens: tuple[int, ...] = REFERENCE_LENS  # the last that could be read
        self._problem = ""
        super().__init__(controls, batching_figure(Setting()), values)

    @property
    def setting(self) -> Setting:
        """What the controls say now; with a list that cannot be read, the lengths before it."""
        return Setting(self._output_lens, self.controls["lanes"].value)

    def redraw(self) -> str:
        lengths = self.controls["lengths"].value
        self.controls["num_requests"].disabled = self.controls["seed"].disabled = lengths != "random"
        self.controls["own_list"].disabled = lengths != "own"
        self._problem = ""
        if lengths == "reference":
            self._output_lens = REFERENCE_LENS
        elif lengths == "random":
            self._output_lens = random_lengths(self.controls["num_requests"].value, self.controls["seed"].value)
        else:
            try:
                self._output_lens = read_lengths(self.controls["own_list"].value)
            except ValueError as error:
                self._problem = f"Your own list cannot be used: {error}. The picture shows the requests before it. "
        update_batching_figure(self.figure, self.setting)
        return self._problem + describe(self.setting)

    def table(self) -> str:
        return table(self.setting)
