"""A benchmark's result as tables, for a terminal and in Markdown."""

from collections.abc import Callable, Sequence

from mlx_spec.bench.result import Result, Row, Setting

ABSENT = "-"
Column = tuple[str, Callable[[Row], str]]


def number(value: float | None, form: str = ".2f", scale: float = 1) -> str:
    return ABSENT if value is None else format(value * scale, form)


def spread(low: float | None, high: float | None, form: str) -> str:
    return "" if low is None or high is None else f" ({low:{form}}-{high:{form}})"


def by_position(row: Row) -> str:
    """The share of the drafts made at each position that were accepted."""
    if not row.drafted_by_position or row.accepted_by_position is None:
        return ABSENT
    counts = zip(row.accepted_by_position, row.drafted_by_position, strict=True)
    return " ".join(f"{accepted / drafted:.2f}" for accepted, drafted in counts if drafted)


def same_text(row: Row) -> str:
    if row.identical is None:
        return ABSENT
    difference = row.first_difference
    if difference is None:
        return "yes" if row.identical else "NO"
    margin = "" if difference.margin is None else f", margin {difference.margin:.1e}"
    depth = "" if difference.depth is None else f", depth {difference.depth}"
    return f"NO: token {difference.token}{margin}{depth}"


def speed(row: Row) -> str:
    spreads = spread(row.generation_tps_low, row.generation_tps_high, ".1f")
    return number(row.generation_tps, ".1f") + spreads


def ratio(row: Row) -> str:
    return number(row.ratio) + spread(row.ratio_low, row.ratio_high, ".2f")


COLUMNS: list[Column] = [
    ("prompt", lambda r: r.prompt_class),
    ("depth", lambda r: str(r.depth)),
    ("prompt t/s", lambda r: number(r.prompt_tps, ".1f")),
    ("generation t/s", speed),
    ("ratio to stock", ratio),
    ("accepted", lambda r: number(r.acceptance)),
    ("by position", by_position),
    ("tokens/round", lambda r: number(r.tokens_per_round)),
    ("T(1) ms", lambda r: number(r.step_s, ".2f", 1e3)),
    ("T(n+1)/T(1)", lambda r: number(r.verify_ratio)),
    ("draft steps", lambda r: number(r.draft_steps)),
    ("break-even", lambda r: number(r.break_even)),
    ("peak GB", lambda r: number(r.peak_memory_bytes, ".2f", 1e-9)),
    ("same text", same_text),
    ("state", lambda r: r.state or ABSENT),
]
LEGEND = (
    "Medians (lowest-highest) of the repeats. accepted: accepted / drafted. tokens/round: "
    "1 + accepted / rounds. T(1): stock's time per token. T(n+1)/T(1): verifying n drafts, in "
    "steps of stock; draft steps: making them. break-even: the acceptance at which this depth is "
    "as fast as stock; - where none is enough."
)


def head_line(setting: Setting, rows: Sequence[Row]) -> str:
    """What was measured, on what, in one line."""
    prompts = {row.prompt_class: row.prompt_tokens for row in rows}
    lengths = ", ".join(f"{name} {tokens}" for name, tokens in prompts.items())
    law = f"{setting.sampling}, temp {setting.temp:g}" if setting.temp else setting.sampling
    parts = [
        f"{setting.model} ({setting.target_quantization or 'quantisation unknown'})",
        f"drafter {setting.drafter} ({setting.drafter_kind}, {setting.drafter_quantization})"
        if setting.drafter
        else f"drafts by {setting.drafter_kind or 'nothing'}",
        setting.device or "device unknown",
        f"mlx {setting.mlx}, mlx-lm {setting.mlx_lm}, mlx-spec {setting.mlx_spec}",
        f"prompt tokens: {lengths}",
        law,
        f"{setting.max_tokens} tokens a text, {setting.repeats} repeats, "
        f"cooldown {setting.cooldown_s:g} s",
    ]
    return "; ".join(parts)


def cells(rows: Sequence[Row], columns: Sequence[Column]) -> list[list[str]]:
    """The columns' names, then a line for each row."""
    return [[name for name, _ in columns], *([show(row) for _, show in columns] for row in rows)]


def as_text(result: Result, columns: Sequence[Column] = COLUMNS) -> str:
    lines = cells(result.rows, columns)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    return "\n".join([head_line(result.setting, result.rows), "", *table, "", LEGEND])


def as_markdown(result: Result, columns: Sequence[Column] = COLUMNS) -> str:
    names, *lines = cells(result.rows, columns)
    table = [names, ["---"] + ["---:"] * (len(names) - 1), *lines]
    rows = [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in table
    ]
    return "\n".join([head_line(result.setting, result.rows), "", *rows, "", LEGEND, ""])
