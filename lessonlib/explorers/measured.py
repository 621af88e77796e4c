"""Pictures of what was measured beside what was predicted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from lessonlib import roofline
from lessonlib.accelerators import Accelerator
from lessonlib.checks import check_number, check_values
from lessonlib.explorers import base
from lessonlib.explorers.pictures import LINE_STYLES
from lessonlib.quantization.ladder import LadderRow
from lessonlib.units import fmt


@dataclass(frozen=True)
class Point:
    """One measured time (s) with its range at an x, beside the prediction."""

    x: float
    seconds: float
    low_s: float
    high_s: float
    predicted_s: float


def times_picture(
    points: Sequence[Point], x_title: str, overhead_s: float = 0.0, y_title: str = "time"
) -> base.Picture:
    """Times against x on two logarithmic axes: measured with their range, predicted, and predicted + overhead.

    Raises ValueError for no points or times that are not finite.
    """
    check_number("overhead_s", overhead_s)
    figure = _times_figure({"": points}, x_title)
    figure.update_yaxes(title=y_title)
    x, predicted = [p.x for p in points], np.array([p.predicted_s for p in points])
    figure.add_scatter(
        x=x, y=predicted, name="predicted by the roofline", mode="lines", line={"color": base.BLUE, "width": 3}
    )
    if overhead_s > 0:
        figure.add_scatter(
            x=x,
            y=predicted + overhead_s,
            name=f"predicted + {fmt(overhead_s, 's', 3)} of overhead",
            mode="lines",
            line={"color": base.ORANGE, "width": 3, "dash": "dash"},
        )
    _add_measured(figure, points, "measured here", base.RED, "diamond")
    return base.Picture(figure, f"{x_title.capitalize()}: {_times_in_words(points)}.")


def compared_times_picture(series: Mapping[str, Sequence[Point]], x_title: str) -> base.Picture:
    """Two kinds of work in one picture, such as with and without a cache: measured and predicted times of each.

    Raises ValueError as `times_picture` does.
    """
    if len(series) != 2:
        raise ValueError(f"series must hold two kinds of work, got {len(series)}")
    figure = _times_figure(series, x_title)
    styles = ((base.RED, "diamond", "solid"), (base.BLUE, "circle", "dash"))
    for (name, points), (color, symbol, dash) in zip(series.items(), styles, strict=True):
        figure.add_scatter(
            x=[p.x for p in points],
            y=[p.predicted_s for p in points],
            name=f"{name}, predicted",
            mode="lines",
            line={"color": color, "width": 3, "dash": dash},
        )
        _add_measured(figure, points, f"{name}, measured", color, symbol)
    said = "; ".join(f"{name}, {_times_in_words(points)}" for name, points in series.items())
    return base.Picture(figure, f"{x_title.capitalize()}: {said}.")


def _times_figure(series: Mapping[str, Sequence[Point]], x_title: str) -> go.Figure:
    """Axes that hold all times of all series, and nothing on them yet."""
    if not series or not all(series.values()):
        raise ValueError("points must hold at least one measurement")
    points = [point for one in series.values() for point in one]
    x = check_values("x", [p.x for p in points])
    names = ("seconds", "predicted_s", "low_s", "high_s")
    everything = np.concatenate([check_values(name, [getattr(p, name) for p in points]) for name in names])
    figure = base.new_figure(x_title, "time", legend={"x": 0.02, "y": 0.98, "bgcolor": "rgba(255,255,255,0.8)"})
    room_for_legend = 3 ** len(series)
    limits = (float(everything.min()) / 1.6, float(everything.max()) * room_for_legend)
    base.log_ticks(figure.layout.yaxis, limits, "s")
    figure.update_yaxes(range=np.log10(limits).tolist())
    return figure.update_xaxes(type="log", tickvals=x, ticktext=[fmt(value) for value in x])


def _add_measured(figure: go.Figure, points: Sequence[Point], name: str, color: str, symbol: str) -> None:
    figure.add_scatter(
        x=[p.x for p in points],
        y=[p.seconds for p in points],
        name=name,
        mode="markers",
        marker={"color": color, "size": 11, "symbol": symbol},
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [p.high_s - p.seconds for p in points],
            "arrayminus": [p.seconds - p.low_s for p in points],
        },
    )


def _times_in_words(points: Sequence[Point]) -> str:
    said = [f"{fmt(p.x)}: {fmt(p.seconds, 's', 3)} measured, {fmt(p.predicted_s, 's', 3)} predicted" for p in points]
    return "; ".join(said)


def roofline_picture(
    accelerator: Accelerator, dtype: str, points: Sequence[tuple[str, float, float]], x_limits: tuple[float, float]
) -> base.Picture:
    """An accelerator's roof with measured points: (label, intensity in FLOP/byte, achieved FLOP/s)."""
    if not points or not all(
        check_number("intensity and rate", v, exclusive=True) for _, x, y in points for v in (x, y)
    ):
        raise ValueError("points must hold at least one measurement")
    figure = base.new_figure("arithmetic intensity (FLOP/byte)", "rate", title=accelerator.name, showlegend=False)
    ridge, peak = roofline.ridge_point(accelerator, dtype), accelerator.peak(dtype)
    corners = np.array([x_limits[0], ridge, x_limits[1]])
    heights = roofline.attainable_flops_per_s(corners, accelerator, dtype)
    figure.add_scatter(x=corners, y=heights, mode="lines", line={"color": base.BLACK, "width": 3}, name="roof")
    figure.add_trace(
        go.Scatter(
            x=[intensity for _, intensity, _ in points],
            y=[rate for _, _, rate in points],
            text=[label for label, _, _ in points],
            mode="markers+text",
            textposition="bottom right",
            marker={"color": base.RED, "size": 11, "symbol": "diamond"},
            name="measured here",
        )
    )
    limits = (min(float(heights[0]), *(rate for _, _, rate in points)) / 3, peak * 3)
    base.log_ticks(figure.layout.xaxis, x_limits, "")
    base.log_ticks(figure.layout.yaxis, limits, "FLOP/s")
    figure.update_yaxes(range=np.log10(limits).tolist())
    said = [
        f"{label} reaches {fmt(rate, 'FLOP/s', 3)}, "
        f"{rate / float(roofline.attainable_flops_per_s(intensity, accelerator, dtype)):.0%} of its roof"
        for label, intensity, rate in points
    ]
    return base.Picture(figure, f"Ridge at {fmt(ridge, 'FLOP/B', 3)}. " + "; ".join(said) + ".")


def ladder_picture(lines: Mapping[str, Sequence[LadderRow]]) -> base.Picture:
    """KL divergence from the unrounded model (nats per token) against what a weight takes, a line for each way.

    Raises ValueError for no lines, more than there are styles, a line without rows, and a row without any loss, which
    has no place on a logarithmic axis.
    """
    if not 1 <= len(lines) <= len(LINE_STYLES) or not all(lines.values()):
        raise ValueError(f"lines must hold 1 to {len(LINE_STYLES)} lines of one row or more, got {len(lines)}")
    figure = base.new_figure(
        "effective bits of a weight (scales and zero points included)", "KL divergence (nats per token)",
        legend={"x": 0.98, "y": 0.98, "xanchor": "right", "bgcolor": "rgba(255,255,255,0.8)"},
    )  # fmt: skip
    said, losses = [], []
    for (name, line), (color, dash, symbol) in zip(lines.items(), LINE_STYLES, strict=False):
        ordered = sorted(line, key=lambda row: row.matrix_bits)
        losses += [check_number("kl_divergence", row.kl_divergence, exclusive=True) for row in ordered]
        figure.add_scatter(
            x=[row.matrix_bits for row in ordered], y=[row.kl_divergence for row in ordered], name=name,
            mode="lines+markers", line={"color": color, "dash": dash, "width": 3}, marker={"symbol": symbol, "size": 9},
            customdata=[[row.name, row.perplexity, 100 * row.task_accuracy] for row in ordered],
            hovertemplate="%{customdata[0]}: %{x:.3g} bits, KL %{y:.3g} nats, perplexity %{customdata[1]:.4g}, "
            "task %{customdata[2]:.0f} %<extra></extra>",
        )  # fmt: skip
        ends = [
            f"{fmt(row.kl_divergence, digits=2)} at {row.matrix_bits:.3g} bits" for row in (ordered[-1], ordered[0])
        ]
        said.append(f"{name} from {' to '.join(ends)}")
    limits = (min(losses) / 2, max(losses) * 3)
    base.log_ticks(figure.layout.yaxis, limits, "")
    figure.update_yaxes(range=np.log10(limits).tolist())
    return base.Picture(figure, f"KL divergence in nats per token: {'; '.join(said)}.")
