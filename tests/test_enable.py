"""`mlx-spec enable` and `disable`, in a virtual environment that shares this one's packages."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from click.testing import CliRunner

import mlx_spec
from mlx_spec import cli
from mlx_spec.enable import FILE, disable, enable, pth_line
from mlx_spec.errors import SpecError
from models import GEMMA_DEMO, checkpoint_path

OPTIONS = ["--model", str(checkpoint_path(GEMMA_DEMO)), "--ignore-chat-template", "-m", "20"]
OPTIONS += ["--prompt", "import os", "--verbose", "False"]
TALLY = "Speculation: gemma4-assistant; 1 generations"
IMPORTED = "import sys; print({m for m in sys.modules if m == 'runpy' or m[:3] == 'mlx'})"


class Environment:
    def __init__(self, path: Path):
        venv.create(path, symlinks=True)
        self.bin = path / "bin"
        variables = {"base": str(path), "platbase": str(path)}
        self.site_packages = Path(sysconfig.get_path("purelib", vars=variables))
        packages = [sysconfig.get_path("purelib"), str(Path(mlx_spec.__file__).parent.parent)]
        (self.site_packages / "shared.pth").write_text("\n".join(packages))
        self.script = self.bin / "mlx_lm.generate"
        self.script.write_text("from mlx_lm.generate import main\nmain()\n")

    def run(self, *arguments: object, **options: object) -> subprocess.CompletedProcess:
        words = [self.bin / "python", *map(str, arguments)]
        return subprocess.run(words, capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def stock(environment):
    """What mlx_lm prints by itself."""
    result = environment.run("-m", "mlx_lm", "generate", *OPTIONS)
    assert result.returncode == 0, result.stderr
    assert "Speculation" not in result.stderr
    return result.stdout


@pytest.fixture
def enabled(environment, stock):
    enable(environment.site_packages)
    yield environment
    disable(environment.site_packages)


@pytest.mark.parametrize("program", ["-m mlx_lm generate", "-um mlx_lm.generate", "script"])
def test_a_stock_command_prints_the_same_and_drafts(program, enabled, stock):
    words = [enabled.script] if program == "script" else program.split()
    result = enabled.run(*words, *OPTIONS)
    assert (result.returncode, result.stdout) == (0, stock), result.stderr
    assert TALLY in result.stderr


def test_a_command_that_generates_nothing_says_nothing(enabled):
    result = enabled.run("-m", "mlx_lm", "chat", "--help")
    assert result.returncode == 0
    assert "usage" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("arguments", [[], ["mlx_lm.generate"]])
def test_other_programs_import_nothing(arguments, enabled):
    """Not even where mlx_lm is one of their words: but for runpy, which is Python's own."""
    result = enabled.run("-c", IMPORTED, *arguments)
    assert result.stdout == ("{'runpy'}\n" if arguments else "set()\n")
    assert result.stderr == ""


def test_a_program_that_imports_mlx_lm_stays_stock(enabled, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"import mlx_lm\n{IMPORTED}")
    result = enabled.run(program, "mlx_lm.generate")
    assert result.returncode == 0, result.stderr
    assert "mlx_lm" in result.stdout
    assert "mlx_spec" not in result.stdout


def test_a_broken_plugin_is_one_line_and_stock_goes_on(enabled, stock, tmp_path):
    package = tmp_path / "mlx_spec"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('a broken\\nplugin')")
    result = enabled.run(enabled.script, *OPTIONS, env={"PYTHONPATH": str(tmp_path)})
    assert (result.returncode, result.stdout) == (0, stock), result.stderr
    line = "mlx-spec is enabled, but could not be installed: a broken plugin\n"
    assert result.stderr.endswith(line)
    assert "Traceback" not in result.stderr


def test_enable_and_disable(environment, monkeypatch):
    path = environment.site_packages / FILE
    result = environment.run("-m", "mlx_spec", "enable")
    assert f"Wrote {path};" in result.stdout, result.stderr
    monkeypatch.setattr(cli, "site_packages", lambda: environment.site_packages)
    runner = CliRunner()
    assert runner.invoke(cli.cli, ["enable"]).stdout == result.stdout
    assert path.read_text() == pth_line()
    assert len(pth_line().splitlines()) == 1
    assert not path.with_suffix(".new").exists()
    assert runner.invoke(cli.cli, ["disable"]).stdout == f"Removed {path}.\n"
    assert not path.exists()
    result = runner.invoke(cli.cli, ["disable"])
    assert (result.exit_code, result.stdout) == (0, "Nothing to undo: mlx-spec was not enabled.\n")


def test_what_an_uninstalled_package_leaves_behind_is_silent(environment, tmp_path):
    path = environment.site_packages / FILE
    path.write_text(pth_line(tmp_path / "gone" / "switch.py"))
    result = environment.run("-c", "print('hello')", "mlx_lm.generate")
    disable(environment.site_packages)
    assert (result.stdout, result.stderr) == ("hello\n", "")


def test_site_packages_that_cannot_be_written(tmp_path):
    with pytest.raises(SpecError, match=f"{FILE} cannot be written .*; install mlx-spec in"):
        enable(tmp_path / "missing")
    (tmp_path / FILE).mkdir()
    with pytest.raises(SpecError, match=f"{FILE} cannot be removed .*; delete it"):
        disable(tmp_path)


def test_the_line_survives_any_path(tmp_path):
    """A quote or a letter outside ASCII in the path of the package."""
    switch = tmp_path / "it's \u00e9.py"
    switch.write_text("print(__name__)")
    program = f"import sys; sys.orig_argv = ['mlx_lm']; exec({pth_line(switch)!r})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "__main__\n", result.stderr
