"""`mlx-spec run`: a stock program of mlx_lm, a script or a module, with the plugin installed."""

import importlib
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mlx_spec import plugin
from mlx_spec.errors import SpecError
from mlx_spec.options import SpecOptions
from mlx_spec.stats import SpecStats


class Tally:
    """The generations of a program, together."""

    def __init__(self) -> None:
        self.engaged = 0
        self.total = SpecStats()
        self.others: Counter[str] = Counter()

    def add(self, stats: SpecStats) -> None:
        if not stats.engaged:
            self.others[stats.why] += 1
            return
        self.engaged += 1
        self.total.kind = stats.kind
        self.total.rounds += stats.rounds
        self.total.drafted += stats.drafted
        self.total.accepted += stats.accepted
        self.total.unprimed += stats.unprimed

    def as_text(self) -> str:
        lines = []
        if self.engaged:
            lines.append(
                f"Speculation: {self.total.kind}; {self.engaged} generations, "
                f"{self.total.accepted} of {self.total.drafted} drafts accepted "
                f"({self.total.acceptance:.2f}), {self.total.tokens_per_round:.2f} tokens a round"
            )
        if self.total.unprimed:
            lines.append(self.total.unprimed_text())
        for why, count in self.others.items():
            lines.append(f"Speculation: not engaged in {count} generations: {why}")
        return "\n".join(lines) or "Speculation: not engaged: nothing was generated"


def run_program(program: str, arguments: list[str], options: SpecOptions | None = None) -> Tally:
    """Run a program in this process, as its own command would.

    Args:
        program: "mlx_lm.NAME" for a command of mlx_lm, "-m" for the module that the first
            argument names, or the path of a script.
        arguments: of the program.
        options: depth and acceptance law.

    Raises: SpecError for an unknown program; whatever the program raises.
    """
    start = starter(program, arguments)
    tally = Tally()
    plugin.install(tally.add, options)
    try:
        start()
    finally:
        plugin.uninstall()
        print(tally.as_text(), file=sys.stderr)
    return tally


def starter(program: str, arguments: list[str]) -> Callable[[], Any]:
    """What starts the program; `sys.argv` is as it will find it."""
    if program == "-m":
        if not arguments:
            raise SpecError("After -m the name of a module is missing.")
        sys.argv = arguments
        return partial(runpy.run_module, arguments[0], run_name="__main__", alter_sys=True)
    sys.argv = [program, *arguments]
    if program.startswith("mlx_lm."):
        return stock_main(program)
    if Path(program).is_file():
        sys.path.insert(0, str(Path(program).resolve().parent))
        return partial(runpy.run_path, program, run_name="__main__")
    raise SpecError(
        f"There is no program {program!r}; give mlx_lm.generate, mlx_lm.chat or another command "
        "of mlx_lm, the path of a script, or -m MODULE."
    )


def stock_main(program: str) -> Callable[[], Any]:
    """The `main` of a command of mlx_lm."""
    try:
        return importlib.import_module(program).main
    except (ImportError, AttributeError) as error:
        raise SpecError(f"mlx_lm has no command {program}.") from error
