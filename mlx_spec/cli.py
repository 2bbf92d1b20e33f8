"""The `mlx-spec` command. Each command calls one function; errors are one sentence on stderr."""

import argparse
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, get_args

import click
from huggingface_hub.errors import HTTPError
from mlx_lm.generate import generate as stock_generate
from mlx_lm.generate import main as stock_main
from mlx_lm.generate import setup_arg_parser

from mlx_spec import demo
from mlx_spec.bench import measure as bench
from mlx_spec.bench.against import Endpoint, read_key_file
from mlx_spec.bench.command import Files, chosen_prompts, run_bench, say
from mlx_spec.bench.prompts import CLASSES
from mlx_spec.bench.verify import DEPTHS as VERIFY_DEPTHS
from mlx_spec.bench.verify import Plan as VerifyPlan
from mlx_spec.bench.verify import verify
from mlx_spec.conversion import DTYPES, convert
from mlx_spec.convert.quantize import MODES
from mlx_spec.enable import disable, enable
from mlx_spec.errors import SpecError, one_line
from mlx_spec.generate import bound, stream_generate
from mlx_spec.inspection import inspect_path
from mlx_spec.load import load
from mlx_spec.options import (
    HELP,
    DraftKind,
    SpecOptions,
    add_spec_options,
    draft_tokens,
)
from mlx_spec.run import run_program
from mlx_spec.sampling import Sampling
from mlx_spec.server.serve import serve
from mlx_spec.stats import SpecStats


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turn expected errors into a message on stderr and an exit code."""
    try:
        yield
    except SpecError as error:
        fail(str(error), error.exit_code)
    except (ValueError, OSError, RuntimeError, ImportError, HTTPError) as error:
        fail(one_line(error))


def fail(message: str, exit_code: int = 1) -> NoReturn:
    click.echo(f"Error: {' '.join(message.split())}", err=True)
    sys.exit(exit_code)


@click.group()
@click.version_option(package_name="mlx-spec")
def cli() -> None:
    """Speculative decoding for mlx-lm: the same text, sooner."""


@cli.command("generate", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def generate_command(arguments: tuple[str, ...]) -> None:
    """Generate text as mlx_lm.generate does, with drafts where possible."""
    with one_sentence():
        run_generate(generation_parser().parse_args(arguments))


def generation_parser() -> argparse.ArgumentParser:
    """mlx_lm.generate's own parser, with what differs here."""
    parser = setup_arg_parser()
    parser.prog = "mlx-spec generate"
    parser.description = (
        "Generate text, as mlx_lm.generate does, with a drafter where there is one."
    )
    changed = {action.dest: action for action in parser._actions}
    changed["model"].help = "A model directory or ORG/REPO. Default: the demo model."
    changed["draft_model"].default = "auto"
    changed["draft_model"].help = (
        "A drafter, or a Gemma-4 assistant or EAGLE-3 head as released: a directory or ORG/REPO; "
        "'auto': a head inside the model's directory, else a directory beside it with -MTP, "
        "-assistant (Gemma-4) or EAGLE3 in its name, else lookup in the text; 'none': no drafting. "
        "Or a smaller model with the same tokenizer. Default: auto."
    )
    changed["num_draft_tokens"].type = draft_tokens
    changed["num_draft_tokens"].default = "auto"
    changed["num_draft_tokens"].help = HELP["num_draft_tokens"]
    add_spec_options(parser)
    parser.add_argument(
        "--require-spec",
        action="store_true",
        help="Fail (exit code 3) where nothing is drafted, instead of decoding without drafts.",
    )
    parser.add_argument(
        "--stats",
        choices=["text", "json"],
        help="Say on stderr what was drafted and accepted, or why nothing was.",
    )
    return parser


def run_generate(args: argparse.Namespace) -> None:
    """mlx_lm.generate's own main, with our `load` and `stream_generate`."""
    if args.chat_template_config is not None:
        check_json_object("--chat-template-config", args.chat_template_config)
    load_pair = partial(load, draft_model=args.draft_model)
    args.draft_model = None
    stats = SpecStats()

    def stream(*positional: Any, **options: Any) -> Iterator[Any]:
        nonlocal stats
        for response in stream_generate(
            *positional,
            max_draft_tokens=args.max_draft_tokens,
            sampling=args.sampling,
            draft_kind=args.draft_kind,
            require_spec=args.require_spec,
            **options,
        ):
            stats = response.spec or stats
            yield response

    default_model = str(demo.demo_model()) if args.model is None else args.model
    main = bound(
        stock_main,
        setup_arg_parser=lambda: SimpleNamespace(parse_args=lambda: args),
        DEFAULT_MODEL=default_model,
        load=load_pair,
        generate=bound(stock_generate, stream_generate=stream),
    )
    main()
    if args.stats == "json":
        click.echo(json.dumps(stats.as_dict()), err=True)
    elif args.stats == "text":
        click.echo(stats.as_text(), err=True)


def check_json_object(option: str, text: str) -> None:
    if not isinstance(json.loads(text), dict):
        raise ValueError(f"{option} is not a JSON object; give for example '{{\"key\": true}}'.")


@cli.command(
    "run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option("--num-draft-tokens", metavar="N|auto", default="auto", help=HELP["num_draft_tokens"])
@click.option("--max-draft-tokens", type=int, help=HELP["max_draft_tokens"])
@click.option(
    "--sampling", type=click.Choice(get_args(Sampling)), default="auto", help=HELP["sampling"]
)
@click.option(
    "--draft-kind", type=click.Choice(get_args(DraftKind)), default="auto", help=HELP["draft_kind"]
)
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(
    program: str,
    arguments: tuple[str, ...],
    num_draft_tokens: str,
    max_draft_tokens: int | None,
    sampling: Sampling,
    draft_kind: DraftKind,
) -> None:
    """Run a stock program with drafts: mlx_lm.generate, mlx_lm.chat, a script, or -m MODULE.

    Its own options stay as they are; --draft-model takes drafters too, and with it the program's
    own --num-draft-tokens counts. What was drafted and accepted, or why nothing was, is said on
    stderr at the end.
    """
    with one_sentence():
        options = SpecOptions(
            draft_tokens(num_draft_tokens), max_draft_tokens, sampling, draft_kind
        )
        run_program(program, list(arguments), options)


@cli.command("serve", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve_command(arguments: tuple[str, ...]) -> None:
    """Serve a model as mlx_lm.server does, with drafts where possible."""
    with one_sentence():
        serve(list(arguments))


@cli.command("enable")
def enable_command() -> None:
    """Start mlx_lm's own commands in this Python environment with drafts.

    These are mlx_lm.generate, chat, server, benchmark and cache_prompt; other programs stay as
    they are. One .pth file is written; `mlx-spec disable` removes it.
    """
    with one_sentence():
        path = enable(site_packages())
    click.echo(f"Wrote {path}; mlx-spec disable, or deleting that file, undoes it.")


@cli.command("disable")
def disable_command() -> None:
    """Undo `mlx-spec enable`."""
    with one_sentence():
        path = disable(site_packages())
    click.echo(f"Removed {path}." if path else "Nothing to undo: mlx-spec was not enabled.")


def site_packages() -> Path:
    return Path(sysconfig.get_path("purelib"))


@cli.command("demo")
@click.argument("family", type=click.Choice(list(demo.MODELS)), default=demo.DEFAULT_FAMILY)
@click.option("--prompt", "-p", default=demo.PROMPT, help="Text to continue.")
@click.option("--max-tokens", "-m", type=click.IntRange(2), default=160, help="Default: 160.")
@click.option("--temp", type=click.FloatRange(0), default=0.6, help="Default: 0.6.")
@click.option("--num-draft-tokens", type=click.IntRange(1), default=3, help="Default: 3.")
def demo_command(
    family: str, prompt: str, max_tokens: int, temp: float, num_draft_tokens: int
) -> None:
    """Decode a text with a demo model, plainly and speculatively."""
    with one_sentence():
        comparison = demo.compare(family, prompt, max_tokens, temp, num_draft_tokens)
    click.echo(comparison.as_text())
    if not comparison.same_text:
        sys.exit(1)


@cli.command("convert")
@click.option(
    "--from",
    "source",
    required=True,
    metavar="SOURCE",
    help="A checkpoint: a directory, or ORG/REPO[@REVISION], of which only the drafter is fetched; "
    "or a .safetensors or .gguf file.",
)
@click.option("--to", "out", required=True, metavar="OUT", help="The drafter directory to write.")
@click.option(
    "--target",
    "--model",
    "target",
    metavar="MODEL",
    help="The model that it is for, if they fit: a directory or ORG/REPO.",
)
@click.option(
    "--allow-mismatch",
    is_flag=True,
    help="Write it for a target with another tokenizer, other rotary embeddings or fingerprint.",
)
@click.option("-q", "--quantize", is_flag=True, help="Quantise the drafter.")
@click.option("--q-bits", type=int, help="Bits per weight. Default: 8.")
@click.option("--q-group-size", type=int, help="Weights per scale. Default: 64.")
@click.option(
    "--q-mode",
    type=click.Choice(MODES),
    help="As mlx_lm.convert has them; all but affine fix the bits and groups. Default: affine.",
)
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    help="Of the weights. Default: as in the source.",
)
@click.option(
    "--with-target",
    metavar="OUT",
    help="Also write the model itself there, as mlx_lm.convert does, from the same files.",
)
@click.option(
    "--target-q-bits", type=int, help="Bits per weight of that model. Default: not quantised."
)
@click.option(
    "--draft-vocab",
    type=int,
    metavar="N",
    help="Let it propose the N likeliest tokens only. Default: all. The text stays the same.",
)
@click.option(
    "--calibrate",
    metavar="FILE|builtin",
    help="The text whose tokens are counted for that. Default: builtin.",
)
@click.option(
    "--probe",
    is_flag=True,
    help="Draft with the model first. Nothing is written where that does not work (exit code 4).",
)
@click.option(
    "--probe-bits", metavar="N,N", help="Probe it with so many bits, too, for example 4,8."
)
@click.option("--upload", metavar="ORG/REPO", help="Upload it to the Hugging Face hub, too.")
def convert_command(**options: Any) -> None:
    """Write a drafter directory: of a model's NextN head, a Gemma-4 assistant, an EAGLE-3 head.

    With -q, the embedding and the other matrices are quantised. Routers, the choice of clusters
    and the matrix that takes in the model's hidden state keep 8 bits.
    """
    with one_sentence():
        click.echo(convert(**options).as_text())


@cli.command("inspect")
@click.argument("path")
@click.option(
    "--draft-model",
    metavar="DIR",
    default="auto",
    help="The drafter to inspect with the model. Default: the one that generate would find.",
)
@click.option("--check", is_flag=True, help="Compare the drafter's tensors with their hashes.")
@click.option("--probe", is_flag=True, help="Draft with the model, and say how often it is right.")
@click.option("--probe-bits", metavar="N,N", help="Also with so many bits, for example 4,8.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect_command(path: str, as_json: bool, **options: Any) -> None:
    """Say whether a model would be decoded speculatively, and if not, why.

    PATH is a model, alone or beside its drafter, or a drafter to be described.

    Exit code: 0 usable, 2 no drafter, 3 unverified, 4 incompatible, 1 damaged files.
    """
    with one_sentence():
        inspection = inspect_path(path, **options)
    click.echo(json.dumps(inspection.as_dict()) if as_json else inspection.as_text())
    sys.exit(inspection.exit_code)


PROMPTS = [
    click.option(
        "--prompt-class",
        "classes",
        type=click.Choice(CLASSES),
        multiple=True,
        help="Of the prompts that come along; may be repeated. Default: all.",
    ),
    click.option("--prompt-file", metavar="FILE", help="A text file with one prompt, instead."),
]
PAIR = [
    click.option("--model", help="A model directory or ORG/REPO. Default: the demo model."),
    click.option(
        "--draft-model", default="auto", help="A drafter, as for generate. Default: look for one."
    ),
    click.option(
        "--draft-kind",
        type=click.Choice(get_args(DraftKind)),
        default="auto",
        help="As for generate. Default: auto.",
    ),
]
SAMPLING = click.option(
    "--sampling",
    type=click.Choice(get_args(Sampling)),
    default="auto",
    help="As for generate. Default: auto.",
)


def with_options(options: list[Callable]) -> Callable:
    return lambda command: reduce(
        lambda wrapped, option: option(wrapped), reversed(options), command
    )


@cli.command("bench")
@with_options(PAIR)
@with_options(PROMPTS)
@click.option(
    "--depth",
    "depths",
    metavar="N|auto",
    multiple=True,
    help="Drafts a round; may be repeated. Default: 1, 2, 3, 4 and auto.",
)
@click.option("--max-tokens", "-m", type=int, default=256, help="Of each text. Default: 256.")
@click.option("--repeats", type=int, default=3, help="Runs of each setting. Default: 3.")
@click.option("--cooldown", type=float, default=0.0, help="Seconds before each run. Default: 0.")
@click.option("--temp", type=float, default=0.0, help="Default: 0, greedy.")
@SAMPLING
@click.option(
    "--calibrate",
    is_flag=True,
    help="First measure what a round costs at each depth, and keep it for auto.",
)
@click.option("--markdown", is_flag=True, help="The table in Markdown.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the result.")
@click.option("--html", type=click.Path(path_type=Path), help="Write one page with plots.")
@click.option("--png", type=click.Path(path_type=Path), help="Write plots into a directory.")
@click.option("--against", metavar="URL", help="Measure an OpenAI-compatible server, too.")
@click.option("--against-model", help="Its model's name. Default: the only one there.")
@click.option("--against-quantization", help="Of its model, for example 4bit.")
@click.option("--against-speculation", help="For example none, or 'draft-mtp n=3'.")
@click.option("--against-key-file", type=click.Path(path_type=Path), help="Holds its API key.")
def bench_command(
    model: str | None,
    draft_model: str,
    draft_kind: DraftKind,
    classes: tuple[str, ...],
    prompt_file: str | None,
    depths: tuple[str, ...],
    max_tokens: int,
    repeats: int,
    cooldown: float,
    temp: float,
    sampling: Sampling,
    calibrate: bool,
    markdown: bool,
    json_file: Path | None,
    html: Path | None,
    png: Path | None,
    against: str | None,
    against_model: str | None,
    against_quantization: str | None,
    against_speculation: str | None,
    against_key_file: Path | None,
) -> None:
    """Measure decoding without drafts and with them, in turns.

    Stock mlx_lm comes first, in the same process, with the same prompts and weights. End-of-text
    tokens do not end a text.
    """
    with one_sentence():
        chosen = tuple(map(draft_tokens, depths)) or bench.DEPTHS
        endpoint = None
        if against is not None:
            key = read_key_file(against_key_file) if against_key_file else None
            endpoint = Endpoint(
                against, against_quantization, against_speculation, against_model, key
            )
        text = run_bench(
            model or str(demo.demo_model()),
            draft_model,
            chosen_prompts(classes, prompt_file),
            bench.Plan(
                chosen, max_tokens, repeats, cooldown, temp, sampling, draft_kind=draft_kind
            ),
            Files(json_file, html, png),
            markdown,
            calibrate,
            endpoint,
        )
    click.echo(text)


@cli.command("verify")
@with_options(PAIR)
@with_options(PROMPTS)
@click.option(
    "--depth",
    "depths",
    metavar="N|auto",
    multiple=True,
    help="Drafts a round; may be repeated. Default: 1, 2, 3 and auto.",
)
@click.option("--max-tokens", "-m", type=int, default=256, help="Of each text. Default: 256.")
@click.option("--temp", type=float, default=0.0, help="Default: 0, greedy.")
@click.option("--top-p", type=float, default=0.0)
@click.option("--min-p", type=float, default=0.0)
@click.option("--top-k", type=int, default=0)
@click.option("--seed", type=int, default=0, help="Default: 0.")
@SAMPLING
@click.option("--draws", type=int, default=1000, help="With --sampling ratio. Default: 1000.")
@click.option(
    "--eps", type=float, help="Margin of a tie. Default: what rounding explains in this dtype."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify_command(
    model: str | None,
    draft_model: str,
    classes: tuple[str, ...],
    prompt_file: str | None,
    depths: tuple[str, ...],
    as_json: bool,
    **plan: Any,
) -> None:
    """Check that drafts leave a model's output as it is.

    Greedy text and --sampling stock are compared with stock mlx_lm, seed with decoding without
    drafts; for ratio, drawn tokens are tested against the model's distribution.

    Exit code: 0 identical, perhaps up to ties; 1 different; 3 nothing was drafted.
    """
    with one_sentence():
        named = classes or prompt_file
        verdict = verify(
            model or str(demo.demo_model()),
            draft_model,
            chosen_prompts(classes, prompt_file) if named else None,
            VerifyPlan(depths=tuple(map(draft_tokens, depths)) or VERIFY_DEPTHS, **plan),
            say,
        )
    click.echo(json.dumps(verdict.as_dict()) if as_json else verdict.as_text())
    sys.exit(verdict.exit_code)
