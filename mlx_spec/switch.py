"""Run by the .pth file of `mlx-spec enable` at the start of a Python process that names mlx_lm.

Nothing of mlx_spec is imported, unless the process is a command of mlx_lm that generates: then the
plugin is installed as soon as mlx_lm has been imported.
"""

import atexit
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

COMMANDS = ("benchmark", "cache_prompt", "chat", "generate", "server")


def command() -> str:
    """The command of mlx_lm that this process runs, or another text."""
    argv = [*getattr(sys, "argv", []), "", ""]  # Python sets it after the .pth files
    package, _, name = Path(argv[0]).name.partition(".")
    return (name or argv[1]) if package == "mlx_lm" else ""


class MlxSpecFinder:
    """Finds mlx_lm as the finders after it do, and has the plugin installed after its import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "mlx_lm" or command() not in COMMANDS:
            return None
        found = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                install()

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def install() -> None:
    """Install the plugin, or say on stderr why mlx_lm goes on without. What was drafted is said
    when the program ends, if it has generated anything."""
    try:
        from mlx_spec import plugin
        from mlx_spec.run import Tally

        tally = Tally()
        plugin.install(tally.add)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"mlx-spec is enabled, but could not be installed: {reason}", file=sys.stderr)
        return

    def say() -> None:
        if tally.engaged or tally.others:
            print(tally.as_text(), file=sys.stderr)

    atexit.register(say)


def switch_on() -> None:
    """`python -m mlx_lm.NAME` becomes `python -m mlx_lm NAME`, as mlx_lm itself recommends: it
    would execute a copy of the module, in which the plugin replaces nothing."""
    if any(type(finder).__name__ == MlxSpecFinder.__name__ for finder in sys.meta_path):
        return  # Python reads the .pth files of a virtual environment twice
    sys.meta_path.insert(0, MlxSpecFinder())
    run_module = vars(runpy).get("_run_module_as_main")
    if run_module is None:
        return

    def run(name: str, alter_argv: bool = True) -> Any:
        package, _, rest = name.partition(".")
        if package == "mlx_lm" and rest in COMMANDS:
            sys.argv.insert(1, rest)
            name = package
        if name == "mlx_lm":
            sys.argv[0] = name
        return run_module(name, alter_argv)

    vars(runpy)["_run_module_as_main"] = run


if __name__ == "__main__":
    switch_on()
