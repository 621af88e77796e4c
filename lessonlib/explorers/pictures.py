"""Pictures without controls: lines on logarithmic axes, the blocks of a paged cache, and timelines of requests."""

from collections.abc import Mapping, Sequence

import numpy as np

from lessonlib.checks import check_number, check_values
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
STAGE_STYLES = ((SHARED, "-"), (base.PURPLE, "."), (base.SKY, ""), (base.ORANGE, "/"), (base.GREEN, "x"))
NARROW = 0.08  # share of the width that holds a time


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


def stages_picture(requests: Mapping[str, Mapping[str, float]]) -> base.Picture:
    """What the time of one request goes to, stage after stage (seconds), a bar for each way to serve it.

    Raises ValueError for no requests, requests whose stages differ, more stages than there are styles, or a negative
    time.
    """
    stages = list(next(iter(requests.values()), {}))
    if not 1 <= len(stages) <= len(STAGE_STYLES) or any(list(times) != stages for times in requests.values()):
        raise ValueError(f"requests must all have the same 1 to {len(STAGE_STYLES)} stages, got {requests!r}"[:300])
    seconds = np.array([[check_number(name, times[name]) for name in stages] for times in requests.values()])
    names, longest = list(requests), float(seconds.sum(axis=1).max())
    figure = base.new_figure(
        "time since the request was sent", "", barmode="stack", height=190 + 75 * len(names),
        margin={"l": 150, "r": 30, "t": 70, "b": 60},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
    )  # fmt: skip
    for stage, times, (color, pattern) in zip(stages, seconds.T, STAGE_STYLES, strict=False):
        figure.add_bar(
            name=stage, orientation="h", y=names, x=times, textposition="inside", insidetextanchor="middle",
            text=[fmt(time, "s", 3) if time > NARROW * longest else "" for time in times], textangle=0,
            insidetextfont={"color": base.BLACK, "size": 13},
            marker={"color": color, "line": {"color": base.BLACK, "width": 1}, "pattern": {
                "shape": pattern, "fgcolor": base.BLACK, "fillmode": "overlay", "fgopacity": 0.3, "size": 7,
                "solidity": 0.15}},
            customdata=[fmt(time, "s", 3) for time in times], hovertemplate="%{y}, %{fullData.name}: %{customdata}"
            "<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(ticksuffix=" s", range=[0, 1.05 * longest])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    said = [
        f"{name.replace('<br>', ' ')}: " + ", ".join(f"{stage} {fmt(times[stage], 's', 3)}" for stage in stages)
        for name, times in requests.items()
    ]
    return base.Picture(figure, f"{'; '.join(said)}.")


def arrivals_picture(requests: Sequence[tuple[float, Sequence[float]]]) -> base.Picture:
    """When each request was sent and when its tokens came (seconds), a row for each, the first sent on top.

    Raises ValueError for no requests, a request without tokens, or times that are not finite.
    """
    if not requests or not all(len(tokens) for _, tokens in requests):
        raise ValueError("requests must hold at least one request, each with at least one token")
    checked = [(check_number("sent", sent), check_values("tokens", list(tokens))) for sent, tokens in requests]
    ordered = sorted(checked, key=lambda request: request[0])
    start = ordered[0][0]
    figure = base.new_figure(
        "time since the first was sent", "request", height=170 + 28 * len(ordered),
        margin={"l": 70, "r": 30, "t": 60, "b": 60},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    )  # fmt: skip
    for row, (sent, tokens) in enumerate(ordered, 1):
        shown = row == 1
        figure.add_scatter(
            name="waiting for the first token", legendgroup="wait", showlegend=shown, mode="lines",
            x=[sent - start, tokens[0] - start], y=[row, row], line={"color": base.ORANGE, "width": 6},
            hovertemplate=f"request {row}: first token after {fmt(tokens[0] - sent, 's', 3)}<extra></extra>",
        )  # fmt: skip
        figure.add_scatter(
            name="a token", legendgroup="token", showlegend=shown, mode="markers", x=tokens - start,
            y=np.full(len(tokens), row), hovertemplate=f"request {row}: token at %{{x:.3f}} s<extra></extra>",
            marker={"symbol": "line-ns-open", "size": 12, "color": base.BLUE, "line": {"width": 2}},
        )  # fmt: skip
    figure.update_xaxes(ticksuffix=" s", rangemode="tozero")
    figure.update_yaxes(tickvals=list(range(1, len(ordered) + 1)), range=[len(ordered) + 0.6, 0.4])
    said = [
        f"{row}: sent at {fmt(sent - start, 's', 3)}, first token after {fmt(tokens[0] - sent, 's', 3)}, "
        f"last after {fmt(tokens[-1] - sent, 's', 3)}"
        for row, (sent, tokens) in enumerate(ordered, 1)
    ]
    return base.Picture(figure, f"Requests, {'; '.join(said)}.")
