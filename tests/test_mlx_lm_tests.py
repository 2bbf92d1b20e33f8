"""scripts/mlx_lm_tests.py, on a checkout of its own with a few tests."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import mlx_lm_tests
from mlx_lm_tests import Comparison, Result, Run, run_file

from mlx_spec.demo import demo_model

GENERATE = """
import importlib
import unittest

from mlx_lm import generate, load

generate_module = importlib.import_module("mlx_lm.generate")


class TestGenerate(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model, cls.tokenizer = load("mlx-community/Some-Model-4bit")

    def generate(self):
        return generate(self.model, self.tokenizer, "import os", max_tokens=20)

    def test_1_leaves_a_cache_behind(self):
        self.model.make_cache = None
        raise ValueError("no such cache")

    def test_2_generates(self):
        assert len(self.generate()) > 5

    def test_3_knows_the_model(self):
        assert self.generate() == "Paris", "not Paris"

    @unittest.skip("needs two machines")
    def test_4_is_skipped(self):
        pass

    def test_5_is_of_mlx_lm(self):
        assert generate_module.generate_step.__module__ == "mlx_lm.generate", "a hook"
"""
CRASH = """
import os


def test_ends_python():
    os._exit(3)


def test_next():
    pass
"""
REPORT = """\
What was drafted:
  tests/test_generate.py: Speculation: nextn; 2 generations, {drafted}
1 tests pass with and without the plugin.
3 do not pass without it either:
  ValueError: no such cache
    tests/test_generate.py::TestGenerate::test_1_leaves_a_cache_behind
  with the demo model, and nothing in the hub's cache: AssertionError: not Paris
    tests/test_generate.py::TestGenerate::test_3_knows_the_model
  Skipped: needs two machines
    tests/test_generate.py::TestGenerate::test_4_is_skipped
1 fail with the plugin only.
  tests/test_generate.py::TestGenerate::test_5_is_of_mlx_lm: AssertionError: a hook
"""


def test_a_checkout(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_generate.py").write_text(GENERATE)
    command = [sys.executable, mlx_lm_tests.__file__, tmp_path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    account, _, report = result.stdout.partition("What was drafted:")
    drafted = report.partition("2 generations, ")[2].partition("\n")[0]
    assert f"What was drafted:{report}" == REPORT.format(drafted=drafted)
    assert "def test_5_is_of_mlx_lm(self):" in account
    assert "not Paris" not in account
    assert result.stderr == "tests/test_generate.py, without and with the plugin\n"


def test_a_test_that_ends_python(tmp_path):
    (tmp_path / "test_crash.py").write_text(CRASH)
    run = run_file(tmp_path, "test_crash.py", demo_model(), 60)
    assert run.result("test_crash.py::test_ends_python").reason == "it did not end"
    assert run.result("test_crash.py::test_next").reason == "pytest ended with exit code 3"


def test_no_checkout(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mlx_lm_tests", str(tmp_path)])
    assert mlx_lm_tests.main() == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"Error: {tmp_path} is no checkout of mlx-lm: it has none of")
    assert len(output.err.splitlines()) == 1


PASSED, FAILED = Result("passed"), Result("failed", "ImportError: no requests")


@pytest.mark.parametrize(
    ("stock", "ours", "exit_code"),
    [
        ({"f::t": PASSED}, {"f::t": PASSED}, 0),
        ({"f::t": PASSED, "f::u": FAILED}, {"f::t": PASSED, "f::u": FAILED}, 0),
        ({"f::t": PASSED}, {"f": FAILED}, 1),
        ({"f::t": PASSED}, {}, 1),
        ({"f": FAILED}, {"f": FAILED}, 2),
        ({}, {}, 2),
    ],
)
def test_exit_codes(stock, ours, exit_code):
    comparison = Comparison()
    comparison.add("f", Run(stock, end="it took too long"), Run(ours))
    assert comparison.exit_code == exit_code
    reasons = {result.reason for result in stock.values() if result is FAILED}
    assert set(comparison.not_run) == (reasons if stock else {"it took too long"})


def test_a_file_that_cannot_be_imported_with_the_plugin():
    comparison = Comparison()
    comparison.add("f", Run({"f::t": PASSED}), Run({"f": FAILED}))
    assert comparison.regressions == {"f::t": FAILED}
