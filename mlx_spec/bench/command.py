"""What `mlx-spec bench` and `mlx-spec verify` do with their options."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from mlx_spec.bench.against import Endpoint, measure_against
from mlx_spec.bench.draft_vocab import advise
from mlx_spec.bench.measure import Plan, bench_loaded, drafter_of
from mlx_spec.bench.parts import calibrate
from mlx_spec.bench.plots import require_matplotlib, write_html, write_png
from mlx_spec.bench.prompts import CLASSES, Prompt, encode, read_class, read_file
from mlx_spec.bench.report import as_markdown, as_text
from mlx_spec.bench.result import write_json
from mlx_spec.errors import BadArguments
from mlx_spec.knowledge import learn_costs
from mlx_spec.load import load
from mlx_spec.options import DEFAULT_MAX_DRAFT_TOKENS

CALIBRATION_CLASSES = ("code", "long")  # a short context and a long one


@dataclass(frozen=True)
class Files:
    """Where a result goes, beside stdout."""

    json: Path | None = None
    html: Path | None = None
    png: Path | None = None

    def check(self) -> None:
        """Before minutes of measuring. Raises: SpecError."""
        for path in (self.json, self.html, self.png):
            if path is not None and not path.absolute().parent.is_dir():
                raise BadArguments(f"The folder of {path} does not exist; make it first.")
        if self.html or self.png:
            require_matplotlib()

    def write(self, result: dict[str, Any]) -> None:
        if self.json is not None:
            write_json(self.json, result)
        if self.html is not None:
            write_html(result, self.html)
        if self.png is not None:
            write_png(result, self.png)


def chosen_prompts(classes: Sequence[str], prompt_file: str | None) -> list[Prompt]:
    """Those that were named, else all. Raises: BadArguments for both kinds at once."""
    if prompt_file is not None:
        if classes:
            raise BadArguments("Give --prompt-class or --prompt-file, not both.")
        return [read_file(prompt_file)]
    return [read_class(name) for name in classes or CLASSES]


def run_bench(
    model_path: str,
    draft_model: str,
    prompts: Sequence[Prompt],
    plan: Plan,
    files: Files,
    markdown: bool = False,
    calibrated: bool = False,
    endpoint: Endpoint | None = None,
) -> str:
    """Measure; write the files; return the table."""
    files.check()
    model, tokenizer = load(model_path, draft_model=draft_model)
    drafter = drafter_of(model, model_path, plan.draft_kind)
    if calibrated:
        *_, part = drafter.parts  # beside lookup, if that is one
        if part.kind == "lookup":
            raise BadArguments(
                "--calibrate makes a drafter draft, and lookup drafts only where the text repeats; "
                "leave it out."
            )
        for name in CALIBRATION_CLASSES:
            ids = encode(read_class(name), tokenizer)
            depths = range(DEFAULT_MAX_DRAFT_TOKENS + 1)
            learn_costs(model, part, len(ids), calibrate(model, part, ids, depths))
    result = bench_loaded(model, tokenizer, model_path, prompts, plan)
    text = as_markdown(result) if markdown else as_text(result)
    if advice := advise(drafter, result.rows):
        text += f"\n\n{advice}"
    as_dict = result.as_dict()
    if endpoint is not None:
        against = measure_against(endpoint, prompts, plan.max_tokens, plan.repeats, plan.temp, say)
        as_dict["against"] = against.as_dict()
        text += f"\n\n{against.as_text(result.setting)}"
    files.write(as_dict)
    return text


def say(text: str) -> None:
    click.echo(text, err=True)
