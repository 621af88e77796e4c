"""Pictures without controls: lines on logarithmic axes, and the blocks of a paged cache."""

from collections.abc import Mapping, Sequence

import numpy as np

from lessonlib.checks import check_values
from lessonlib.explorers import base
from lessonlib.paging import BlockTable
from lessonlib.units import fmt

LINE_STYLES = (
    (base.RED, "dash", "square"),
    (base.BLUE, "solid", "circle"),
    (base.GREEN, "dot", "diamond"),
    (base.PURPLE, "dashdot", "x"),
    (base.ORANGE, "longdash", "triangle-up"),
)
FREE, SHARED = "white", "#999999"


def lines_picture(
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    x_title: str,
    y_title: str,
    unit: str,
    percent: bool = False,
) -> base.Picture:
    """Lines over a logarithmic x; y is logarithmic in `unit`, or a share from 0 to 100 % if `percent`.

    Raises ValueError for no lines, more than there are styles, or values that are not finite, or not above 0 where an
    axis is logarithmic.
    """
    if not 1 <= len(lines) <= len(LINE_STYLES):
        raise ValueError(f"lines must hold 1 to {len(LINE_STYLES)} lines, got {len(lines)}")
    figure = base.new_figure(x_title, y_title, legend={"x": 1.01, "y": 1}, margin={"l": 90, "r": 190, "t": 30, "b": 60})
    points = check_values("x", list(x))
    values = {name: check_values(name, list(y)) for name, y in lines.items()}
    if points.min() <= 0 or (not percent and min(float(y.min()) for y in values.values()) <= 0):
        raise ValueError("x and lines must be above 0 on a logarithmic axis")
    for (name, y), (color, dash, symbol) in zip(values.items(), LINE_STYLES, strict=False):
        figure.add_scatter(
            x=points, y=100 * y if percent else y, name=name, mode="lines+markers",
            line={"color": color, "dash": dash, "width": 3}, marker={"symbol": symbol, "size": 9},
        )  # fmt: skip
    figure.update_xaxes(type="log", tickvals=points, ticktext=[fmt(value) for value in points])
    if percent:
        figure.update_yaxes(range=[0, 104], ticksuffix=" %")
    else:
        everything = np.concatenate(list(values.values()))
        limits = (float(everything.min()) / 1.5, float(everything.max()) * 1.5)
        base.log_ticks(figure.layout.yaxis, limits, unit)
        figure.update_yaxes(range=np.log10(limits).tolist())

    def show(value: float) -> str:
        return f"{value:.1%}" if percent else fmt(value, unit, 3)

    said = [f"{name} from {show(y[0])} to {show(y[-1])}" for name, y in values.items()]
    return base.Picture(
        figure, f"{x_title.capitalize()} from {fmt(points[0])} to {fmt(points[-1])}: {'; '.join(said)}."
    )


def blocks_picture(table: BlockTable, columns: int = 16) -> base.Picture:
    """Physical blocks in the order of memory, each with the sequences that use it and its place in theirs."""
    colors = {name: LINE_STYLES[index % len(LINE_STYLES)][0] for index, name in enumerate(table.tables)}
    rows = -(-len(table.users) // columns)
    figure = base.new_figure(
        "", "", showlegend=False, height=90 + 62 * rows, margin={"l": 20, "r": 20, "t": 40, "b": 20},
        title={"text": f"{len(table.users)} physical blocks of {table.block_size} tokens", "font": {"size": 15}},
    )  # fmt: skip
    for block in range(len(table.users)):
        row, column = divmod(block, columns)
        users = [name for name, used in table.tables.items() if block in used]
        color = FREE if not users else SHARED if len(users) > 1 else colors[users[0]]
        figure.add_shape(
            type="rect",
            x0=column,
            x1=column + 0.94,
            y0=-row,
            y1=-row - 0.9,
            fillcolor=color,
            opacity=0.45,
            line={"color": base.BLACK},
        )
        label = "free" if not users else f"{'+'.join(users)}<br>{table.tables[users[0]].index(block)}"
        figure.add_annotation(
            x=column + 0.47, y=-row - 0.45, text=label, showarrow=False,
            font={"size": 12, "color": base.BLACK},
        )  # fmt: skip
    figure.update_xaxes(visible=False, range=[-0.1, columns])
    figure.update_yaxes(visible=False, range=[-rows, 0.1])
    said = [f"{name} ({table.lengths[name]} tokens) in blocks {_listed(used)}" for name, used in table.tables.items()]
    free = f"{table.num_free} of {len(table.users)} blocks are free"
    return base.Picture(figure, "; ".join([*said, free]) + ".")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
