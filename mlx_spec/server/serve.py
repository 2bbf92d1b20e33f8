"""`mlx-spec serve`: mlx_lm.server with drafts, and a contract for the programs that start it.

The options are those of mlx_lm.server, whose own `main` reads them; see docs/menubar.md for the
contract.
"""

import argparse
import logging
import os
import sys
import threading
import uuid
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, Literal, NoReturn

from mlx_lm.server import get_system_fingerprint
from mlx_lm.server import main as stock_main

from mlx_spec.errors import BadArguments, SpecError, one_line, reported_as
from mlx_spec.generate import bound
from mlx_spec.options import HELP, SpecOptions, add_spec_options, draft_tokens
from mlx_spec.server.generation import SpecModelProvider, SpecResponseGenerator
from mlx_spec.server.handler import App, Server
from mlx_spec.server.porter import Porter
from mlx_spec.server.process import Events, on_stop_signals, watch_parent, write_ready_file
from mlx_spec.server.prompt_cache import PromptCache
from mlx_spec.server.status import SCHEMA_VERSION, Status
from mlx_spec.upstream import check_mlx_lm

DEFAULT_PORT = 8484
KEY_VARIABLE = "MLX_SPEC_API_KEY"
NEWS_S = 0.2  # between two looks at the progress of loading
STOP_S = 1.0  # for the decoding thread to end; then the process ends without it

News = Literal["loaded", "stop"] | Exception


def serve(arguments: list[str]) -> NoReturn:
    """Run the server until it is stopped. Raises: SpecError before it listens."""

    class Parser(ServeParser):
        def parse_args(self) -> argparse.Namespace:  # type: ignore[override]
            args = super().parse_args(arguments)
            args.spec_options = SpecOptions(
                args.num_draft_tokens, args.max_draft_tokens, args.sampling, args.draft_kind
            )
            args.num_draft_tokens = 0  # mlx_lm.server takes numbers only, and passes it on to us
            return args

    def run(host: str, port: int, provider: SpecModelProvider) -> None:
        Run(host, port, provider).until_stopped()

    main = bound(
        stock_main,
        argparse=SimpleNamespace(**vars(argparse) | {"ArgumentParser": Parser}),
        ModelProvider=SpecModelProvider,
        run=run,
    )
    main()
    sys.exit(0)


class ServeParser(argparse.ArgumentParser):
    """mlx_lm.server's parser, with what differs here."""

    def __init__(self, **options: Any):
        options |= {
            "prog": "mlx-spec serve",
            "description": "mlx_lm.server, with drafts, for one machine's own programs.",
        }
        super().__init__(**options)
        add_spec_options(self)
        self.add_argument("--launch-id", help="Told by /health. Default: a random one.")
        self.add_argument("--ready-file", type=Path, help="Written when the model is loaded.")
        self.add_argument(
            "--log-json", action="store_true", help="More events than `ready` on stdout."
        )
        self.add_argument("--log-file", type=Path, help="For what would go to stderr.")
        self.add_argument(
            "--watchdog-ppid",
            type=process_id,
            metavar="PID",
            help="Stop when this process has ended.",
        )
        self.add_argument(
            "--api-key-file",
            type=Path,
            help=f"Holds the key that clients must send. Or set {KEY_VARIABLE}.",
        )
        self.add_argument(
            "--max-body-bytes", type=int, default=32 << 20, help="Of a request. Default: 32 MiB."
        )

    def add_argument(self, *names: Any, **options: Any) -> Any:
        if "--port" in names:
            options |= {
                "default": DEFAULT_PORT,
                "help": f"0: any free one. Default: {DEFAULT_PORT}.",
            }
        if "--draft-model" in names:
            options["help"] = (
                "A drafter, or a smaller model with the same tokenizer: a directory or ORG/REPO; "
                "'none': no drafts. Default: look for one in the model's directory and beside it, "
                "or else look up what to draft in the text."
            )
        if "--num-draft-tokens" in names:
            options |= {
                "type": draft_tokens,
                "default": "auto",
                "help": HELP["num_draft_tokens"],
            }
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"Error: {message}; see mlx-spec serve --help.\n")


class Run:
    """One run of the server. Listens when it is made."""

    def __init__(self, host: str, port: int, provider: SpecModelProvider):
        """Raises: BadArguments, PortInUse."""
        self.args = provider.cli_args
        key = read_key(self.args.api_key_file)
        if self.args.ready_file is not None and not self.args.ready_file.parent.is_dir():
            raise BadArguments(f"The folder of --ready-file {self.args.ready_file} does not exist.")
        try:
            self.server = Server(host, port)
        except (OSError, ValueError) as error:
            raise BadArguments(f"{host}, port {port}: {one_line(error)}") from error
        if self.args.log_file is not None:
            log_to(self.args.log_file)
        check_mlx_lm()
        self.events = Events(self.args.log_json)
        self.porter = Porter(self.server.socket)
        self.news: SimpleQueue[News] = SimpleQueue()
        responses = SpecResponseGenerator(
            provider,
            PromptCache(self.args.prompt_cache_size),
            options=lambda args: self.args.spec_options,
            loaded=lambda: self.news.put("loaded"),
            failed=self.news.put,
        )
        self.status = Status(
            responses,
            self.args.launch_id or str(uuid.uuid4()),
            phase="loading",
            draft_kind=self.args.spec_options.draft_kind,
        )
        self.porter.tell(self.status.health()[1])
        self.app = App(
            self.status,
            key,
            self.args.max_body_bytes,
            get_system_fingerprint(),
            self.args.spec_options,
        )

    def until_stopped(self) -> NoReturn:
        """Ends the process: with 0 when it is stopped, else with the error's exit code."""
        try:
            self.follow_news()
            exit_code = 0
        except Exception as error:
            print(f"Error: {one_line(error)}", file=sys.stderr)
            exit_code = error.exit_code if isinstance(error, SpecError) else 1
        self.stop()
        sys.stderr.flush()
        os._exit(exit_code)  # without waiting for a thread that is inside a long computation

    def follow_news(self) -> None:
        """Until it is to stop. Raises: what kept the default model from being loaded."""
        on_stop_signals(lambda: self.news.put("stop"))
        if self.args.watchdog_ppid is not None:
            watch_parent(self.args.watchdog_ppid, lambda: self.news.put("stop"))
        self.events.progress("listening", self.address())
        while (news := self.next_news()) != "stop":
            if news == "loaded":
                self.loaded()
            elif self.status.phase == "loading":
                raise news
            else:  # /health says so
                logging.error("The decoding thread has ended: %s", one_line(news))

    def next_news(self) -> "News":
        shown = None
        while True:
            try:
                return self.news.get(timeout=NEWS_S)
            except Empty:
                progress = self.status.progress()
                if self.status.phase == "loading" and progress != shown:
                    shown = progress
                    self.porter.tell(self.status.health()[1])
                    self.events.progress("loading", {"progress": progress})

    def loaded(self) -> None:
        self.status.phase = "serving"
        self.porter.leave()
        threading.Thread(target=self.server.serve, args=(self.app,), daemon=True).start()
        values = {
            **self.address(),
            "model": self.status.model,
            "drafter": self.status.drafter,
            "spec": self.status.spec(),
        }
        if self.args.ready_file is not None:
            write_ready_file(self.args.ready_file, values)
        self.events.ready(values)
        spec = values["spec"]
        drafts = (
            f"drafter {self.status.drafter}"
            if spec["reason"] is None
            else f"no drafts: {spec['reason']} ({spec['detail']})"
        )
        logging.info("Listening on %s; model %s, %s", values["url"], self.status.model, drafts)

    def address(self) -> dict[str, Any]:
        host, port = str(self.server.server_address[0]), self.server.server_address[1]
        shown = f"[{host}]" if ":" in host else host
        return {
            "schema_version": SCHEMA_VERSION,
            **self.status.identity(),
            "host": host,
            "port": port,
            "url": f"http://{shown}:{port}",
        }

    def stop(self) -> None:
        serving, self.status.phase = self.status.phase == "serving", "stopping"
        if self.args.ready_file is not None:
            self.args.ready_file.unlink(missing_ok=True)
        self.events.progress("stopping", {})
        if serving:
            self.server.shutdown()
        else:
            self.porter.leave()
        self.server.server_close()
        self.status.responses.stop(STOP_S)


def process_id(text: str) -> int:
    """Raises: ArgumentTypeError also for 0 and less, which stand for groups of processes."""
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not the ID of a process")
    return int(text)


def read_key(path: Path | None) -> str | None:
    """Raises: BadArguments for a file that cannot be read, or an empty key."""
    key = os.environ.get(KEY_VARIABLE)
    if path is not None:
        with reported_as(BadArguments):
            key = path.read_text()
    if key is not None and not key.strip():
        raise BadArguments(f"The API key is empty; check --api-key-file or {KEY_VARIABLE}.")
    return key and key.strip()


def log_to(path: Path) -> None:
    """What goes to stderr goes to the end of a file. Raises: BadArguments."""
    with reported_as(BadArguments):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    os.close(file)
