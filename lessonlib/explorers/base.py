"""What every explorer shares: colors, the figure's frame, and the thin binding of controls to one figure.

An explorer is built once and then only updated: a pure function computes, `update(...)` assigns inside one
`batch_update`, so that a slider move is one message to the browser.
"""

import html
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from textwrap import wrap
from types import MappingProxyType
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
from traitlets import TraitError

from lessonlib.accelerators import Accelerator, get_accelerator, list_accelerators
from lessonlib.display.outputs import storing_outputs
from lessonlib.models import ModelConfig, get_model, list_models
from lessonlib.units import fmt

# Okabe and Ito's colors, which people with any color vision tell apart; a marker or dash always repeats the cue.
BLUE, ORANGE, GREEN, PURPLE, SKY, RED, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#222222",
)
FIGURE_SIZE = {"width": 820, "height": 460}
CAPTION_COLUMNS = 108
FEWEST_TICKS = 4

# What the sliders offer.
BATCH_SIZES = [*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512]
CONTEXT_LENGTHS = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]


def new_figure(x_title: str, y_title: str, **layout: Any) -> go.Figure:
    """An empty figure in the course's frame, with a title (and so a unit) on both axes."""
    return go.Figure(
        layout={
            "template": "simple_white",
            "font": {"size": 14, "color": BLACK},
            "margin": {"l": 110, "r": 20, "t": 40, "b": 60},
            "hoverlabel": {"align": "left"},
            "xaxis": {"title": x_title, "showgrid": True, "gridcolor": "#eeeeee"},
            "yaxis": {"title": y_title, "showgrid": True, "gridcolor": "#eeeeee"},
            **FIGURE_SIZE,
        }
    ).update_layout(layout)


def stored_picture(figure: go.Figure, readout: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The figure as a PNG with its readout as the caption, the alternative text and the plain text."""
    import base64  # noqa: PLC0415

    import kaleido  # noqa: PLC0415

    lines = wrap(readout, CAPTION_COLUMNS)
    picture = go.Figure(figure)
    bottom, height = picture.layout.margin.b, picture.layout.height
    extra = 18 * len(lines) + 14
    picture.update_layout(height=height + extra, margin_b=bottom + extra)
    picture.add_annotation(
        text="<br>".join(lines), xref="paper", yref="paper", x=0, y=0, yshift=-bottom,
        xanchor="left", yanchor="top", align="left", showarrow=False, font_size=13,
    )  # fmt: skip
    png = kaleido.calc_fig_sync(picture, opts={"format": "png", "scale": 1})
    return {"image/png": base64.b64encode(png).decode(), "text/plain": readout}, {"image/png": {"alt": readout}}


def log_ticks(axis: Any, limits: tuple[float, float], unit: str) -> None:
    """Make an axis logarithmic with labeled ticks: 1 GFLOP/s, 10 GFLOP/s, ..., and 2 and 5 where those are few."""
    powers = range(math.floor(math.log10(limits[0])), math.ceil(math.log10(limits[1])) + 1)
    for steps in ((1,), (1, 2, 5)):
        ticks = [step * 10.0**power for power in powers for step in steps]
        shown = [tick for tick in ticks if limits[0] <= tick <= limits[1] * 1.001]
        if len(shown) >= FEWEST_TICKS:
            break
    axis.update(type="log", tickvals=shown, ticktext=[fmt(tick, unit) for tick in shown])


class Picture:
    """A finished figure with its readout: interactive in a notebook, a PNG where outputs are stored."""

    def __init__(self, figure: go.Figure, readout: str) -> None:
        self.figure = figure
        self.readout = readout

    def __repr__(self) -> str:
        return self.readout

    def _repr_mimebundle_(self, **_: Any) -> Any:
        if storing_outputs():
            return stored_picture(self.figure, self.readout)
        plotly = self.figure.to_plotly_json()
        return {"application/vnd.plotly.v1+json": plotly, "text/plain": self.readout}


def live_figure(figure: go.Figure) -> go.FigureWidget | widgets.Widget:
    """The figure as a widget that can be updated in place, or, without anywidget, a message that says what to do."""
    try:
        return go.FigureWidget(figure)
    except ImportError:
        return widgets.HTML(
            "<p role='alert'>The picture cannot be drawn: the package <code>anywidget</code> is missing from this "
            "environment. Run <code>make lab</code> again, or <code>pip install anywidget</code>, and restart "
            "JupyterLab. Until then the readout and the table below say what the picture would show.</p>"
        )


# ipywidgets' sliders have neither a name nor their value's text for a screen reader, and plotly's picture has no words.
_ACCESSIBLE_NAMES = """
function render({ el }) {
  const explorer = () => el.closest('.lessonlib-explorer');
  const set = (node, name, value) => { if (node && node.getAttribute(name) !== value) node.setAttribute(name, value); };
  const name = () => {
    const box = explorer();
    if (!box) return;
    for (const slider of box.querySelectorAll('.widget-slider')) {
      const handle = slider.querySelector('[role=slider]');
      set(handle, 'aria-label', slider.querySelector('.widget-label').textContent);
      set(handle, 'aria-valuetext', slider.querySelector('.widget-readout').textContent);
    }
    const readout = box.querySelector('[role=status]');
    const picture = box.querySelector('.js-plotly-plot');
    set(picture, 'role', 'img');
    if (readout) set(picture, 'aria-label', readout.textContent);
  };
  let watcher;
  const start = () => {
    if (!explorer()) { setTimeout(start, 200); return; }
    name();
    watcher = new MutationObserver(name);
    watcher.observe(explorer(), { subtree: true, childList: true, attributeFilter: ['aria-valuetext'] });
  };
  start();
  return () => watcher && watcher.disconnect();
}
export default { render };
"""


def accessible_names() -> list[widgets.Widget]:
    """An invisible widget that names the sliders and the picture of the explorer around it, for screen readers."""
    try:
        import anywidget  # noqa: PLC0415  (the explorer works without it, see live_figure)
    except ImportError:
        return []
    return [anywidget.AnyWidget(_esm=_ACCESSIBLE_NAMES)]


def slider(
    description: str,
    options: list,
    value: float,
    on_release: bool = False,
    labels: Mapping[float, str] = MappingProxyType({}),
) -> widgets.SelectionSlider:
    """A slider over a list of numbers, shown with thousands set apart, or as `labels` says.

    `on_release`: the value changes when the slider is let go, not while it moves. For pictures that take a while.
    """
    labeled = [(labels.get(option, f"{option:,}"), option) for option in options]
    return widgets.SelectionSlider(
        options=labeled, value=value, description=description, continuous_update=not on_release
    )


def hover_source(source: str) -> str:
    """Where a figure comes from, broken into lines for the box that follows the pointer."""
    return "<br>".join(wrap(f"source: {source}", 60))


def table_html(header: list[str], rows: list[list[str]], caption: str) -> str:
    """An accessible table: a caption, column heads, row heads."""
    heads = "".join(f"<th scope='col' style='text-align:right;padding:2px 10px'>{html.escape(h)}</th>" for h in header)
    body = "".join(
        f"<tr><th scope='row' style='text-align:left;padding:2px 10px'>{html.escape(row[0])}</th>"
        + "".join(f"<td style='text-align:right;padding:2px 10px'>{html.escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f"<table><caption>{html.escape(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    )


class Choices:
    """The models and the accelerators that an explorer offers, one's own first, and the two controls for them.

    `model` is a key of the catalog or a model of one's own; `machine` joins the accelerators, which are those with a
    known memory and, with `dtype`, a peak for it. Raises ValueError for a machine that lacks one of these.
    """

    def __init__(
        self, model: ModelConfig | str, machine: Accelerator | None, accelerator: str, dtype: str | None = None
    ) -> None:
        def usable(a: Accelerator) -> bool:
            return bool(a.memory_bytes) and (dtype is None or dtype in a.peak_flops)

        if machine and not usable(machine):
            if dtype is None:
                raise ValueError(f"machine must say how much memory it has, {machine.name} does not")
            raise ValueError(f"machine must have memory_bytes and a peak for {dtype}, {machine.name} lacks one of them")
        mine = [model] if isinstance(model, ModelConfig) else []
        first = mine[0] if mine else get_model(str(model))
        self._models = {m.key or m.name: m for m in [*mine, *map(get_model, list_models())]}
        catalog = filter(usable, map(get_accelerator, list_accelerators()))
        self._accelerators = {a.name: a for a in [*([machine] if machine else []), *catalog]}
        self.controls: dict[str, widgets.Widget] = {
            "model": widgets.Dropdown(
                options=[(m.name, key) for key, m in self._models.items()],
                value=first.key or first.name,
                description="Model",
            ),
            "accelerator": widgets.Dropdown(
                options=list(self._accelerators),
                value=(machine or get_accelerator(accelerator)).name,
                description="Accelerator",
            ),
        }

    def values(self, controls: Mapping[str, widgets.Widget]) -> dict[str, Any]:
        """What all of an explorer's controls say, with the model and the accelerator themselves."""
        said = {name: control.value for name, control in controls.items()}
        return {
            **said,
            "model": self._models[said["model"]],
            "accelerator": self._accelerators[said["accelerator"]],
        }


class Explorer(widgets.VBox):
    """Controls, one figure, a readout in words and a table on request.

    A subclass passes its controls and its figure, and overrides `redraw` (update `self.figure`, return the readout)
    and `table` (the figure's numbers as HTML, asked for only while it is shown). If a redraw takes a while,
    `busy_note` stands before the old readout, which is grayed, until the new one is there.
    """

    busy_note = ""

    def __init__(
        self, controls: dict[str, widgets.Widget], figure: go.Figure, values: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.controls = controls
        self.figure = figure
        self.readout = ""
        self._readout_box = widgets.HTML()
        self._table_box = widgets.HTML()
        self._show_table = widgets.ToggleButton(
            value=False, description="Data table", tooltip="Show the figure's numbers as a table"
        )
        self._updating = False
        for control in controls.values():
            control.style.description_width = "110px"
            control.layout.width = "400px"
            control.observe(self._changed, names="value")
        self._show_table.observe(self._fill_table, names="value")
        # All is set before the figure goes live: an update between then and its display would lose the traces' names.
        self._changed()
        if values:
            self.set(**values)
        self.live = live_figure(self.figure)
        if isinstance(self.live, go.FigureWidget):
            self.figure = self.live
        grid = widgets.GridBox(list(controls.values()), layout={"grid_template_columns": "410px 410px"})
        parts = [grid, self.live, self._readout_box, self._show_table, self._table_box, *accessible_names()]
        super().__init__(parts)
        self.add_class("lessonlib-explorer")

    def redraw(self) -> str:
        """Update the figure from the controls; return the readout."""
        raise NotImplementedError

    def table(self) -> str:
        """The figure's numbers as an HTML table."""
        raise NotImplementedError

    def set(self, **values: Any) -> None:
        """Set several controls at once, with one redraw.

        Raises ValueError for a control or a value that does not exist, and then changes nothing.
        """
        unknown = values.keys() - self.controls.keys()
        if unknown:
            raise ValueError(f"no control named {', '.join(sorted(unknown))}: there are {', '.join(self.controls)}")
        before = {name: control.value for name, control in self.controls.items()}
        with self._one_redraw():
            for name in [name for name in self.controls if name in values]:
                try:
                    self.controls[name].value = values[name]
                except TraitError:
                    allowed = _allowed(self.controls[name])
                    for control, value in before.items():
                        self.controls[control].value = value
                    raise ValueError(f"{name} must be {allowed}, got {values[name]!r}") from None

    @contextmanager
    def _one_redraw(self) -> Iterator[None]:
        self._updating = True
        try:
            yield
        finally:
            self._updating = False
        self._changed()

    def _changed(self, _: Any = None) -> None:
        if self._updating:
            return
        if self.busy_note:
            old = html.escape(f"{self.busy_note} {self.readout}")
            self._readout_box.value = f"<p aria-busy='true' style='opacity:0.5'>{old}</p>"
        self.readout = self.redraw()
        self._readout_box.value = f"<p role='status' aria-live='polite'>{html.escape(self.readout)}</p>"
        self._fill_table()

    def _fill_table(self, _: Any = None) -> None:
        self._table_box.value = self.table() if self._show_table.value else ""

    def __repr__(self) -> str:
        return self.readout

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        if storing_outputs():
            return stored_picture(self.figure, self.readout)
        bundle = super()._repr_mimebundle_(**kwargs)
        return {**bundle, "text/plain": self.readout}


def _allowed(control: widgets.Widget) -> str:
    options = [option[-1] if isinstance(option, tuple) else option for option in getattr(control, "options", ())]
    return f"one of {', '.join(map(str, options))}" if options else "true or false"
