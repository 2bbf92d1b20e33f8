"""mlx_lm.server's loading and decoding, with drafts.

Requests that mlx_lm.server decodes in a batch are decoded by `SpecBatchGenerator`, those that it
serves one by one (with a seed, with --kv-bits) by our `stream_generate`.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from mlx_lm.server import ModelProvider, ResponseGenerator

from mlx_spec.batch import Plan, SpecBatchGenerator
from mlx_spec.generate import bound, stream_generate
from mlx_spec.load import local_path, pair, pair_loaded
from mlx_spec.server.record import Ledger, Record, counted
from mlx_spec.stats import SpecStats


class SpecModelProvider(ModelProvider):
    """mlx_lm.server's, in which `--draft-model`, or a request's `draft_model`, is a drafter too.
    Without one, a drafter is looked for; "none" looks for none."""

    def _load(
        self,
        model_path: str,
        adapter_path: str | None = None,
        draft_model_path: str | None = None,
    ) -> None:
        super()._load(model_path, adapter_path, None)
        self.model_key = (model_path, adapter_path, draft_model_path)
        try:
            self._find_drafter(model_path, draft_model_path or "auto")
        except BaseException:
            self.reset()
            raise

    def _find_drafter(self, model_path: str, draft_model: str) -> None:
        if draft_model == "auto":
            return pair_loaded(self.model)
        where = partial(local_path, model_path)
        pairing = self.model.mlx_spec = pair(self.model, self.tokenizer, where, draft_model)
        if pairing.drafter is not None and not hasattr(pairing.drafter, "kind"):
            self.draft_model, self.is_batchable = pairing.drafter, False  # as mlx_lm.server does
        return None


class SpecResponseGenerator(ResponseGenerator):
    """mlx_lm.server's, with drafts, a record of each request, and a decoding thread that outlives
    an error.

    Args: those of mlx_lm.server's, and
        ended: is called with the counters of each generation when it ends.
        failed: is called, in the decoding thread, with the error that ends it: that of loading
            the default model, or one that comes without a request to blame.
    """

    def __init__(
        self,
        model_provider: ModelProvider,
        prompt_cache: Any,
        *,
        ended: Callable[[SpecStats], None] = lambda stats: None,
        failed: Callable[[Exception], None] = lambda error: None,
    ):
        self.ledger = Ledger()
        self.ended = ended
        self.failed = failed
        self.loaded = False
        self._starting: Record | None = None
        super().__init__(model_provider, prompt_cache)  # starts the thread

    def generate(
        self,
        request: Any,
        generation_args: Any,
        progress_callback: Callable[[int, int], None] | None = None,
    ) -> tuple[Any, Iterator[Any]]:
        record = request.record = Record(generation_args.num_draft_tokens)
        self.ledger.begin(record)
        try:
            context, responses = super().generate(
                request, generation_args, counted(record, progress_callback)
            )
        except BaseException as error:
            self._note(record, error)
            raise
        record.started(context)
        return context, self._recorded(record, responses)

    def _recorded(self, record: Record, responses: Iterator[Any]) -> Iterator[Any]:
        try:
            for response in responses:
                record.add_token(response.finish_reason)
                yield response
        except Exception as error:
            self._note(record, error)
            raise
        finally:
            self.ledger.end(record)

    def _note(self, record: Record, error: BaseException) -> None:
        self.ledger.last_error = one_line(error)
        self.ledger.end(record, "error")

    def _run_generate(self) -> None:
        try:
            self.model_provider.load_default()
        except Exception as error:
            self._fail(error)
            return
        self.loaded = True
        while True:
            try:
                self._generate()
                return
            except Exception as error:
                if not self._answer_with(error):
                    self._fail(error)
                    return
            gc.collect()

    def _answer_with(self, error: Exception) -> bool:
        """Let all requests that the decoding thread has taken fail with the error."""
        logging.exception("Decoding failed; the requests under way are answered with an error.")
        queues = [record.queue for record in self.ledger.active() if record.queue is not None]
        for queue in queues:
            queue.put(RuntimeError(one_line(error)))
        return bool(queues)

    def _fail(self, error: Exception) -> None:
        self._generation_failed = True
        self.ledger.last_error = one_line(error)
        self.failed(error)

    def _next_request(self, timeout: float | None = None) -> Any:
        request = super()._next_request(timeout)
        if request is not None:
            queue, completion, args = request
            if not hasattr(completion, "record"):
                completion.record = Record(args.num_draft_tokens)
            completion.record.queue = queue
        return request

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        self._starting = request.record
        return super()._tokenize(tokenizer, request, args)

    def _plan(self) -> Plan:
        """For the sequence that is inserted now: the one that was tokenized last."""
        assert self._starting is not None
        return Plan(self._starting.num_draft_tokens, self._starting.stats)

    def _generate(self) -> None:
        generator = partial(SpecBatchGenerator, plan=self._plan, ended=self.ended)
        bound(ResponseGenerator._generate, BatchGenerator=generator)(self)

    def _serve_single(self, request: Any, stream: Any) -> None:
        stats = request[1].record.stats
        serve = bound(
            ResponseGenerator._serve_single, stream_generate=partial(stream_generate, stats=stats)
        )
        serve(self, request, stream)
        if not stats.engaged and stats.reason is None:
            stats.reason = "too-short"
        self.ended(stats)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
