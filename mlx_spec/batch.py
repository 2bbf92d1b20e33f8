"""mlx_lm's BatchGenerator, in which a sequence that is alone is decoded with drafts.

Several sequences are decoded by mlx_lm in a batch, without drafts: a further row costs the same
whether it is a draft or another sequence's token, and that one is never wrong. When one is left,
it is taken out of the batch, and when another arrives, it is put back, in the state in which
plain decoding would be.
"""

import copy
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch
from mlx_lm.models.cache import TokenBuffer

from mlx_spec.accept import Greedy, Seed, make_law, plain_sampler
from mlx_spec.drafters import Drafter
from mlx_spec.generate import choose_drafter
from mlx_spec.kept import Kept, first_pair, keep, take_kept
from mlx_spec.knowledge import depths_for, remember
from mlx_spec.kv_quantization import KVQuantization
from mlx_spec.options import SpecOptions
from mlx_spec.rollback import tokens_in
from mlx_spec.round import Drawn, Pairs, Request, speculate
from mlx_spec.sliding_window import in_time_order, settled
from mlx_spec.stats import SpecStats
from mlx_spec.targets import target_for

WORTHWHILE = 8  # for fewer tokens, a sequence is not copied out of the batch


@dataclass
class Plan:
    """How a sequence is to be decoded while it is alone, from its insertion to its end.

    Attributes:
        options: depth and acceptance law.
        stats: counters to be filled in.
        drafter: None where nothing can be drafted; the reason is in `stats`.
        draft_caches: what the drafter knows of the sequence.
        tokens: how many the target's caches held then.
        prompt_done: how many tokens of the prompt were processed while it was alone.
    """

    options: SpecOptions = field(default_factory=SpecOptions)
    stats: SpecStats = field(default_factory=SpecStats)
    drafter: Drafter | None = None
    draft_caches: list[Any] = field(default_factory=list)
    tokens: int = 0
    prompt_done: int = 0


@dataclass
class Sequence:
    """A sequence, as it passes between mlx_lm's batches and `Alone`.

    Attributes:
        segments: of the prompt, not processed yet; the last one is a single token.
        caches: the target's, of this sequence alone.
        tokens: what the caches hold.
        count: how many tokens it has generated.
        matcher: where it is in its stop sequences.
        drawn: a next token that is drawn, not yielded; None before the first.
    """

    uid: int
    segments: list[list[int]]
    max_tokens: int
    caches: list[Any]
    tokens: list[int]
    sampler: Any
    processors: Any
    stop_sequences: Any
    count: int = 0
    matcher: Any = None
    drawn: Drawn | None = None

    @property
    def drawn_count(self) -> int:
        """How many tokens were drawn for it."""
        return self.count + (self.drawn is not None)


class Alone:
    """One sequence in the loop of round.py; each call gives one chunk of the prompt or a token."""

    def __init__(self, model: nn.Module, plan: Plan, sequence: Sequence, stream: Any):
        assert plan.drafter is not None
        self.plan = plan
        self.sequence = sequence
        self.stream = stream
        self.total = plan.prompt_done + sum(map(len, sequence.segments))
        self.matcher = sequence.matcher or sequence.stop_sequences.matcher()
        plan.stats.kind = plan.drafter.kind
        plan.stats.num_draft_tokens = plan.options.num_draft_tokens

        own = sequence.caches
        kept = take_kept(own, plan.drafter)
        draft_caches = plan.draft_caches or (kept.caches if kept else plan.drafter.make_cache())
        if kept is None and plan.drafter.needs_hidden and draft_caches:
            plan.stats.unprimed += tokens_in(own) - plan.tokens
        prompt = mx.array([token for segment in sequence.segments for token in segment], mx.uint32)
        if sequence.drawn is not None:
            prompt = sequence.drawn.token
        if (text := plan.drafter.text(draft_caches)) is not None:
            text.become(sequence.tokens)
        self.request = Request(
            target_for(model),
            plan.drafter,
            Greedy(),
            in_time_order(own),
            in_time_order(draft_caches),
            depths_for(plan.options, model, plan.drafter),
            prompt[:1],
            KVQuantization(),
            self._unlearnt(draft_caches, kept, prompt),
            sequence.drawn,
        )
        self.tokens: Generator[tuple[int, mx.array, bool], None, None] | None = None
        if sequence.drawn is not None:
            self._start(sequence.drawn.token)

    def _unlearnt(
        self, draft_caches: list[Any], kept: Kept | None, prompt: mx.array
    ) -> Pairs | None:
        """What the drafter can learn before the prompt: one that needs no hidden states, all that
        it has not seen of the sequence."""
        drafter, first = self.plan.drafter, prompt[:1].astype(mx.uint32)
        assert drafter is not None
        if not drafter.learns or drafter.needs_hidden:
            return first_pair(drafter, kept, prompt)
        missing = self.sequence.tokens[tokens_in(draft_caches) :]
        return Pairs(mx.concatenate([mx.array(missing, mx.uint32), first]), None)

    def _start(self, pending: mx.array) -> None:
        sequence, request = self.sequence, self.request
        history = mx.concatenate([mx.array(sequence.tokens, mx.uint32), pending.astype(mx.uint32)])
        sampling = self.plan.options.sampling
        request.law = make_law(sequence.sampler, sequence.processors, history, sampling)
        self.plan.stats.sampling = request.law.name
        if isinstance(request.law, Seed):
            request.law.position = sequence.drawn_count
        request.pending = pending
        remaining = sequence.max_tokens - sequence.count
        self.tokens = speculate(request, self.stream, remaining, self.plan.stats)

    def next_chunk(self, step: int) -> PromptProcessingBatch.Response:
        """Process at most `step` tokens of the prompt; its last one begins the generation."""
        sequence = self.sequence
        uid, segments = sequence.uid, sequence.segments
        if len(segments) == 1 and len(segments[0]) == 1:
            (last,) = segments.pop()
            self._start(mx.array([last]))
            sequence.tokens.append(last)
            return PromptProcessingBatch.Response(uid, (self.total, self.total), True, True)
        chunk, segments[0] = segments[0][:step], segments[0][step:]
        end_of_segment = not segments[0]
        if end_of_segment:
            segments.pop(0)
        self.request.pending = mx.array([*chunk, segments[0][0]], mx.uint32)
        self.request.prefill(step, lambda done, total: None)
        sequence.tokens += chunk
        self.plan.prompt_done += len(chunk)
        progress = (self.plan.prompt_done, self.total)
        return PromptProcessingBatch.Response(uid, progress, end_of_segment, False)

    def next_token(self) -> GenerationBatch.Response:
        sequence = self.sequence
        assert self.tokens is not None
        token, logprobs, _ = next(self.tokens)
        sequence.count += 1
        sequence.tokens.append(token)
        finish_reason = "length" if sequence.count >= sequence.max_tokens else None
        if self.matcher.advance(token):
            finish_reason = "stop"
        caches = all_tokens = None
        if finish_reason is not None:
            self.leave()
            caches, all_tokens = sequence.caches, sequence.tokens
        return GenerationBatch.Response(
            sequence.uid, token, logprobs, finish_reason, caches, all_tokens
        )

    def snapshot(self) -> tuple[list[Any], list[int]]:
        """A copy of the caches while the prompt is being processed, and what they hold."""
        caches = self.sequence.caches
        draft_caches = self.request.draft_caches
        copies = copy.deepcopy(settled(caches))
        draft_copies = copy.deepcopy(settled(draft_caches))
        in_time_order(caches)
        in_time_order(draft_caches)
        self._keep(copies, draft_copies)
        return copies, list(self.sequence.tokens)

    def leave(self) -> Sequence:
        """The sequence as plain decoding would have left it after the tokens that it yielded."""
        sequence, request = self.sequence, self.request
        if self.tokens is not None:
            self.tokens.close()
            if request.drawn is None:  # the newest token is pending
                sequence.segments = [[sequence.tokens.pop()]]
        sequence.drawn = request.drawn
        sequence.matcher = self.matcher
        if isinstance(request.law, Seed):
            request.law.position = sequence.drawn_count
        settled(sequence.caches)
        settled(request.draft_caches)
        self._keep(sequence.caches, request.draft_caches)
        self.plan.draft_caches = request.draft_caches
        self.plan.tokens = tokens_in(sequence.caches)
        return sequence

    def _keep(self, caches: list[Any], draft_caches: list[Any]) -> None:
        request = self.request
        hidden = request.drawn.hidden if request.drawn else None
        if request.unlearnt is not None and request.unlearnt.hidden is not None:
            hidden = request.unlearnt.hidden[:, -1:]
        keep(caches, request.drafter, draft_caches, hidden)


class SpecBatchGenerator(BatchGenerator):
    """mlx_lm.generate.BatchGenerator, with drafts for a sequence that is alone.

    Args: those of mlx_lm's, and
        plan: is called for each inserted sequence; depth and counters.
        ended: is called with the counters of each sequence when it ends.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: Callable[[], Plan] = Plan,
        ended: Callable[[SpecStats], None] = lambda stats: None,
        **options: Any,
    ):
        super().__init__(model, **options)
        self.plan = plan
        self.ended = ended
        self.plans: dict[int, Plan] = {}
        self.alone: Alone | None = None

    def insert_segments(self, *args: Any, **options: Any) -> list[int]:
        uids = super().insert_segments(*args, **options)
        for at, waiting in enumerate(self._unprocessed_sequences):
            uid, segments, max_tokens, cache, tokens, sampler, *others = waiting
            if uid not in uids:
                continue
            plan = self.plans[uid] = self.plan()
            sampler, plan.stats.sampling = plain_sampler(sampler, plan.options.sampling)
            self._unprocessed_sequences[at] = (
                uid,
                segments,
                max_tokens,
                cache,
                tokens,
                sampler,
                *others,
            )
            plan.drafter = choose_drafter(
                self.model,
                None,
                plan.options,
                {"prompt_cache": cache},
                plan.stats,
            )
        return uids

    def extract_cache(self, uids: list[int]) -> dict[int, Any]:
        alone = self.alone
        if alone is None or alone.sequence.uid not in uids:
            return super().extract_cache(uids)
        if alone.tokens is None:
            return {alone.sequence.uid: alone.snapshot(), **super().extract_cache(uids)}
        self._stand_down()
        return super().extract_cache(uids)

    def remove(self, uids: list[int], return_prompt_caches: bool = False) -> dict[int, Any]:
        if self.alone is not None and self.alone.sequence.uid in uids:
            self._stand_down()
        caches = super().remove(uids, return_prompt_caches)
        for uid in uids:
            self._end(uid)
        return caches

    @property
    def prompt_cache_nbytes(self) -> int:
        own = 0
        if self.alone is not None:
            request = self.alone.request
            own = sum(cache.nbytes for cache in request.caches + request.draft_caches)
        return super().prompt_cache_nbytes + own

    def _next(self) -> tuple[list[Any], list[Any]]:
        if self._unprocessed_sequences:
            self._stand_down()
        if self.alone is None:
            self.alone = self._single_out()
        prompts, tokens = super()._next() if self.alone is None else self._next_alone(self.alone)
        for response in tokens:
            if self.alone is None:
                self.plans[response.uid].stats.batched += 1
            if response.finish_reason is not None:
                self._end(response.uid)
        return prompts, tokens

    def _next_alone(self, alone: Alone) -> tuple[list[Any], list[Any]]:
        begin = time.perf_counter()
        if alone.tokens is None:
            before = alone.plan.prompt_done
            prompt = alone.next_chunk(self.prefill_step_size)
            self._counters.prompt_tokens += alone.plan.prompt_done - before
            self._counters.prompt_time += time.perf_counter() - begin
            return [prompt], []
        token = alone.next_token()
        self._counters.decode_time += time.perf_counter() - begin
        self._counters.generation_tokens += 1
        self._counters.generation_steps += 1
        return [], [token]

    def _end(self, uid: int) -> None:
        if self.alone is not None and self.alone.sequence.uid == uid:
            self.alone = None
        if (plan := self.plans.pop(uid, None)) is not None:
            plan.stats.conclude()
            if plan.drafter is not None:
                remember(plan.drafter)
            self.ended(plan.stats)

    def _single_out(self) -> Alone | None:
        """Take the only sequence out of mlx_lm's batches, unless its prompt is being processed
        there, or nothing can be drafted for it."""
        waiting, generating = self._unprocessed_sequences, self._generation_batch
        if len(waiting) + len(self._prompt_batch) + len(generating) != 1:
            return None
        if waiting:
            plan = self.plans[waiting[0][0]]
            if plan.drafter is None:
                return None
            sequence = Sequence(*waiting.popleft())
            sequence.caches = copy.deepcopy(sequence.caches)  # as mlx_lm does
            return Alone(self.model, plan, sequence, self._stream)
        if not len(generating) or generating.max_tokens[0] - generating._num_tokens[0] < WORTHWHILE:
            return None
        plan = self.plans[generating.uids[0]]
        if plan.drafter is None:
            return None
        return Alone(self.model, plan, self._out_of_batch(generating), self._stream)

    def _out_of_batch(self, batch: GenerationBatch) -> Sequence:
        sequence = Sequence(
            batch.uids[0],
            [],
            batch.max_tokens[0],
            batch.extract_cache(0),
            batch.tokens[0],
            batch.samplers[0],
            batch.logits_processors[0],
            batch.stop_sequences[0],
            batch._num_tokens[0],
            batch._matchers[0],
            Drawn(batch._next_tokens, batch._next_logprobs[0]),
        )
        batch.filter([])
        return sequence

    def _stand_down(self) -> None:
        """Put the sequence that is alone into mlx_lm's batches."""
        alone, self.alone = self.alone, None
        if alone is None:
            return
        sequence = alone.leave()
        if alone.tokens is not None:
            self._generation_batch.extend(self._as_batch(sequence))
        else:
            self._unprocessed_sequences.appendleft(
                (
                    sequence.uid,
                    sequence.segments,
                    sequence.max_tokens,
                    sequence.caches,
                    sequence.tokens,
                    sequence.sampler,
                    sequence.processors,
                    sequence.stop_sequences,
                )
            )

    def _as_batch(self, sequence: Sequence) -> GenerationBatch:
        batch = GenerationBatch.empty(self.model, self.sampler)
        batch.uids = [sequence.uid]
        batch.prompt_cache = [cache.merge([cache]) for cache in sequence.caches]
        batch.tokens = [sequence.tokens]
        batch.samplers = [sequence.sampler]
        batch.logits_processors = [sequence.processors]
        batch.stop_sequences = [sequence.stop_sequences]
        batch.max_tokens = [sequence.max_tokens]
        batch._token_context = [TokenBuffer(sequence.tokens)]
        batch._num_tokens = [sequence.count]
        batch._matchers = [sequence.matcher]
        if sequence.drawn is not None:
            batch._next_tokens = sequence.drawn.token
            batch._next_logprobs = [sequence.drawn.logprobs]
        else:  # mlx_lm draws the first token when the prompt is done
            batch._next_tokens = mx.array(sequence.segments.pop())
            batch._step()
        return batch

    def _make_batch(self, n: int) -> PromptProcessingBatch:
        """The progress of a prompt that has been alone counts from its beginning."""
        batch = super()._make_batch(n)
        for uid, progress in zip(batch.uids, self._currently_processing[-n:], strict=True):
            progress[1] += self.plans[uid].prompt_done
            progress[2] += self.plans[uid].prompt_done
        return batch
