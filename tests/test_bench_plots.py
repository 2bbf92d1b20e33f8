"""Pictures of a benchmark: what is drawn are the figures of the result."""

import base64
import re
import sys
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")
from mlx_spec.bench import plots
from mlx_spec.bench.plots import NotDrawn, draw, write_html, write_png
from mlx_spec.bench.result import Result, Row, Setting

SETTING = Setting(
    model="/models/Tiny-$1-4bit",
    target_quantization="4 bits, groups of 64",
    drafter="/models/Tiny-MTP",
    drafter_kind="mtp",
    drafter_quantization="bfloat16",
    device="Apple <M4>",
    mlx="0.32.4",
    mlx_lm="0.32.2",
    mlx_spec="0.1.0",
    sampling="greedy",
    temp=0,
    max_tokens=256,
    repeats=3,
    cooldown_s=0,
)


def drafted(name, depth, ratio, **figures):
    return Row(
        name, depth, 90, ratio=ratio, ratio_low=ratio - 0.1, ratio_high=ratio + 0.2, **figures
    )


def one(depth, accepted, tokens_per_round, verify_ratio=None, draft_steps=None):
    return {
        "drafted_by_position": [100] * len(accepted),
        "accepted_by_position": accepted,
        "tokens_per_round": tokens_per_round,
        "verify_ratio": verify_ratio,
        "draft_steps": draft_steps,
    }


ROWS = [
    Row("code", "stock", 90, generation_tps=20.04, ratio=1.0),
    drafted("code", 1, 1.4, **one(1, [80], 1.8, 1.2, 0.1), identical=True),
    drafted("code", 2, 1.6, **one(2, [80, 60], 2.4, 1.5, 0.2), identical=False),
    drafted("code", "auto", 1.5, **one("auto", [80, 61, 20], 2.3)),
    Row("prose", "stock", 50, generation_tps=21.0, ratio=1.0),
    drafted("prose", 1, 1.1, **one(1, [50], 1.5, 1.4, 0.1)),
    drafted("prose", 2, 0.8, **one(2, [50, 20], 1.7, 1.7, 0.2)),
    drafted("prose", "auto", 1.0, state="parked", why="acceptance 0.3 < break-even 0.5"),
]


def result(rows=ROWS):
    return Result(SETTING, rows).as_dict()


def lines_of(figure):
    """Points of each line in the legend, by label."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    return {
        label: [tuple(point) for point in handle.get_xydata().tolist()]
        for handle, label in zip(handles, labels, strict=True)
    }


def test_bars_are_the_ratios_and_stock_is_the_line_at_one():
    axes = draw(result())["speed"].axes[0]
    handles, labels = axes.get_legend_handles_labels()
    assert labels == ["depth 1", "depth 2", "auto"]
    heights = [[bar.get_height() for bar in handle] for handle in handles]
    assert heights == [[1.4, 1.1], [1.6, 0.8], [1.5, 1.0]]
    whiskers = handles[0].errorbar.lines[2][0].get_segments()
    assert [s[:, 1].tolist() for s in whiskers] == [
        pytest.approx([1.3, 1.6]),
        pytest.approx([1.0, 1.3]),
    ]
    centres = [bar.get_center()[0] for handle in handles for bar in handle]
    assert centres == pytest.approx([-0.8 / 3, 1 - 0.8 / 3, 0, 1, 0.8 / 3, 1 + 0.8 / 3])
    assert [line.get_ydata() for line in axes.get_lines() if line.get_linestyle() == "--"] == [
        [1, 1]
    ]
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == ["code\nstock 20 t/s", "prose\nstock 21 t/s"]


def test_acceptance_is_that_of_the_largest_fixed_depth():
    assert lines_of(draw(result())["acceptance"]) == {
        "code (depth 2)": [(1, 0.8), (2, 0.6)],
        "prose (depth 2)": [(1, 0.5), (2, 0.2)],
    }


def test_acceptance_of_auto_where_there_is_nothing_else():
    rows = [row for row in ROWS if row.depth in ("stock", "auto")]
    assert lines_of(draw(result(rows))["acceptance"]) == {
        "code (depth auto)": [(1, 0.8), (2, 0.61), (3, 0.2)]
    }


def test_costs_are_medians_over_the_classes():
    lines = lines_of(draw(result())["cost"])
    assert list(lines) == [
        "verify, T(n+1)/T(1)",
        "verify and draft: break-even",
        "tokens a round, code",
        "tokens a round, prose",
    ]
    verify = [steps for _, steps in lines["verify, T(n+1)/T(1)"]]
    assert verify == pytest.approx([1, 1.3, 1.6])
    whole = lines["verify and draft: break-even"]
    assert [depth for depth, _ in whole] == [0, 1, 2]
    assert [steps for _, steps in whole] == pytest.approx([1, 1.4, 1.8])
    assert lines["tokens a round, code"] == [(0, 1), (1, 1.8), (2, 2.4)]


def test_axes_have_units_and_titles_name_model_and_device():
    for figure in draw(result()).values():
        axes = figure.axes[0]
        title = axes.get_title(loc="left").split("\n")
        assert title[1] == r"Tiny-\$1-4bit (4 bits, groups of 64) on Apple <M4>"
        assert axes.get_ylabel()
    assert draw(result())["speed"].axes[0].get_ylabel() == "generation speed / stock's"


def test_only_what_was_measured_is_drawn():
    rows = [ROWS[0], drafted("code", 1, 1.4)]
    assert list(draw(result(rows))) == ["speed"]
    assert list(draw(result([ROWS[0], Row("code", 1, 90)]))) == ["speed"]
    with pytest.raises(NotDrawn, match="no runs with drafts"):
        draw(result([ROWS[0]]))


def test_png_files(tmp_path):
    paths = write_png(result(), tmp_path / "new" / "pictures")
    assert [path.name for path in paths] == ["speed.png", "acceptance.png", "cost.png"]
    assert sorted(path.name for path in paths[0].parent.iterdir()) == sorted(
        path.name for path in paths
    )
    for path in paths:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n")
        assert int.from_bytes(data[16:20], "big") >= 1000  # pixels wide


class Page(HTMLParser):
    """What a page shows and refers to."""

    def __init__(self, text):
        super().__init__()
        self.sources, self.cells, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1] in ("td", "th"):
            self.cells[-1] += data.strip()


def test_one_page_holds_all(tmp_path):
    path = tmp_path / "bench.html"
    write_html(result(), path)
    text = path.read_text()
    page = Page(text)
    assert len(page.sources) == 3
    for source in page.sources:
        data = base64.b64decode(re.fullmatch("data:image/png;base64,(.*)", source)[1])
        assert data.startswith(b"\x89PNG\r\n")
    width = len(plots.COLUMNS)
    table = [page.cells[i : i + width] for i in range(0, len(page.cells), width)]
    assert len(table) == 1 + len(ROWS)
    second = dict(zip(table[0], table[3], strict=True))
    assert (second["prompt"], second["depth"], second["ratio to stock"]) == ("code", "2", "1.6")
    assert (second["same text"], second["break-even acceptance"]) == ("NO", "-")
    assert table[8][-2:] == ["parked", "acceptance 0.3 < break-even 0.5"]
    assert "Apple &lt;M4&gt;" in text
    assert "<M4>" not in text
    assert [p.name for p in tmp_path.iterdir()] == ["bench.html"]


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(NotDrawn, match=r"pip install 'mlx-spec\[plot\]'"):
        write_png(result(), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_pyplot_stays_out():
    draw(result())
    assert "matplotlib.pyplot" not in sys.modules
