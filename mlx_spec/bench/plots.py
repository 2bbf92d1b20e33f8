"""A benchmark's result as pictures: PNG files, or one HTML page that holds all.

matplotlib is imported when something is drawn; figures are objects of their own, without pyplot.
"""

import base64
import html
import io
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mlx_spec.errors import SpecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUES = ("#c6dbef", "#9ecae1", "#6baed6", "#3182bd", "#08519c")  # fixed depths, from 1 on
ORANGE = "#e6550d"  # auto, and break-even
GREY = "#636363"
LINES = ("#08519c", "#e6550d", "#31a354", "#756bb1")  # classes; then once more, dashed
DPI = 150

Result = dict[str, Any]
Row = dict[str, Any]


class NotDrawn(SpecError):
    """A picture that cannot be made."""


def write_png(result: Result, directory: str | Path) -> list[Path]:
    """Write speed.png, acceptance.png and cost.png, those for which there are figures.

    Args:
        result: as Result.as_dict gives it (schema.json).
        directory: made if it is missing.

    Raises: NotDrawn without matplotlib, or where there is nothing to draw.
    """
    directory = Path(directory)
    pictures = draw(result)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in pictures.items():
        paths.append(directory / f"{name}.png")
        write(paths[-1], png(figure))
    return paths


def write_html(result: Result, path: str | Path) -> None:
    """Write one page with the pictures and the table inside it. Raises: NotDrawn."""
    path = Path(path)
    page = html_page(result, draw(result))
    write(path, page.encode())


def write(path: Path, data: bytes) -> None:
    """Written beside, then renamed."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(data)
    os.replace(beside, path)


def require_matplotlib() -> None:
    """Raises: NotDrawn without it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise NotDrawn(
            "Pictures need matplotlib; install it with pip install 'mlx-spec[plot]'."
        ) from error


def draw(result: Result) -> dict[str, "Figure"]:
    """The pictures, by name."""
    require_matplotlib()
    rows = result["rows"]
    if not any(row["depth"] != "stock" for row in rows):
        raise NotDrawn("The result has no runs with drafts, so there is nothing to draw.")
    pictures = {"speed": speed(result)}
    if any(row["drafted_by_position"] for row in rows):
        pictures["acceptance"] = acceptance(result)
    if any(row["verify_ratio"] is not None for row in rows):
        pictures["cost"] = cost(result)
    return pictures


# ---- the pictures --------------------------------------------------------------------------------


def speed(result: Result) -> "Figure":
    """Generation speed over stock's: a group of bars for each prompt class, a bar for each depth,
    with the lowest and the highest of the repeats."""
    rows = [row for row in result["rows"] if row["depth"] != "stock"]
    names, depths = classes(rows), depths_of(rows)
    figure, axes = panel(result, "Speed by prompt class and depth", max(7.0, 1.5 * len(names)))
    width = 0.8 / len(depths)
    for i, depth in enumerate(depths):
        here = [row for row in rows if row["depth"] == depth and row["ratio"] is not None]
        heights = [row["ratio"] for row in here]
        places = [names.index(row["prompt_class"]) - 0.4 + (i + 0.5) * width for row in here]
        axes.bar(
            places,
            heights,
            0.92 * width,
            color=colour_of(depth),
            label=depth if depth == "auto" else f"depth {depth}",
            yerr=spreads(here),
            error_kw={"elinewidth": 0.8, "ecolor": GREY},
        )
    axes.axhline(1, color=GREY, linestyle="--", linewidth=1)
    axes.text(len(names) - 0.48, 1, "stock", color=GREY, fontsize=8, va="bottom")
    axes.set_xlim(-0.5, len(names) - 0.1)
    axes.set_xticks(range(len(names)), [labelled(name, result["rows"]) for name in names])
    axes.set_ylabel("generation speed / stock's")
    legend_below(figure, axes)
    return figure


def acceptance(result: Result) -> "Figure":
    """The share of the drafts at each position that were accepted, at the largest fixed depth."""
    figure, axes = panel(result, "Acceptance by position")
    for style, (name, row) in zip(styles(), deepest(result["rows"]).items(), strict=False):
        counts = zip(row["accepted_by_position"], row["drafted_by_position"], strict=True)
        shares = [accepted / drafted for accepted, drafted in counts if drafted]
        label = f"{name} (depth {row['depth']})"
        axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, label=label, **style)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("position of the draft in its round")
    axes.set_ylabel("accepted / drafted")
    whole_numbers(axes)
    legend_below(figure, axes)
    return figure


def cost(result: Result) -> "Figure":
    """What a round costs, in steps of stock, and how many tokens it yields: a depth pays where a
    class's tokens are above the costs."""
    figure, axes = panel(result, "Cost of a round, and what it yields")
    rows = [row for row in result["rows"] if row["verify_ratio"] is not None]
    depths = sorted({row["depth"] for row in rows})
    verify = [median(row["verify_ratio"] for row in rows if row["depth"] == n) for n in depths]
    axes.plot([0, *depths], [1, *verify], color=GREY, marker="o", label="verify, T(n+1)/T(1)")
    full = [row for row in rows if row["draft_steps"] is not None]
    if full:
        tried = sorted({row["depth"] for row in full})
        costs = {n: [cost_of(row) for row in full if row["depth"] == n] for n in tried}
        middle = [1.0, *(median(costs[n]) for n in tried)]
        axes.plot(
            [0, *tried],
            middle,
            color="black",
            linewidth=2.2,
            marker="o",
            label="verify and draft: break-even",
        )
        axes.fill_between(
            [0, *tried],
            [1.0, *(min(costs[n]) for n in tried)],
            [1.0, *(max(costs[n]) for n in tried)],
            color="black",
            alpha=0.12,
            linewidth=0,
        )
    for style, name in zip(styles(), classes(rows), strict=False):
        here = [r for r in rows if r["prompt_class"] == name and r["tokens_per_round"] is not None]
        here.sort(key=lambda row: row["depth"])
        axes.plot(
            [0, *(row["depth"] for row in here)],
            [1, *(row["tokens_per_round"] for row in here)],
            linewidth=1.2,
            label=f"tokens a round, {name}",
            **style,
        )
    axes.set_ylim(bottom=0.9)
    axes.set_xlabel("depth: drafts in a round")
    axes.set_ylabel("steps of stock; tokens")
    whole_numbers(axes)
    legend_below(figure, axes)
    return figure


def cost_of(row: Row) -> float:
    return row["verify_ratio"] + row["draft_steps"]


# ---- what they share -----------------------------------------------------------------------------


def panel(result: Result, title: str, width: float = 7.0) -> tuple["Figure", "Axes"]:
    """Axes under a title that names the model and the device."""
    from matplotlib.figure import Figure

    setting = result["setting"]
    figure = Figure(figsize=(width, 4.4), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    quantization = setting["target_quantization"]
    model = Path(setting["model"]).name + (f" ({quantization})" if quantization else "")
    head = [title, f"{model} on {setting['device'] or 'an unknown device'}"]
    axes.set_title("\n".join(map(plain, head)), fontsize=10, loc="left")
    return figure, axes


def plain(text: str) -> str:
    """matplotlib reads text between dollar signs as a formula."""
    return text.replace("$", r"\$")


def legend_below(figure: "Figure", axes: "Axes") -> None:
    handles, labels = axes.get_legend_handles_labels()
    columns = min(len(labels), 5 if max(map(len, labels), default=0) < 12 else 3)
    figure.legend(
        handles,
        [plain(label) for label in labels],
        loc="outside lower center",
        ncols=max(1, columns),
        frameon=False,
        fontsize=8,
        handlelength=3,
    )


def whole_numbers(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def styles() -> list[dict[str, Any]]:
    return [{"color": c, "linestyle": s} for s in ("-", "--", ":") for c in LINES]


def classes(rows: Sequence[Row]) -> list[str]:
    """In the order of the rows."""
    return list(dict.fromkeys(row["prompt_class"] for row in rows))


def depths_of(rows: Sequence[Row]) -> list[int | str]:
    """Fixed ones in order, then auto."""
    depths = {row["depth"] for row in rows}
    return sorted(depths - {"auto"}) + (["auto"] if "auto" in depths else [])


def colour_of(depth: int | str) -> str:
    return ORANGE if isinstance(depth, str) else BLUES[min(depth, len(BLUES)) - 1]


def spreads(rows: Sequence[Row]) -> list[list[float]] | None:
    """Distances below and above the ratios; None where they are not all known."""
    if any(row["ratio_low"] is None or row["ratio_high"] is None for row in rows):
        return None
    return [
        [row["ratio"] - row["ratio_low"] for row in rows],
        [row["ratio_high"] - row["ratio"] for row in rows],
    ]


def labelled(name: str, rows: Sequence[Row]) -> str:
    """A class with stock's speed under it."""
    for row in rows:
        known = row["generation_tps"] is not None
        if row["prompt_class"] == name and row["depth"] == "stock" and known:
            return plain(f"{name}\nstock {row['generation_tps']:.3g} t/s")
    return plain(name)


def deepest(rows: Sequence[Row]) -> dict[str, Row]:
    """Of each class, the row of the largest fixed depth that drafted; else auto's."""
    found: dict[str, Row] = {}
    for row in rows:
        if row["drafted_by_position"]:
            old = found.get(row["prompt_class"])
            if old is None or rank(row["depth"]) > rank(old["depth"]):
                found[row["prompt_class"]] = row
    return found


def rank(depth: int | str) -> int:
    return 0 if isinstance(depth, str) else depth


def png(figure: "Figure") -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    data = io.BytesIO()
    FigureCanvasAgg(figure).print_png(data)
    return data.getvalue()


# ---- the page ------------------------------------------------------------------------------------

COLUMNS = {
    "prompt": "prompt_class",
    "depth": "depth",
    "prompt tokens": "prompt_tokens",
    "prompt tokens/s": "prompt_tps",
    "generation tokens/s": "generation_tps",
    "ratio to stock": "ratio",
    "lowest": "ratio_low",
    "highest": "ratio_high",
    "accepted / drafted": "acceptance",
    "tokens a round": "tokens_per_round",
    "T(1), s": "step_s",
    "T(n+1)/T(1)": "verify_ratio",
    "draft, steps": "draft_steps",
    "break-even acceptance": "break_even",
    "peak memory, bytes": "peak_memory_bytes",
    "same text": "identical",
    "state": "state",
    "why": "why",
}
STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }
img { max-width: 100%; display: block; margin: 1.5em 0; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: 0.25em 0.7em; text-align: right; }
th:first-child, td:first-child { text-align: left; }
dt { float: left; clear: left; width: 12em; color: #636363; }
"""


def html_page(result: Result, pictures: dict[str, "Figure"]) -> str:
    setting = result["setting"]
    title = f"mlx-spec bench: {setting['model']}"
    known = {name: value for name, value in setting.items() if value is not None}
    facts = "".join(
        f"<dt>{escaped(name.replace('_', ' '))}</dt><dd>{escaped(value)}</dd>\n"
        for name, value in known.items()
    )
    images = "".join(
        f'<img alt="{escaped(name)}" src="data:image/png;base64,'
        f'{base64.b64encode(png(figure)).decode()}">\n'
        for name, figure in pictures.items()
    )
    head = "".join(f"<th>{escaped(name)}</th>" for name in COLUMNS)
    lines = "".join(
        f"<tr>{''.join(f'<td>{cell(row[name])}</td>' for name in COLUMNS.values())}</tr>\n"
        for row in result["rows"]
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escaped(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escaped(title)}</h1>\n<dl>\n{facts}</dl>\n{images}"
        f"<div><table>\n<tr>{head}</tr>\n{lines}</table></div>\n</body>\n</html>\n"
    )


def cell(value: Any) -> str:
    """ "-" for what is absent."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else escaped(value)


def escaped(value: Any) -> str:
    return html.escape(str(value))
