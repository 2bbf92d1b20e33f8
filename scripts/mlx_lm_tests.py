"""Run mlx-lm's own tests of generation, prompt caches and server with the plugin installed.

    scripts/mlx_lm_tests CHECKOUT
    scripts/mlx_lm_tests CHECKOUT --family gemma4

Tested is the mlx_lm in CHECKOUT, or the installed one if CHECKOUT has tests only. Whatever model
the tests want from the Hugging Face hub, they get a demo model. Each file is run twice, without
and with the plugin: what fails without it cannot be judged here, and is listed with its reason;
what fails only with it is a regression.

Exit code: 0 no regression, 1 regressions, 2 nothing could be run.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from mlx_spec.demo import DEFAULT_FAMILY, MODELS, demo_model
from mlx_spec.errors import SpecError

FILES = [
    f"tests/test_{name}.py"
    for name in ("chat", "generate", "prompt_cache", "sample_utils", "server")
]
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Result:
    """What became of a test. `text` is pytest's full account of a failure."""

    outcome: str
    reason: str = ""
    text: str = ""


@dataclass
class Run:
    """One file, with or without the plugin.

    Attributes:
    tally: what was drafted, if the plugin was installed.
    end: why tests may be missing.
    """

    results: dict[str, Result] = field(default_factory=dict)
    tally: str = ""
    end: str = ""

    def result(self, test: str) -> Result:
        collection = self.results.get(test.partition("::")[0])
        return self.results.get(test) or collection or Result("missing", self.end)


@dataclass
class Comparison:
    """Attributes:
    same: tests that pass with and without the plugin.
    not_run: tests, by the reason why they do not even pass without it.
    regressions: the tests that pass only without it.
    tallies: what was drafted, by file.
    """

    same: list[str] = field(default_factory=list)
    not_run: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    regressions: dict[str, Result] = field(default_factory=dict)
    tallies: dict[str, str] = field(default_factory=dict)

    def add(self, file: str, stock: Run, ours: Run) -> None:
        self.tallies[file] = ours.tally
        for test in sorted(stock.results):
            before, after = stock.results[test], ours.result(test)
            if before.outcome != "passed":
                self.not_run[why_not_run(before)].append(test)
            elif after.outcome == "passed":
                self.same.append(test)
            else:
                self.regressions[test] = after
        if not stock.results:
            self.not_run[stock.end].append(file)

    @property
    def exit_code(self) -> int:
        if self.regressions:
            return 1
        return 0 if self.same else 2

    def as_text(self) -> str:
        lines = [result.text for result in self.regressions.values() if result.text]
        lines.append("What was drafted:")
        for file, tally in self.tallies.items():
            lines += [f"  {file}: {line}" for line in tally.splitlines()]
        lines.append(f"{len(self.same)} tests pass with and without the plugin.")
        lines.append(f"{sum(map(len, self.not_run.values()))} do not pass without it either:")
        for reason, tests in self.not_run.items():
            lines += [f"  {reason}", *(f"    {test}" for test in tests)]
        lines.append(f"{len(self.regressions)} fail with the plugin only.")
        lines += [f"  {test}: {result.reason}" for test, result in self.regressions.items()]
        return "\n".join(lines)


def why_not_run(result: Result) -> str:
    reason = re.sub(" at 0x[0-9a-f]+", "", result.reason)[:200]
    if reason.startswith("AssertionError"):
        return f"with the demo model, and nothing in the hub's cache: {reason}"
    return reason


def run_file(checkout: Path, file: str, model: Path, timeout: int, *options: str) -> Run:
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "results.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "pytest_hub_model"]
        command += ["-p", "no:cacheprovider", "--rootdir", ".", "--results", str(path)]
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "HF_HUB_CACHE": scratch,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        try:
            process = subprocess.run(
                [*command, "--hub-model", str(model), *options, file],
                cwd=checkout,
                env=environment,
                timeout=timeout,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            last = process.stdout.strip().splitlines()[-1:]
            end = ": ".join([f"pytest ended with exit code {process.returncode}", *last])
        except subprocess.TimeoutExpired:
            end = f"the file took longer than {timeout} s"
        run = Run(end=end)
        lines = path.read_text().splitlines() if path.exists() else []
    for record in map(json.loads, lines):
        if "tally" in record:
            run.tally = record["tally"]
        else:
            test = record.pop("test")
            run.results[test] = Result(**record)
    return run


def compare(checkout: Path, model: Path, timeout: int) -> Comparison:
    """Raises SpecError where `checkout` has none of the tests."""
    files = [file for file in FILES if (checkout / file).is_file()]
    if not files:
        raise SpecError(f"{checkout} is no checkout of mlx-lm: it has none of {', '.join(FILES)}.")
    comparison = Comparison()
    for file in files:
        print(f"{file}, without and with the plugin", file=sys.stderr)
        stock = run_file(checkout, file, model, timeout)
        ours = run_file(checkout, file, model, timeout, "--mlx-spec")
        comparison.add(file, stock, ours)
    return comparison


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/mlx_lm_tests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT")
    parser.add_argument("--family", choices=list(MODELS), default=DEFAULT_FAMILY)
    parser.add_argument("--timeout", type=int, default=600, help="Seconds for a file in a run.")
    args = parser.parse_args()
    try:
        comparison = compare(args.checkout, demo_model(args.family), args.timeout)
    except SpecError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(comparison.as_text())
    return comparison.exit_code


if __name__ == "__main__":
    sys.exit(main())
