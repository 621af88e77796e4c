"""The KV-growth explorer: how a model's cache grows with the context, beside the memory that is left for it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import plotly.graph_objects as go

from lessonlib import kv_cache
from lessonlib.accelerators import Accelerator
from lessonlib.explorers import base
from lessonlib.models import WEIGHT_BITS, ModelConfig
from lessonlib.units import fmt

CONTEXT_LENGTHS = [n for n in base.CONTEXT_LENGTHS if n >= 128]
KV_BITS = [4, 4.5, 8, 8.5, 16, 32]
CURVE = 2 ** np.arange(7, 17.3, 0.25)  # tokens; most windows are powers of two, so that the bends are on it
SIZES = (1e6, 2e13)  # bytes
STYLES = {  # variant: color, dash
    "MHA": (base.RED, "dash"),
    "GQA": (base.GREEN, "dashdot"),
    "MLA": (base.SKY, "longdash"),
    "MQA": (base.ORANGE, "dot"),
    "windowed": (base.PURPLE, "longdashdot"),
}


@dataclass(frozen=True)
class Setting:
    """What the controls say."""

    model: ModelConfig
    accelerator: Accelerator
    batch_size: int = 1
    context_len: int = 2048
    weight_bits: int = 16
    kv_bits: float = 16

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of weights that memory holds."""
        return self.model.weight_bytes(self.weight_bits)

    @cached_property
    def memory_bytes(self) -> float:
        """What the accelerator has, all of it."""
        return self.accelerator.memory_bytes or 0.0

    @cached_property
    def budget_bytes(self) -> float:
        """What the weights leave of the memory; below 0 where they do not fit."""
        return self.memory_bytes - self.weight_bytes

    @cached_property
    def cache_bytes(self) -> float:
        """The cache of the whole batch."""
        return kv_cache.cache_bytes(self.model, self.context_len, self.batch_size, self.kv_bits)

    @cached_property
    def longest_context(self) -> int | None:
        """Tokens per request at which memory ends, if it does."""
        if self.budget_bytes < 0:
            return 0
        return kv_cache.longest_context(self.model, self.budget_bytes, self.batch_size, self.kv_bits)

    def growth(self, model: ModelConfig) -> np.ndarray:
        """The batch's cache (bytes) along CURVE."""
        return kv_cache.cache_growth(model, CURVE, self.batch_size, self.kv_bits)


def kv_growth_figure(setting: Setting) -> go.Figure:
    """The whole figure for a setting; `update_kv_growth_figure` changes it in place."""
    figure = base.new_figure(
        "context length (tokens per request)",
        "memory",
        margin={"l": 90, "r": 195, "t": 30, "b": 60},
        legend={"x": 1.01, "y": 1, "font": {"size": 13}, "traceorder": "normal"},
    )
    figure.add_scatter(name="this model", mode="lines", line={"color": base.BLUE, "width": 5}, x=CURVE)
    for name, (color, dash) in STYLES.items():
        said = f"as {name}" if name.isupper() else "all layers windowed"
        figure.add_scatter(name=said, mode="lines", line={"color": color, "width": 2, "dash": dash}, x=CURVE)
    for name, dash, width in (("memory", "solid", 2.5), ("weights", "dot", 2), ("left", "dash", 2)):
        figure.add_scatter(
            name=name, mode="lines", line={"color": base.BLACK, "dash": dash, "width": width}, x=[CURVE[0], CURVE[-1]]
        )
    figure.add_scatter(name="here", mode="markers", marker={"color": base.BLUE, "size": 15, "symbol": "circle"})
    figure.add_scatter(name="end", mode="markers", marker={"color": base.BLACK, "size": 14, "symbol": "x"})
    figure.update_traces(hovertemplate="%{customdata}<extra></extra>")
    figure.update_xaxes(
        type="log", range=np.log10([CURVE[0], CURVE[-1]]).tolist(),
        tickvals=CONTEXT_LENGTHS[::2], ticktext=[f"{n:,}" for n in CONTEXT_LENGTHS[::2]],
    )  # fmt: skip
    base.log_ticks(figure.layout.yaxis, SIZES, "B")
    figure.update_yaxes(range=np.log10(SIZES).tolist())
    update_kv_growth_figure(figure, setting)
    return figure


def update_kv_growth_figure(figure: go.Figure, setting: Setting) -> None:
    """Move the curves, the lines and the two markers in one update."""
    this, *others = figure.data[: 1 + len(STYLES)]
    memory, weights, left, here, end = figure.data[1 + len(STYLES) :]
    variants = kv_cache.attention_variants(setting.model)
    with figure.batch_update():
        _draw(this, setting, setting.model, setting.model.name)
        for trace, name in zip(others, STYLES, strict=True):
            _draw(trace, setting, variants[name], f"{setting.model.name}, {trace.name}")
        _level(memory, setting.memory_bytes, f"memory of {setting.accelerator.name}", "memory")
        _level(weights, setting.weight_bytes, f"weights in {setting.weight_bits} bits", "weights")
        _level(left, setting.budget_bytes, "what the weights leave for the cache", "left")
        here.x, here.y = [setting.context_len], [setting.cache_bytes]
        here.name = f"cache now {fmt(setting.cache_bytes, 'B', 3)}"
        here.customdata = [_hover(setting, setting.model, setting.context_len, setting.cache_bytes)]
        ends = setting.longest_context
        inside = ends is not None and CURVE[0] <= ends <= CURVE[-1]
        end.x, end.y = ([ends], [setting.budget_bytes]) if inside else ([None], [None])
        end.name = f"ends at {ends:,} tokens" if ends else "no end" if ends is None else "no room"
        end.customdata = [f"memory ends at {ends or 0:,} tokens per request"]


def _draw(trace: Any, setting: Setting, model: ModelConfig, name: str) -> None:
    sizes = setting.growth(model)
    trace.y = sizes
    trace.customdata = [f"{name}<br>{x:,.0f} tokens: {fmt(y, 'B')}" for x, y in zip(CURVE, sizes, strict=True)]


def _level(trace: Any, num_bytes: float, meaning: str, short: str) -> None:
    shown = num_bytes > 0
    trace.y = [num_bytes, num_bytes] if shown else [None, None]
    trace.name = f"{short} {fmt(num_bytes, 'B', 3)}" if shown else f"{short}: none"
    trace.customdata = [f"{meaning}: {fmt(num_bytes, 'B')}"] * 2


def _hover(setting: Setting, model: ModelConfig, tokens: int, num_bytes: float) -> str:
    return (
        f"<b>{model.name}</b>, {setting.batch_size} x {tokens:,} tokens: {fmt(num_bytes, 'B')}<br>"
        f"{fmt(kv_cache.bytes_per_token(model, setting.kv_bits), 'B')} a token<br>{base.hover_source(model.source)}"
    )


def describe(setting: Setting) -> str:
    """The picture in words."""
    model, tokens, budget = setting.model, setting.context_len, setting.budget_bytes
    kind = f"{model.attention_kind}, "
    if model.kv_lora_rank:
        kind += f"{model.kv_values_per_token_per_layer} values a token and layer"
    else:
        kind += f"{model.num_kv_heads} KV heads for {model.num_heads} query heads"
    per_token = fmt(kv_cache.bytes_per_token(model, setting.kv_bits), "B")
    requests = f"1 request of {tokens:,} tokens keeps" if setting.batch_size == 1 else (
        f"{setting.batch_size} requests of {tokens:,} tokens keep"
    )  # fmt: skip
    said = [f"{model.name} ({kind}) adds {per_token} per token."]
    if model.num_windowed_layers:
        layers = f"{model.num_windowed_layers} of its {model.num_layers} layers"
        layers = "All its layers" if model.num_windowed_layers == model.num_layers else layers
        said.append(f"{layers} look back {model.sliding_window:,} tokens only.")
    said.append(
        f"{requests} {fmt(setting.cache_bytes, 'B', 3)}, beside {fmt(setting.weight_bytes, 'B', 3)} of weights in the "
        f"{fmt(setting.memory_bytes, 'B', 3)} of {setting.accelerator.name}."
    )
    if budget < 0:
        said.append(f"The weights alone do not fit: they are {fmt(-budget, 'B', 3)} too large.")
    else:
        fit = kv_cache.requests_that_fit(model, budget, tokens, setting.kv_bits)
        ends = setting.longest_context
        if ends is None:
            said.append("Memory never ends: every layer's cache stops growing.")
        else:
            each = " each" if setting.batch_size > 1 else ""
            said.append(f"Memory ends at {ends:,} tokens{each}.")
        if fit:
            said.append(f"At {tokens:,} tokens {fit:,} request{'s fit' if fit > 1 else ' fits'}.")
        else:
            one = kv_cache.cache_bytes(model, tokens, 1, setting.kv_bits)
            said.append(f"Not one request of {tokens:,} tokens fits: {fmt(one - budget, 'B', 3)} are missing.")
    if tokens > model.max_context:
        said.append(f"The model itself was made for {model.max_context:,} tokens at most.")
    return " ".join(said)


def table(setting: Setting) -> str:
    """The curves as an HTML table."""
    curves = {"this model": setting.model, **kv_cache.attention_variants(setting.model)}
    sizes = [
        kv_cache.cache_growth(model, CONTEXT_LENGTHS, setting.batch_size, setting.kv_bits) for model in curves.values()
    ]
    rows = [
        [f"{tokens:,} tokens", *(fmt(size, "B", 3) for size in row)]
        for tokens, row in zip(CONTEXT_LENGTHS, np.transpose(sizes), strict=True)
    ]
    caption = f"Cache of {setting.batch_size} x {setting.model.name} in {setting.kv_bits} bits"
    return base.table_html(["context", *curves], rows, caption)


class KVGrowthExplorer(base.Explorer):
    """A model's cache against its context, as published and with other kinds of attention, and where memory ends.

    `model` is a key of the catalog or a ModelConfig of your own, which then joins the list, as `machine` joins the
    accelerators. Further keyword arguments set the controls.
    """

    def __init__(
        self, model: ModelConfig | str = "llama-3.1-8b", machine: Accelerator | None = None, **values: Any
    ) -> None:
        self._choices = base.Choices(model, machine, "a100-80gb-sxm")
        controls = {
            **self._choices.controls,
            "context_len": base.slider("Context (tokens)", CONTEXT_LENGTHS, 8192),
            "batch_size": base.slider("Batch size", base.BATCH_SIZES, 4),
            "kv_bits": base.slider("KV bits", KV_BITS, 16),
            "weight_bits": base.slider("Weight bits", list(WEIGHT_BITS), 16),
        }
        self.controls = controls
        super().__init__(controls, kv_growth_figure(self.setting), values)

    @property
    def setting(self) -> Setting:
        """What the controls say now."""
        return Setting(**self._choices.values(self.controls))

    def redraw(self) -> str:
        update_kv_growth_figure(self.figure, self.setting)
        return describe(self.setting)

    def table(self) -> str:
        return table(self.setting)
