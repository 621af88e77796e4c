"""The quantization-error explorer: a weight matrix on its grid, the error of each channel, and its size in bits."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ipywidgets as widgets
import numpy as np
import plotly.graph_objects as go

from lessonlib import quantization
from lessonlib.explorers import base
from lessonlib.quantization import QuantizedTensor
from lessonlib.units import fmt

REFERENCE = "the reference matrix"
GROUP_SIZES = [8, 16, 32, 64, 128, 192]
CHANNELS_DRAWN = 96  # of a large layer, evenly spaced
VALUES_DRAWN = 300  # of the channel that is looked at


@dataclass(frozen=True, eq=False)
class Setting:
    """What the controls say."""

    weight: np.ndarray
    """(outputs, inputs); a row is a channel"""
    bits: int = 8
    granularity: quantization.Granularity = "tensor"
    group_size: int = 32
    symmetric: bool = True
    channel: int = 0

    @cached_property
    def quantized(self) -> QuantizedTensor:
        """The matrix in codes; a group that does not divide the columns is filled up with zeros."""
        group_size = self.group_size if self.granularity == "group" else None
        return quantization.quantize(self.weight, self.bits, self.granularity, group_size, self.symmetric, pad=True)

    @cached_property
    def approx(self) -> np.ndarray:
        """The matrix that the codes stand for."""
        return self.quantized.dequantize()

    @cached_property
    def errors(self) -> np.ndarray:
        """Mean relative error of each channel, in percent."""
        return 100 * quantization.channel_errors(self.weight, self.approx)


def quantization_figure(setting: Setting) -> go.Figure:
    """The whole figure for a setting; `update_quantization_figure` changes it in place."""
    figure = base.new_figure(
        "weight",
        "after rounding",
        showlegend=False,
        margin={"l": 80, "r": 20, "t": 50, "b": 60},
        xaxis2={"title": "channel (row)", "anchor": "y2", "showgrid": True, "gridcolor": "#eeeeee"},
        yaxis2={
            "title": "mean relative error", "anchor": "x2", "showgrid": True, "gridcolor": "#eeeeee",
            "range": [0, 105], "ticksuffix": " %",
        },
    )  # fmt: skip
    figure.update_layout(xaxis_domain=[0, 0.42], xaxis2_domain=[0.58, 1], xaxis_nticks=5, yaxis_nticks=6)
    figure.add_scatter(name="unchanged", mode="lines", line={"color": "#999999", "dash": "dot"}, hoverinfo="skip")
    figure.add_scatter(name="values", mode="markers", marker={"color": base.BLUE, "size": 6, "symbol": "circle"})
    figure.add_scatter(name="channels", mode="markers", marker={"color": base.BLUE, "size": 6}, xaxis="x2", yaxis="y2")
    figure.add_scatter(
        name="looked at", mode="markers", xaxis="x2", yaxis="y2",
        marker={"color": base.RED, "size": 13, "symbol": "diamond-open", "line": {"width": 3}},
    )  # fmt: skip
    figure.update_traces(hovertemplate="%{x:.4g}: %{y:.4g}<extra></extra>", selector={"mode": "markers"})
    for x, text in ((0, "values of the channel looked at"), (0.58, "all channels")):
        figure.add_annotation(
            text=text, x=x, y=1.1, xref="paper", yref="paper", showarrow=False, xanchor="left", font={"size": 15}
        )
    update_quantization_figure(figure, setting)
    return figure


def update_quantization_figure(figure: go.Figure, setting: Setting) -> None:
    """Move both clouds in one update."""
    unchanged, values, channels, looked_at = figure.data
    row = setting.channel
    largest = np.abs(setting.weight[row]).argmax()  # it decides the scale, and how far the axes reach
    columns = np.union1d(_spread(setting.weight.shape[1], VALUES_DRAWN), largest)
    drawn = _spread(len(setting.weight), CHANNELS_DRAWN)
    before, after = setting.weight[row, columns], setting.approx[row, columns]
    most = float(np.abs(setting.weight[row, largest])) * 1.1 or 1.0
    few = len(drawn) < len(setting.weight)
    with figure.batch_update():
        unchanged.x = unchanged.y = [-most, most]
        values.x, values.y = before, after
        channels.x, channels.y = drawn, setting.errors[drawn]
        figure.layout.annotations[1].text = f"{len(drawn)} of the channels" if few else "all channels"
        looked_at.x, looked_at.y = [row], [setting.errors[row]]
        figure.layout.xaxis.range = figure.layout.yaxis.range = [-most, most]
        figure.layout.xaxis2.range = [-0.04 * len(setting.weight), 1.04 * len(setting.weight) - 1]


def _spread(count: int, most: int) -> np.ndarray:
    """At most `most` of the numbers 0 to count - 1, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def describe(setting: Setting, name: str) -> str:
    """The picture in words."""
    q, (rows, columns) = setting.quantized, setting.weight.shape
    error = quantization.mean_relative_error(setting.weight, setting.approx)
    kind = "symmetric" if setting.symmetric else "asymmetric"
    scales = {"tensor": "one scale for all", "channel": "one scale per channel"}.get(
        setting.granularity, f"one scale per group of {setting.group_size}"
    )
    said = [f"{name[0].upper()}{name[1:]} ({rows} x {columns}) in {setting.bits} bits, {kind}, {scales}:"]
    said.append(f"a weight is off by {fmt(100 * error, '%')} of its size on average")
    if np.any(setting.weight):
        distance = quantization.sqnr_db(setting.weight, setting.approx)
        said[-1] += " (nothing is lost)" if np.isinf(distance) else f", the signal is {distance:.1f} dB above the error"
    said[-1] += "."
    said.append(
        f"With its {q.scale.size:,} scale{'s' * (q.scale.size > 1)} of 16 bits it takes {q.effective_bits:.4g} bits a "
        f"weight: {fmt(q.num_bytes, 'B')} instead of {fmt(2 * q.codes.size, 'B')} in 16 bits."
    )
    lost = int(np.count_nonzero((setting.approx == 0) & (setting.weight != 0)))
    if lost:
        said.append(f"{fmt(100 * lost / q.codes.size, '%', 3)} of the weights have become 0.")
    rest = columns % setting.group_size
    if setting.granularity == "group" and rest:
        groups = -(-columns // setting.group_size)
        said.append(
            f"{setting.group_size} does not divide {columns}: of {groups} groups in a row the last holds {rest}."
        )
    return " ".join(said)


def table(setting: Setting) -> str:
    """The channels drawn, as an HTML table."""
    rows = [
        [f"channel {row}", fmt(float(np.abs(setting.weight[row]).max())), fmt(setting.errors[row], "%")]
        for row in _spread(len(setting.weight), CHANNELS_DRAWN).tolist()
    ]
    return base.table_html(["channel", "largest weight", "mean relative error"], rows, "Error of each channel")


class QuantizationErrorExplorer(base.Explorer):
    """Round a weight matrix to a few bits: its values on their grid, and the error of each channel.

    `layers` are further matrices (outputs, inputs) by name, such as those of a real model. Keyword arguments set the
    controls. Raises ValueError for a layer that is not a matrix of finite numbers.
    """

    def __init__(self, layers: Mapping[str, np.ndarray] | None = None, **values: Any) -> None:
        self._weights = {REFERENCE: quantization.reference_matrix(), **(layers or {})}
        for name, weight in self._weights.items():
            if np.ndim(weight) != 2 or not np.all(np.isfinite(weight)):
                raise ValueError(f"layers must hold matrices of finite numbers, {name} is not one")
        controls = {
            "weights": widgets.Dropdown(options=list(self._weights), description="Weights"),
            "granularity": widgets.Dropdown(
                options=[("one scale for all", "tensor"), ("one per channel", "channel"), ("one per group", "group")],
                value="tensor",
                description="Scales",
            ),
            "bits": base.slider("Bits", list(quantization.BITS), 8),
            "group_size": base.slider("Group size", GROUP_SIZES, 32),
            "symmetric": widgets.Checkbox(value=True, description="Symmetric", indent=True),
            "channel": widgets.IntSlider(value=0, min=0, max=15, description="Look at channel"),
        }
        controls["weights"].observe(self._offer_sizes, names="value")
        self.controls = controls
        self._updating = True
        self._offer_sizes()
        super().__init__(controls, quantization_figure(self.setting), values)

    @property
    def setting(self) -> Setting:
        """What the controls say now."""
        values = {name: control.value for name, control in self.controls.items()}
        return Setting(self._weights[values.pop("weights")], **values)

    def redraw(self) -> str:
        setting = self.setting
        update_quantization_figure(self.figure, setting)
        return describe(setting, self.controls["weights"].value)

    def table(self) -> str:
        return table(self.setting)

    def _offer_sizes(self, _: Any = None) -> None:
        """Only channels and group sizes that the chosen matrix has room for; keep the choice where possible."""
        rows, columns = self._weights[self.controls["weights"].value].shape
        before, self._updating = self._updating, True
        self.controls["channel"].max = rows - 1
        control = self.controls["group_size"]
        sizes = [size for size in GROUP_SIZES if size <= columns] or GROUP_SIZES[:1]
        kept = min(control.value, sizes[-1])
        control.options = [(str(size), size) for size in sizes]
        control.value = kept
        self._updating = before
