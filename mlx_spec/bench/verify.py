"""`mlx-spec verify`: whether drafts leave a model's output as it is, on the user's own model.

What the acceptance laws (accept.py) promise is checked: greedy decoding and sampling "stock" give
mlx_lm's own tokens, "seed" those of a run without drafts, "ratio" the model's distribution. A
check during which nothing was drafted proves nothing, and says so.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.sample_utils import Sampler, greedy_sampler, make_sampler

from mlx_spec.accept import Seed, make_law, plain_sampler
from mlx_spec.bench.distribution import DistributionTest, distribution_tests, next_logits
from mlx_spec.bench.prompts import CLASSES, Prompt, encode, read_class
from mlx_spec.errors import BadArguments, NotEngaged
from mlx_spec.generate import GenerationResponse, stream_generate
from mlx_spec.load import load, pairing_of
from mlx_spec.options import DraftKind, DraftTokens, SpecOptions
from mlx_spec.randomness import generator_state, integers, set_generator_state
from mlx_spec.sampling import Law, Sampling
from mlx_spec.stats import SpecStats

SCHEMA = "mlx-spec/verify/1"
DEPTHS: tuple[DraftTokens, ...] = (1, 2, 3, "auto")
RATIO_CLASS = "prose"  # its next token is open, so that there is a distribution to test
ALPHA = 1e-3  # a right sampler fails a whole check this often
FLOAT32_EPS = 1e-4
MANTISSA_BITS = {mx.bfloat16: 7, mx.float16: 10}
WIDEST_MARGIN = 64.0  # in log-probability

Outcome = Literal[
    "identical", "identical up to ties", "same distribution", "not verified", "DIFFERENT"
]
EXIT_CODES: dict[Outcome, int] = {
    "identical": 0,
    "identical up to ties": 0,
    "same distribution": 0,
    "DIFFERENT": 1,
    "not verified": NotEngaged.exit_code,
}


@dataclass(frozen=True)
class Plan:
    """What is checked. Raises: BadArguments for what cannot be.

    Attributes:
        max_tokens: length of each text, if no end-of-text token comes before.
        temp, top_p, min_p, top_k: of mlx_lm.sample_utils.make_sampler.
        eps: below this margin a difference is a tie; None: what rounding explains, see `rounding`.
        draws: of the distribution test, for each prompt and depth.
        draft_kind: as `stream_generate` takes it.
    """

    max_tokens: int = 256
    temp: float = 0
    top_p: float = 0
    min_p: float = 0
    top_k: int = 0
    seed: int = 0
    sampling: Sampling = "auto"
    depths: Sequence[DraftTokens] = DEPTHS
    eps: float | None = None
    draws: int = 1000
    draft_kind: DraftKind = "auto"

    def __post_init__(self) -> None:
        for n in self.depths:
            SpecOptions(n, sampling=self.sampling)
        if not self.depths or 0 in self.depths:
            raise BadArguments("Depths are numbers from 1 on, or 'auto'; give at least one.")
        if self.max_tokens < 2:
            raise BadArguments("A text needs at least 2 tokens for a draft to be made.")
        if self.temp < 0:
            raise BadArguments("The temperature must not be below 0.")
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadArguments(f"{name} is {getattr(self, name)}; give 0 to 1.")
        if self.top_k < 0:
            raise BadArguments(f"top_k is {self.top_k}; give 0, for none, or more.")
        if self.eps is not None and self.eps < 0:
            raise BadArguments("The margin below which a difference is a tie must not be negative.")
        if self.law == "ratio" and not self.fixed_depths:
            raise BadArguments("The distribution is tested at fixed depths; give at least one.")
        if self.draws < 100:
            raise BadArguments("A distribution test needs at least 100 draws.")

    @property
    def fixed_depths(self) -> list[int]:
        return [n for n in self.depths if n != "auto"]

    @property
    def sampler(self) -> Sampler:
        return make_sampler(self.temp, self.top_p, self.min_p, top_k=self.top_k)

    @property
    def law(self) -> Law:
        return make_law(self.sampler, None, mx.array([], mx.uint32), self.sampling).name


@dataclass(frozen=True)
class Difference:
    """Where a text first leaves the one that it should equal.

    Attributes:
        token: index of the first other token; the text's first one has index 0.
        expected, got: the token IDs there; None where the text had ended.
        margin: how clearly stock's model decides for `expected` against `got`; see `margin`.
        eps: below it, rounding explains the difference.
    """

    token: int
    expected: int | None
    got: int | None
    margin: float | None
    eps: float

    @property
    def is_tie(self) -> bool:
        return self.margin is not None and self.margin < self.eps

    def as_text(self) -> str:
        margin = "unknown" if self.margin is None else f"{self.margin:.1e}"
        kind = "a tie" if self.is_tie else "NOT a tie"
        return (
            f"token {self.token}: {self.got} instead of {self.expected}, margin {margin} "
            f"({kind}: rounding explains less than {self.eps:.1e})"
        )


@dataclass(frozen=True)
class Run:
    """One text with drafts, compared. `why` is set where nothing was drafted."""

    prompt: str
    depth: DraftTokens
    tokens: int
    drafted: int
    accepted: int
    why: str | None
    difference: Difference | None


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    law: by which tokens were drawn.
    runs: for a law that promises a text.
    tests: for "ratio", which promises a distribution.
    """

    model: str
    law: Law
    plan: Plan
    runs: Sequence[Run] = ()
    tests: Sequence[DistributionTest] = ()

    @property
    def outcome(self) -> Outcome:
        differences = [run.difference for run in self.runs if run.difference is not None]
        if self.unlikely or not all(difference.is_tie for difference in differences):
            return "DIFFERENT"
        if self.unverified:
            return "not verified"
        if self.tests:
            return "same distribution"
        return "identical up to ties" if differences else "identical"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    @property
    def alpha(self) -> float:
        """Of each single test (Bonferroni)."""
        return ALPHA / max(1, sum(test.p_value is not None for test in self.tests))

    @property
    def unlikely(self) -> list[DistributionTest]:
        return [t for t in self.tests if t.p_value is not None and t.p_value < self.alpha]

    @property
    def unverified(self) -> str | None:
        """Why the check proves nothing for some depth. Next to fixed depths, auto may have drafted
        nothing: it parks where drafts do not pay."""
        made: list[Run | DistributionTest] = [*self.runs, *self.tests]
        for depth in self.plan.fixed_depths or self.plan.depths:
            here = [x for x in made if x.depth == depth]
            if not any(x.drafted for x in here):
                why = next((x.why for x in here if x.why), "no prompts")
                return f"at depth {depth} nothing was drafted: {why}"
        if self.tests and all(test.p_value is None for test in self.tests):
            return (
                "one token takes nearly all of the distribution after these prompts, so there is "
                "nothing to test; give another prompt or a higher temperature"
            )
        return None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "law": self.law,
            "plan": asdict(self.plan),
            "verdict": self.outcome,
            "why": self.unverified,
            "exit_code": self.exit_code,
            "runs": [asdict(run) for run in self.runs],
            "tests": [asdict(test) for test in self.tests],
            "alpha": self.alpha if self.tests else None,
        }

    def as_text(self) -> str:
        """A line for each run, the verdict in the last one."""
        against = {
            "greedy": "against stock mlx_lm",
            "stock": f"against stock mlx_lm at seed {self.plan.seed}",
            "seed": f"against no drafts at seed {self.plan.seed}",
            "ratio": f"against stock's probabilities, {self.plan.draws} draws",
        }[self.law]
        lines = [f"{self.model}: {self.law} decoding with drafts {against}"]
        for run in self.runs:
            found = run.difference.as_text() if run.difference else "the same"
            lines.append(
                f"  {run.prompt}, depth {run.depth}: {run.tokens} tokens, {drafts(run)}; {found}"
            )
        for test in self.tests:
            found = "not testable" if test.p_value is None else f"p = {test.p_value:.2g}"
            lines.append(
                f"  {test.prompt}, depth {test.depth}, token {test.position}: {test.draws} draws, "
                f"{drafts(test)}; {test.bins} bins, {found}"
            )
        return "\n".join([*lines, self._summary()])

    def _summary(self) -> str:
        differences = [run.difference for run in self.runs if run.difference is not None]
        match self.outcome:
            case "identical up to ties":
                widest = max(difference.eps for difference in differences)
                return (
                    f"identical up to ties (margin < {widest:.1e}): {len(differences)} of "
                    f"{len(self.runs)} texts turn off at one"
                )
            case "DIFFERENT" if self.tests:
                return f"DIFFERENT: {len(self.unlikely)} tests below p = {self.alpha:.1e}"
            case "DIFFERENT":
                count = sum(not difference.is_tie for difference in differences)
                return f"DIFFERENT: {count} of {len(self.runs)} texts, and not by a tie"
            case "not verified":
                return f"not verified: {self.unverified}"
            case "same distribution":
                return f"same distribution (chi-square, all p >= {self.alpha:.1e})"
        return "identical"


def drafts(made: Run | DistributionTest) -> str:
    if made.why is not None:
        return f"nothing drafted: {made.why}"
    return f"{made.accepted} of {made.drafted} drafts accepted"


def verify(
    model_path: str,
    draft_model: str = "auto",
    prompts: Sequence[Prompt] | None = None,
    plan: Plan | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Check a model with its drafter.

    Args:
        model_path, draft_model: as `mlx_spec.load` takes them.
        prompts: None: those that come along; for sampling "ratio" only one of them.
        progress: is called with what comes next.

    Raises: NotEngaged where mlx_spec has no drafter for the model, SpecError for what is wrong
    with the files.
    """
    plan = plan or Plan()
    if prompts is None:
        names = (RATIO_CLASS,) if plan.law == "ratio" else CLASSES
        prompts = [read_class(name) for name in names]
    progress(f"loading {model_path}")
    model, tokenizer = load(model_path, draft_model=draft_model)
    return verify_loaded(model, tokenizer, model_path, prompts, plan, progress)


def verify_loaded(
    model: nn.Module,
    tokenizer: Any,
    name: str,
    prompts: Sequence[Prompt],
    plan: Plan,
    progress: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Check a model that `mlx_spec.load` has loaded; `name` is what the verdict calls it."""
    pairing = pairing_of(model)
    if pairing.drafter is None and plan.draft_kind == "auto":
        raise NotEngaged(f"There is nothing to verify for {name}: {pairing.detail}.")
    runs: list[Run] = []
    tests: list[DistributionTest] = []
    for prompt in prompts:
        ids = encode(prompt, tokenizer)
        if plan.law == "ratio":
            for depth in plan.fixed_depths:
                progress(f"{prompt.prompt_class}, depth {depth}: {plan.draws} draws")
                tests += distribution_tests(
                    model,
                    tokenizer,
                    prompt.prompt_class,
                    ids,
                    depth,
                    plan.sampler,
                    plan.draws,
                    plan.seed,
                    plan.draft_kind,
                )
        else:
            runs += compare_texts(model, tokenizer, prompt.prompt_class, ids, plan, progress)
    return Verdict(name, plan.law, plan, runs, tests)


def compare_texts(
    model: nn.Module,
    tokenizer: Any,
    name: str,
    prompt: list[int],
    plan: Plan,
    progress: Callable[[str], None],
) -> list[Run]:
    """One prompt, decoded without drafts and then at each depth."""
    options = {"max_tokens": plan.max_tokens, "sampler": plan.sampler}
    if plan.law == "seed":
        plain = stream_generate
        plain_options = options | {"num_draft_tokens": 0, "sampling": "seed"}
    else:
        plain, plain_options = mlx_lm.stream_generate, options
    progress(f"{name}, without drafts")
    mx.random.seed(plan.seed)
    expected = [r.token for r in plain(model, tokenizer, prompt, **plain_options)]
    runs = []
    for depth in plan.depths:
        progress(f"{name}, depth {depth}")
        mx.random.seed(plan.seed)
        got, stats = collect(
            stream_generate(
                model,
                tokenizer,
                prompt,
                num_draft_tokens=depth,
                sampling=plan.sampling,
                draft_kind=plan.draft_kind,
                **options,
            )
        )
        runs.append(
            Run(
                name,
                depth,
                len(got),
                stats.drafted,
                stats.accepted,
                None if stats.engaged else stats.why,
                first_difference(model, prompt, expected, got, plan),
            )
        )
    return runs


def collect(responses: Iterable[GenerationResponse]) -> tuple[list[int], SpecStats]:
    """The tokens, an end-of-text token included, and the counters at the end."""
    tokens, stats = [], SpecStats()
    for response in responses:
        tokens.append(response.token)
        stats = response.spec or stats
    return tokens, stats


def first_difference(
    model: nn.Module, prompt: list[int], expected: list[int], got: list[int], plan: Plan
) -> Difference | None:
    pairs = enumerate(zip_longest(expected, got))
    found = next(((i, e, g) for i, (e, g) in pairs if e != g), None)
    if found is None:
        return None
    at, expected_token, got_token = found
    logits = next_logits(model, prompt + expected[:at])
    eps = rounding(logits) if plan.eps is None else plan.eps
    if expected_token is None or got_token is None:
        return Difference(at, expected_token, got_token, None, eps)
    logits = logits.astype(mx.float32)[None]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    draw = draw_at(at, logprobs, plan)
    return Difference(
        at, expected_token, got_token, margin(draw, logprobs, expected_token, got_token), eps
    )


def rounding(logits: mx.array) -> float:
    """The margin that rounding may overturn. float32: 1e-4, which is far above the error of a sum
    in another order. Half precision: two steps of the largest logit, one for each of two tokens."""
    bits = MANTISSA_BITS.get(logits.dtype)
    if bits is None:
        return FLOAT32_EPS
    largest = float(mx.abs(logits).max())
    _, exponent = math.frexp(largest)  # largest = m * 2**exponent with m in [0.5, 1)
    return float(2 * 2.0 ** (exponent - 1 - bits))


def draw_at(at: int, logprobs: mx.array, plan: Plan) -> Callable[[mx.array], int]:
    """How token `at` of the text without drafts was drawn, as a function of log-probabilities
    (1, V): with the random numbers that were used there. `logprobs` gives their shape."""
    mx.random.seed(plan.seed)
    sampler = plain_sampler(plan.sampler, plan.sampling)[0] or greedy_sampler
    for _ in range(at):
        sampler(logprobs)
    state = integers(generator_state())

    def draw(changed: mx.array) -> int:
        set_generator_state(state)
        if isinstance(sampler, Seed):
            sampler.position = at
        return int(sampler(changed).item())

    return draw


def margin(
    draw: Callable[[mx.array], int], logprobs: mx.array, expected: int, got: int
) -> float | None:
    """By how much the log-probabilities (1, V) of two tokens must move against each other, all
    random numbers as they were, for `draw` to give the one and the other.

    For greedy decoding that is the difference of their log-probabilities, the top-2 margin; for
    sampling it takes the noise and the filters into account. None where no change does it.
    """
    direction = mx.zeros_like(logprobs)
    direction[0, got], direction[0, expected] = 0.5, -0.5
    to_got = least(lambda shift: draw(logprobs + shift * direction) == got)
    to_expected = least(lambda shift: draw(logprobs - shift * direction) == expected)
    return None if to_got is None or to_expected is None else to_got + to_expected


def least(reached: Callable[[float], bool]) -> float | None:
    """The least shift from 0 on that reaches its aim, which larger ones do, too."""
    if reached(0):
        return 0.0
    low, high = 0.0, WIDEST_MARGIN
    if not reached(high):
        return None
    while high - low > 1e-7:
        middle = (low + high) / 2
        if reached(middle):
            high = middle
        else:
            low = middle
    return high
