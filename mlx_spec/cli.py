"""The `mlx-spec` command. Each command calls one function; errors are one sentence on stderr."""

import argparse
import json
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import click
from mlx_lm.generate import generate as stock_generate
from mlx_lm.generate import main as stock_main
from mlx_lm.generate import setup_arg_parser

from mlx_spec import demo
from mlx_spec.conversion import DTYPES, convert
from mlx_spec.enable import disable, enable
from mlx_spec.errors import SpecError, one_line
from mlx_spec.generate import bound, stream_generate
from mlx_spec.inspection import inspect_path
from mlx_spec.load import load
from mlx_spec.run import run_program
from mlx_spec.server.serve import serve
from mlx_spec.stats import SpecStats


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turn expected errors into a message on stderr and an exit code."""
    try:
        yield
    except SpecError as error:
        fail(str(error), error.exit_code)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
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
    args = generation_parser().parse_args(arguments)
    with one_sentence():
        run_generate(args)


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
        "A drafter, or a Gemma-4 assistant as released: a directory or ORG/REPO; 'auto': a head "
        "inside the model's directory, else a directory beside it with -MTP (Qwen) or -assistant "
        "(Gemma-4) in its name; 'none': no drafting. For families that mlx-spec does not know, a "
        "draft model as mlx_lm.generate takes it. Default: auto."
    )
    changed["num_draft_tokens"].help = "Tokens to draft in a round; 0: none. Default: 3."
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
        for response in stream_generate(*positional, require_spec=args.require_spec, **options):
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
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(program: str, arguments: tuple[str, ...]) -> None:
    """Run a stock program with drafts: mlx_lm.generate, mlx_lm.chat, a script, or -m MODULE.

    Its own options stay as they are; --draft-model takes drafters too. What was drafted and
    accepted, or why nothing was, is said on stderr at the end.
    """
    with one_sentence():
        run_program(program, list(arguments))


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
@click.option("--num-draft-tokens", type=click.IntRange(1), help="Default: 3.")
def demo_command(
    family: str, prompt: str, max_tokens: int, temp: float, num_draft_tokens: int | None
) -> None:
    """Decode a text with a demo model, plainly and speculatively."""
    with one_sentence():
        comparison = demo.compare(family, prompt, max_tokens, temp, num_draft_tokens)
    click.echo(comparison.as_text())
    if not comparison.same_text:
        sys.exit(1)


@cli.command("convert")
@click.option("--from", "source", required=True, metavar="HF_DIR", help="A checkpoint directory.")
@click.option("--to", "out", required=True, metavar="OUT", help="The drafter directory to write.")
@click.option(
    "--model",
    metavar="MODEL_DIR",
    help="The model that it is for. Nothing is written if they do not fit.",
)
@click.option("-q", "--quantize", is_flag=True, help="Quantise the drafter.")
@click.option("--q-bits", type=int, help="Bits per weight. Default: 8.")
@click.option("--q-group-size", type=int, help="Weights per scale. Default: 64.")
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    help="Of the weights. Default: as in the source.",
)
def convert_command(**options: Any) -> None:
    """Write a drafter directory, from a Qwen model with a NextN head or a Gemma-4 assistant.

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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect_command(path: str, draft_model: str, as_json: bool) -> None:
    """Say whether a model would be decoded speculatively, and if not, why.

    PATH is a model, alone or beside its drafter, or a drafter to be described.

    Exit code: 0 usable, 2 no drafter, 3 unverified, 4 incompatible, 1 damaged files.
    """
    with one_sentence():
        inspection = inspect_path(path, draft_model)
    click.echo(json.dumps(inspection.as_dict()) if as_json else inspection.as_text())
    sys.exit(inspection.exit_code)
