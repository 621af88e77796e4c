"""The roofline explorer: where decode, prefill and training of a model land under an accelerator's roof."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ipywidgets as widgets
import numpy as np
import plotly.graph_objects as go

from lessonlib import latency, roofline
from lessonlib.accelerators import Accelerator, get_accelerator, list_accelerators
from lessonlib.explorers import base
from lessonlib.kv_cache import cache_bytes
from lessonlib.models import WEIGHT_BITS, ModelConfig, get_model, list_models
from lessonlib.units import fmt

KV_BITS = [4, 8, 16, 32]
PHASES = {  # name: color, marker, where its label goes
    "decode": (base.BLUE, "circle", "bottom right"),
    "prefill": (base.RED, "square", "bottom center"),
    "training": (base.GREEN, "diamond", "top center"),
}
SIZES = (15, 19, 13)  # prefill and training may meet: one shows around the other
INTENSITY_RANGE = (1e-1, 3e5)  # FLOP/byte


@dataclass(frozen=True)
class Setting:
    """What the controls say."""

    model: ModelConfig
    accelerator: Accelerator
    dtype: str = "bf16"
    batch_size: int = 1
    context_len: int = 2048
    weight_bits: int = 16
    kv_bits: float = 16

    @cached_property
    def phases(self) -> dict[str, list[roofline.Operator]]:
        """The operators of each phase; prefill and training work on sequences of `context_len` tokens."""
        shape = (self.model, self.batch_size, self.context_len)
        return {
            "decode": roofline.decode_operators(*shape, self.weight_bits, self.kv_bits),
            "prefill": roofline.prefill_operators(*shape, self.weight_bits, self.kv_bits),
            "training": roofline.training_operators(*shape),
        }


def roofline_figure(setting: Setting) -> go.Figure:
    """The whole figure for a setting; `update_roofline_figure` changes it in place."""
    figure = base.new_figure("arithmetic intensity (FLOP/byte)", "attainable rate", showlegend=False)
    figure.add_scatter(name="roof", mode="lines", line={"color": base.BLACK, "width": 3})
    figure.add_scatter(
        name="ridge", mode="lines+text", line={"color": base.BLACK, "width": 1, "dash": "dot"}, hoverinfo="skip"
    )
    colors, symbols, positions = zip(*PHASES.values(), strict=True)
    figure.add_scatter(
        name="phases",
        mode="markers+text",
        marker={
            "color": colors,
            "symbol": symbols,
            "size": SIZES,
            "opacity": 1,
            "line": {"color": "white", "width": 1.5},
        },
        text=[f"<b>{name}</b>" for name in PHASES],
        textposition=positions,
        textfont={"color": colors, "size": 15},
    )
    figure.add_scatter(
        name="operators", mode="markers", marker={"size": 9, "opacity": 1, "line": {"width": 2}}, visible=False
    )
    figure.update_traces(hovertemplate="%{customdata}<extra></extra>", selector={"hoverinfo": None})
    base.log_ticks(figure.layout.xaxis, INTENSITY_RANGE, "")
    figure.layout.xaxis.range = np.log10(INTENSITY_RANGE).tolist()
    _draw_roof(figure, setting)
    update_roofline_figure(figure, setting)
    return figure


def update_roofline_figure(figure: go.Figure, setting: Setting, show_operators: bool = False) -> None:
    """Move the points (and, for another accelerator, the roof) in one update."""
    _, _, phases, operators = figure.data
    with figure.batch_update():
        if figure.layout.title.text != _title(setting):
            _draw_roof(figure, setting)
        _place(phases, [roofline.total(ops, name) for name, ops in setting.phases.items()], setting)
        if operators.visible != show_operators:
            operators.visible = show_operators
        if show_operators:
            cues = [PHASES[name][:2] for name, ops in setting.phases.items() for _ in ops]
            operators.marker.color = [color for color, _ in cues]
            operators.marker.symbol = [f"{symbol}-open" for _, symbol in cues]
            _place(operators, [op for ops in setting.phases.values() for op in ops], setting)


def _title(setting: Setting) -> str:
    return f"{setting.accelerator.name}, {setting.dtype}"


def _draw_roof(figure: go.Figure, setting: Setting) -> None:
    accelerator, dtype = setting.accelerator, setting.dtype
    ridge, peak = roofline.ridge_point(accelerator, dtype), accelerator.peak(dtype)
    corners = np.array([INTENSITY_RANGE[0], ridge, INTENSITY_RANGE[1]])
    heights = roofline.attainable_flops_per_s(corners, accelerator, dtype)
    source = base.hover_source(accelerator.source)
    said = f"{fmt(accelerator.memory_bandwidth, 'B/s')} of memory bandwidth, {fmt(peak, 'FLOP/s')} at most"
    roof, ridge_line = figure.data[0], figure.data[1]
    roof.x, roof.y, roof.customdata = corners, heights, [f"{accelerator.name}<br>{said}<br>{source}"] * 3
    ridge_line.x, ridge_line.y = [ridge, ridge], [heights[0] / 3, peak]
    ridge_line.text, ridge_line.textposition = [f" ridge {fmt(ridge, 'FLOP/B', 3)}", ""], "top right"
    base.log_ticks(figure.layout.yaxis, (heights[0] / 4, peak * 5), "FLOP/s")
    figure.layout.yaxis.range = [float(np.log10(heights[0] / 4)), float(np.log10(peak * 5))]
    figure.layout.title.text = _title(setting)


def _place(trace: Any, operators: list[roofline.Operator], setting: Setting) -> None:
    intensities = np.array([op.intensity for op in operators])
    trace.x = intensities
    trace.y = roofline.attainable_flops_per_s(intensities, setting.accelerator, setting.dtype)
    trace.customdata = [_hover(op, setting) for op in operators]


def _hover(op: roofline.Operator, setting: Setting) -> str:
    parts = [f"{fmt(size, 'B')} of {kind}" for kind, size in _bytes_by_kind(op).items() if size]
    source = base.hover_source(setting.model.source)
    return (
        f"<b>{op.name}</b>, {setting.model.name}<br>{fmt(op.flops, 'FLOP')} over {fmt(op.num_bytes, 'B')}: "
        f"{fmt(op.intensity, 'FLOP/B')}<br>{', '.join(parts)}<br>{source}"
    )


def _bytes_by_kind(op: roofline.Operator) -> dict[str, float]:
    return {"weights": op.weight_bytes, "KV cache": op.kv_bytes, "activations": op.activation_bytes}


def describe(setting: Setting) -> str:
    """The picture in words."""
    model, accelerator, dtype = setting.model, setting.accelerator, setting.dtype
    points = {name: roofline.total(ops, name) for name, ops in setting.phases.items()}
    regime = {name: roofline.bound_by(op.intensity, accelerator, dtype) for name, op in points.items()}
    decode, prefill = points["decode"], points["prefill"]
    bits: dict[str, Any] = {"weight_bits": setting.weight_bits, "kv_bits": setting.kv_bits}
    step = latency.decode_step(model, accelerator, setting.batch_size, setting.context_len, dtype=dtype, **bits)
    first = latency.prefill(model, accelerator, setting.context_len, setting.batch_size, dtype=dtype, **bits)
    requests = "1 request" if setting.batch_size == 1 else f"{setting.batch_size} requests"
    sentences = [
        f"{model.name} on {accelerator.name} ({dtype}, ridge {fmt(roofline.ridge_point(accelerator, dtype), '', 3)} "
        f"FLOP/B), {requests} of {setting.context_len:,} tokens:",
        f"decode is {regime['decode']} bound at {fmt(decode.intensity, 'FLOP/B', 3)}, a step takes "
        f"{fmt(step.total_s, 's', 3)}, at most {fmt(step.tokens_per_s, '', 3)} tokens/s;",
        f"prefill is {regime['prefill']} bound at {fmt(prefill.intensity, 'FLOP/B', 3)} and takes "
        f"{fmt(first.total_s, 's', 3)};",
        f"training in 16 bits is {regime['training']} bound at {fmt(points['training'].intensity, 'FLOP/B', 3)}.",
    ]
    needed = model.weight_bytes(setting.weight_bits) + cache_bytes(
        model, setting.context_len, setting.batch_size, setting.kv_bits
    )
    if accelerator.memory_bytes and needed > accelerator.memory_bytes:
        there = fmt(accelerator.memory_bytes, "B", 3)
        sentences.append(f"It would not fit: weights and cache need {fmt(needed, 'B', 3)}, there are {there}.")
    if setting.context_len > model.max_context:
        sentences.append(f"The model itself was made for {model.max_context:,} tokens at most.")
    return " ".join(sentences)


def table(setting: Setting) -> str:
    """The picture's numbers, operator by operator, as an HTML table."""
    header = ["operator", "FLOPs", *_bytes_by_kind(roofline.Operator("", 0)), "FLOP/byte"]
    rows = [
        [f"{phase}: {op.name}", fmt(op.flops, "FLOP", 3), *(fmt(b, "B", 3) for b in _bytes_by_kind(op).values()),
         fmt(op.intensity, "", 3)]
        for phase, operators in setting.phases.items()
        for op in [*operators, roofline.total(operators)]
    ]  # fmt: skip
    return base.table_html(header, rows, f"{setting.model.name} on {_title(setting)}")


class RooflineExplorer(base.Explorer):
    """Decode, prefill and training of a model under an accelerator's roof.

    `machine`, once measured, joins the accelerators as "This machine". Keyword arguments set the controls.
    """

    def __init__(self, machine: Accelerator | None = None, **values: Any) -> None:
        if machine and not set(machine.peak_flops) - {"fp4"}:
            raise ValueError(f"machine must have a peak rate to draw its roof, {machine.name} has none")
        self._accelerators = {a.name: a for a in ([machine] if machine else []) + _catalog()}
        models = {get_model(key).name: key for key in list_models()}
        controls = {
            "model": widgets.Dropdown(options=models, value="llama-2-7b", description="Model"),
            "accelerator": widgets.Dropdown(
                options=list(self._accelerators), value=get_accelerator("a100-80gb-sxm").name, description="Accelerator"
            ),
            "dtype": widgets.Dropdown(options=["bf16"], description="Arithmetic"),
            "show_operators": widgets.Checkbox(description="Show operators", indent=True),
            "batch_size": base.slider("Batch size", base.BATCH_SIZES, 1),
            "context_len": base.slider("Context (tokens)", base.CONTEXT_LENGTHS, 2048),
            "weight_bits": base.slider("Weight bits", list(WEIGHT_BITS), 16),
            "kv_bits": base.slider("KV bits", KV_BITS, 16),
        }
        controls["accelerator"].observe(self._offer_dtypes, names="value")
        self.controls = controls
        self._updating = True
        self._offer_dtypes()
        super().__init__(controls, roofline_figure(self.setting), values)

    @property
    def setting(self) -> Setting:
        """What the controls say now."""
        values = {name: control.value for name, control in self.controls.items() if name != "show_operators"}
        values["model"] = get_model(values["model"])
        values["accelerator"] = self._accelerators[values["accelerator"]]
        return Setting(**values)

    def redraw(self) -> str:
        setting = self.setting
        update_roofline_figure(self.figure, setting, self.controls["show_operators"].value)
        return describe(setting)

    def table(self) -> str:
        return table(self.setting)

    def _offer_dtypes(self, _: Any = None) -> None:
        """Offer only the arithmetic that the accelerator has a published peak for; keep the choice where possible."""
        control = self.controls["dtype"]
        dtypes = [d for d in self._accelerators[self.controls["accelerator"].value].peak_flops if d != "fp4"]
        before, self._updating = self._updating, True
        kept = control.value if control.value in dtypes else "bf16" if "bf16" in dtypes else dtypes[0]
        control.options = dtypes
        control.value = kept
        self._updating = before


def _catalog() -> list[Accelerator]:
    return [a for a in map(get_accelerator, list_accelerators()) if a.peak_flops]
