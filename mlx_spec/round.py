"""The loop of speculative decoding: draft, verify, accept, commit, yield.

The target's caches hold all committed tokens but the newest, `pending`. A round drafts n tokens
after it, verifies them in one forward of n+1 rows, and keeps the longest prefix of drafts that
equals the target's own draws; the draw after that prefix is the new `pending`. (Leviathan et al.
2022, arXiv 2211.17192; here the draws themselves are compared, see accept.py.)

As mlx_lm.generate_step computes one token ahead of what it yields, this loop launches one round
ahead: the device works while the caller handles the tokens. A round without drafts is not even
waited for before the next one is launched, as nothing of it can be rejected, unless its token may
complete a match in the text. What is not yielded in the end is rolled back, so that the caches are
left as mlx_lm leaves them.
"""

from collections.abc import Callable, Generator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_spec.accept import Acceptance, Draws
from mlx_spec.candidates import Certain, Proposal
from mlx_spec.depth import Depth
from mlx_spec.drafters import Drafter
from mlx_spec.drafters.text import Text
from mlx_spec.kv_quantization import KVQuantization
from mlx_spec.pace import Pace
from mlx_spec.randomness import generator_state, integers
from mlx_spec.rollback import Transaction, tokens_in
from mlx_spec.stats import SpecStats
from mlx_spec.targets.target import Target

CATCH_UP = 32  # tokens that the drafter learns at once while nothing is drafted


@dataclass(frozen=True)
class Pairs:
    """Committed tokens (m,) with the target's hidden states (1, m, H) that predicted them, if the
    drafter needs these."""

    tokens: mx.array
    hidden: mx.array | None

    def __len__(self) -> int:
        return self.tokens.size

    def __getitem__(self, rows: slice) -> "Pairs":
        return Pairs(self.tokens[rows], None if self.hidden is None else self.hidden[:, rows])

    def then(self, newer: "Pairs") -> "Pairs":
        hidden = newer.hidden
        if self.hidden is not None and hidden is not None:
            hidden = mx.concatenate([self.hidden, hidden], axis=1)
        return Pairs(mx.concatenate([self.tokens, newer.tokens]), hidden)


@dataclass(frozen=True)
class Source:
    """One of the drafters that take turns in a request, with its caches and its depth."""

    drafter: Drafter
    caches: list[Any]
    depth: Depth


@dataclass(frozen=True)
class Drawn:
    """What plain decoding has computed ahead of the token that it yielded last.

    token: (1,), the next one. logprobs: (V,). hidden: (1, 1, H), the target's hidden state that
    predicted it, if it is known.
    """

    token: mx.array
    logprobs: mx.array
    hidden: mx.array | None = None


@dataclass
class Round:
    """A verify forward: under way, then read, committed and yielded token by token. Without
    drafts it may be committed before it is read."""

    transaction: Transaction
    source: Source | None  # of the drafts
    chosen: int | None  # drafts before any limit, if that was asked
    drafts: list[mx.array]  # each (1,)
    hidden: mx.array | None  # (1, n+1, H), if the drafter needs it
    draws: Draws
    numbers: mx.array  # all that the host needs to know, in one array
    unlearnt: Pairs | None  # what the drafter had still to learn at the start ...
    position: Any  # ... from this position of its caches on
    context: int  # tokens in the target's caches at the start
    waited: bool = False  # the device had nothing to do before it
    tokens: list[int] = field(default_factory=list)  # to yield
    keys: list[list[int]] = field(default_factory=list)  # after each draw
    yielded: int = 0

    def read(self) -> None:
        """The round's one host read."""
        n = len(self.drafts)
        numbers = integers(self.numbers)
        draws, drafts, words = numbers[: n + 1], numbers[n + 1 : 2 * n + 1], numbers[2 * n + 1 :]
        self.keys = [words[i : i + 2] for i in range(0, len(words), 2)]
        accepted = 0
        while accepted < n and draws[accepted] == drafts[accepted]:
            accepted += 1
        self.tokens = draws[: accepted + 1]

    @property
    def count(self) -> int:
        """How many tokens there are to yield."""
        return len(self.tokens) if self.drafts else 1

    @property
    def accepted(self) -> int:
        return self.count - 1

    @property
    def unyielded(self) -> int:
        return self.count - self.yielded

    def drawn_at(self, row: int) -> Drawn:
        hidden = None if self.hidden is None else self.hidden[:, row : row + 1]
        return Drawn(self.draws.tokens[row : row + 1], self.draws.logprobs[row], hidden)


@dataclass
class Request:
    """One generation: what is committed, and how to launch the next round.

    `depths`: one for each part of the drafter.
    `drawn`: at the start, a next token that was drawn elsewhere and is yielded first (then it is
    `pending`, too); at the end, the next one, None where the last token was left pending.
    """

    target: Target
    drafter: Drafter
    law: Acceptance
    caches: list[Any]
    draft_caches: list[Any]
    depths: list[Depth]
    pending: mx.array  # (1,); the whole prompt before `prefill`
    kv_quantization: KVQuantization
    unlearnt: Pairs | None = None
    drawn: Drawn | None = None
    unwritten: bool = True  # the newest token is not in `text`

    def __post_init__(self) -> None:
        self.target = self.drafter.view(self.target)
        # of the tokens in the caches, those that `text` has never had
        self.unseen = 0 if self.text is None else tokens_in(self.caches) - len(self.text)

    @property
    def sources(self) -> list[Source]:
        parts, caches = self.drafter.parts, self.drafter.caches_of_parts(self.draft_caches)
        return [Source(*source) for source in zip(parts, caches, self.depths, strict=True)]

    @property
    def text(self) -> Text | None:
        """What the drafter has seen of the text, if it looks at it."""
        return self.drafter.text(self.draft_caches)

    def prefill(self, step: int, progress: Callable[[int, int], None]) -> None:
        """Run all of the prompt but its last token, `step` tokens at a time, through the target
        and, shifted by one, through the drafter. The newest pair is left for the first draft.
        For a drafter that does not learn only the last hidden state is computed: those of all rows
        would cost what mlx-lm leaves out in a prefill, which is more than half of the layers where
        layers share keys and values.
        A prompt may come in parts: `pending` is then the last token of one and the next part."""
        prompt, done = self.pending, 0
        total = prompt.size
        to_write = integers(prompt) if self.text is not None else []
        only_last = self.drafter.needs_hidden and not self.drafter.learns
        progress(0, total)
        while total - done > 1:
            left = total - done - 1
            rows = min(step, left)
            held_back = only_last and rows == left > 1
            rows -= held_back  # the last row goes alone
            transaction = Transaction(self.target, self.caches)
            position = self.drafter.position(self.draft_caches)
            try:
                hidden = transaction.prefill(prompt[done : done + rows])
                newest = None
                pairs = self._pairs(prompt[done + 1 : done + 1 + rows], hidden)
                if self.drafter.learns:
                    newest = self._prime(pairs)
                elif only_last and done + rows == total - 1:
                    newest = pairs
                    mx.async_eval(newest.hidden)
                self.kv_quantization.apply(self.caches)
                mx.eval([c.state for c in self.caches + self.draft_caches])
            except BaseException:
                transaction.abort()
                self.drafter.rewind(self.draft_caches, position)
                raise
            transaction.keep_all()
            self.unlearnt = newest
            if self.text is not None:
                self.text.extend(to_write[done : done + rows])
            done += rows
            if not held_back:
                progress(done, total)
            mx.clear_cache()
        self.pending = prompt[-1:]

    def _pairs(self, tokens: mx.array, hidden: mx.array | None) -> Pairs:
        return Pairs(tokens, hidden if self.drafter.needs_hidden else None)

    def _prime(self, pairs: Pairs) -> Pairs:
        """Let the drafter learn all but the newest pair, which is returned, computed."""
        older, newest = pairs[:-1], pairs[-1:]
        if self.unlearnt is not None:
            older = self.unlearnt.then(older)
        if len(older):
            self.drafter.extend(older.tokens, older.hidden, self.draft_caches)
        if newest.hidden is not None:
            mx.async_eval(newest.hidden)
        return newest

    def drawn_before(self) -> Round | None:
        """The token that was drawn elsewhere, as a round that was read and committed."""
        if self.drawn is None:
            return None
        return Round(
            transaction=Transaction(self.target, []),
            source=None,
            chosen=None,
            drafts=[],
            hidden=None,
            draws=Draws(self.drawn.token, [self.drawn.logprobs], []),
            numbers=self.drawn.token,
            unlearnt=None,
            position=self.drafter.position(self.draft_caches),
            context=tokens_in(self.caches),
            tokens=integers(self.drawn.token),
            keys=[integers(generator_state())],
        )

    def launch(self, remaining: int | None) -> Round:
        """Draft and verify, lazily. `remaining` tokens may still be emitted (None: no limit)."""
        context = tokens_in(self.caches)
        source, chosen, n = self._turn(remaining, context)
        unlearnt, position = self.unlearnt, self.drafter.position(self.draft_caches)
        transaction = Transaction(self.target, self.caches)
        try:
            self.law.begin(n)
            drafts = [] if source is None else self._draft(source, n)
            if self.unlearnt is not None:
                self._catch_up()
            hidden, logits = transaction.verify(mx.concatenate([self.pending, *drafts]))
            draws = self.law.draw(logits, drafts)
            numbers = mx.concatenate([draws.tokens, *drafts, *draws.keys])
            mx.async_eval(numbers)
        except BaseException:
            transaction.abort()
            self.drafter.rewind(self.draft_caches, position)
            self.unlearnt = unlearnt
            raise
        return Round(
            transaction=transaction,
            source=source,
            chosen=chosen,
            drafts=drafts,
            hidden=hidden if self.drafter.needs_hidden else None,
            draws=draws,
            numbers=numbers,
            unlearnt=unlearnt,
            position=position,
            context=context,
        )

    def _draft(self, source: Source, n: int) -> list[mx.array]:
        drafter, pairs = source.drafter, Pairs(self.pending, None)
        if wants_pairs(drafter):
            assert self.unlearnt is not None
            pairs = self.unlearnt
        drafts = drafter.draft(
            pairs.tokens, pairs.hidden, n, self._pick, source.caches, self.caches
        )
        if wants_pairs(drafter):
            self.unlearnt = None
        return drafts

    def waits(self) -> bool:
        """Whether the next round may have drafts for which the newest token must be known."""
        return any(
            source.drafter.expects(source.caches) and not source.depth.asleep
            for source in self.sources
        )

    def commit(self, launched: Round) -> None:
        """Keep the accepted drafts of a round that was read, or that has none."""
        launched.transaction.commit(launched.count)
        self.kv_quantization.apply(self.caches)
        rows = slice(0, launched.count)
        newer = Pairs(launched.draws.tokens[rows], None)
        if launched.hidden is not None:
            newer = Pairs(newer.tokens, launched.hidden[:, rows])
        if wants_pairs(self.drafter) and any(depth.max > 0 for depth in self.depths):
            self.unlearnt = newer if self.unlearnt is None else self.unlearnt.then(newer)
        self.pending = newer.tokens[-1:]
        keys = launched.keys or launched.draws.keys  # as they are where nothing was read yet
        self.law.committed(newer.tokens, keys[launched.accepted] if keys else None)
        self.unwritten = True
        if launched.tokens:
            self.write(launched.tokens)

    def write(self, tokens: list[int]) -> None:
        """The newest committed tokens are known."""
        if self.text is not None:
            self.text.extend(tokens)
        self.unwritten = False

    def observe(self, read: Round, seconds: float | None, stats: SpecStats) -> None:
        """A round was read, `seconds` after the one before it. What waiting in vain costs a round
        without drafts is no part of a plain step, but counts as a loss."""
        drafted, sources = len(read.drafts), self.sources
        if read.source is not None:
            sources = [read.source]
            stats.add_drafts(read.source.drafter.kind, drafted, read.accepted)
        stats.add_round(drafted, read.accepted)
        for source in sources:
            waited = read.waited and drafted == 0
            source.depth.observe(drafted, read.accepted, read.context, seconds, waited)
        depth = sources[-1].depth
        stats.state, stats.state_reason = depth.state, depth.why
        if read.chosen is not None:
            stats.depth = read.chosen

    def undo(self, launched: Round) -> None:
        launched.transaction.abort()
        self.drafter.rewind(self.draft_caches, launched.position)
        self.unlearnt = launched.unlearnt

    def leave(self, current: Round | None, ahead: Round | None, as_stock: bool) -> None:
        """Put all caches to where the yielded tokens end.

        mlx_lm has fed each token, and drawn the next one, when it yields it. `as_stock` does
        likewise; otherwise a token that no committed forward has fed is left pending. A round that
        is committed and could not be read is undone.
        """
        self.drawn = None
        if current is not None and not current.tokens:
            if ahead is not None:
                self.undo(ahead)
            current, ahead = None, current
        if as_stock and ahead is not None and (current is None or not current.unyielded):
            self.drafter.rewind(self.draft_caches, ahead.position)
            self.unlearnt = ahead.unlearnt
            ahead.transaction.commit(1)
            self.drawn = ahead.drawn_at(0)
            self.law.leave(integers(ahead.draws.keys[0]) if ahead.draws.keys else None)
        else:
            if ahead is not None:
                self.undo(ahead)
            key = None
            if current is not None:
                fed = min(current.yielded, current.accepted)
                current.transaction.commit(1 + fed)
                if self.unlearnt is not None:
                    self.unlearnt = self.unlearnt[: len(self.unlearnt) - current.unyielded]
                if current.unyielded:
                    self.drawn = current.drawn_at(fed)
                key = current.keys[fed] if current.keys else None
            self.law.leave(key)
        if self.text is not None:
            self.text.cut(tokens_in(self.caches) - self.unseen)
        with nullcontext() if as_stock else suppress(Exception):  # the first error is the one
            self.kv_quantization.apply(self.caches)
            self.learn()

    def learn(self) -> None:
        """Bring the drafter's caches up to date."""
        if self.unlearnt is not None and len(self.unlearnt):
            pairs, self.unlearnt = self.unlearnt, None
            self.drafter.extend(pairs.tokens, pairs.hidden, self.draft_caches)

    def _pick(self, proposal: Proposal, drafts: list[mx.array]) -> mx.array:
        """The device works on a draft while the next one is built."""
        draft = self.law.pick(proposal, drafts)
        if not isinstance(proposal, Certain):
            mx.async_eval(draft)
        return draft

    def _catch_up(self) -> None:
        """While the drafter drafts nothing, let it learn all but the newest pair, many at once."""
        if self.unlearnt is not None and len(self.unlearnt) > CATCH_UP:
            older, self.unlearnt = self.unlearnt[:-1], self.unlearnt[-1:]
            self.drafter.extend(older.tokens, older.hidden, self.draft_caches)
            mx.async_eval([cache.state for cache in self.draft_caches])

    def _turn(self, remaining: int | None, context: int) -> tuple[Source | None, int | None, int]:
        """Who drafts in the next round, how many tokens its depth chose, and how many it may."""
        most = self._rows_left(remaining) - 1
        chosen = None
        for source in self.sources:
            limit = self._limit(source)
            if limit > 0 or source.depth.asleep:  # which counts rounds, too
                chosen = source.depth.choose(context)
                nothing_to_go_on = wants_pairs(source.drafter) and self.unlearnt is None
                n = 0 if nothing_to_go_on else min(chosen, limit, most)
                if n > 0:
                    return source, chosen, n
        return None, chosen, 0

    def _limit(self, source: Source) -> int:
        """How many drafts there is a reason for."""
        if source.drafter.text(source.caches) is not None and self.unwritten:
            return 0
        return source.drafter.limit(source.caches)

    def _rows_left(self, remaining: int | None) -> int:
        """How many rows may be verified at once. Nothing is committed that may not be emitted, and
        a block of rows does not straddle the point where mlx-lm starts to quantise the cache."""
        rows = self.kv_quantization.rows_left(self.caches)
        return rows if remaining is None else min(rows, remaining)


def wants_pairs(drafter: Drafter) -> bool:
    return drafter.learns or drafter.needs_hidden


def speculate(
    request: Request, stream: Any, max_tokens: int, stats: SpecStats
) -> Generator[tuple[int, mx.array, bool], None, None]:
    """Yield (token, logprobs (V,), whether a draft was right), `max_tokens` of them at most
    (-1: no limit). `request` has been prefilled.

    Closed or run to the end, it leaves the caches with all given and yielded tokens, as mlx_lm
    does. After an exception the last yielded token may be missing ("pending") in them.
    """
    emitted = 0
    current = request.drawn_before()  # read and committed
    ahead: Round | None = None  # launched
    failure: Exception | None = None
    as_stock = False
    pace = Pace()

    def remaining() -> int | None:
        waiting = current.unyielded if current else 0
        return None if max_tokens < 0 else max_tokens - emitted - waiting

    try:
        with mx.stream(stream):
            if request.text is not None:
                request.write(integers(request.pending))
            ahead = request.launch(remaining())
        while True:
            if current is not None:
                for token, logprobs in zip(current.tokens, current.draws.logprobs, strict=False):
                    if emitted % 256 == 0:
                        mx.clear_cache()
                    emitted += 1
                    current.yielded += 1
                    right = current.yielded <= current.accepted
                    stats.accepted_yielded += right
                    with pace.of_caller():
                        yield token, logprobs, right
            if failure is not None:
                raise failure
            if emitted == max_tokens:
                break
            assert ahead is not None
            if ahead.drafts or request.waits():
                with pace.of_read():
                    ahead.read()
            with mx.stream(stream):
                if ahead.tokens:
                    # One that was under way when the one before it was read seems too quick.
                    timed = bool(ahead.drafts) or ahead.waited
                    request.observe(ahead, pace.seconds if timed else None, stats)
                request.commit(ahead)
                current, ahead = ahead, None
                try:
                    ahead = request.launch(remaining())
                    ahead.waited = bool(current.tokens)
                except Exception as error:  # the tokens at hand come first
                    failure = error
            if not current.tokens:
                with pace.of_read():
                    current.read()
                request.write(current.tokens)
                # Where the one before it was waited for, the next one's launch is in its time.
                request.observe(current, None if current.waited else pace.seconds, stats)
        as_stock = True
    except GeneratorExit:
        as_stock = True
        raise
    finally:
        with mx.stream(stream):
            request.leave(current, ahead, as_stock)
