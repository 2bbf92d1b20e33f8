"""mlx_lm.server's loading and decoding, with drafts.

Requests that mlx_lm.server decodes in a batch are decoded by `SpecBatchGenerator`, those that it
serves one by one (with a seed, with --kv-bits) by our `stream_generate`.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import mlx.core as mx
import mlx_lm.server
from huggingface_hub.errors import RepositoryNotFoundError
from mlx.utils import tree_flatten
from mlx_lm.server import ModelProvider, ResponseGenerator

from mlx_spec.batch import Plan, SpecBatchGenerator
from mlx_spec.errors import ModelUnavailable, SpecError, UnusableDrafter, one_line, reported_as
from mlx_spec.generate import bound, stream_generate
from mlx_spec.load import check_model, local_path, pair, pair_loaded
from mlx_spec.options import SpecOptions
from mlx_spec.server.record import (
    Ledger,
    Record,
    check_connected,
    counted,
    in_ledger,
    stoppable,
)
from mlx_spec.stats import SpecStats

READ_BYTES = 64 << 20  # of weights, between two reports of progress


class SpecModelProvider(ModelProvider):
    """mlx_lm.server's, in which `--draft-model`, or a request's `draft_model`, is a drafter too.
    Without one, a drafter is looked for; "none" looks for none.

    Attributes:
        loading: bytes of weights that are read, and of all; None when nothing is being loaded.
    """

    loading: tuple[int, int] | None = None

    def _load(
        self,
        model_path: str | None,
        adapter_path: str | None = None,
        draft_model_path: str | None = None,
    ) -> None:
        """Raises: ModelUnavailable, UnusableDrafter or OutOfMemory."""
        if model_path is None:
            raise ModelUnavailable("There is no default model; name one as the request's model.")
        self.loading = (0, 0)
        try:
            with reported_as(ModelUnavailable):
                self._load_model(model_path, adapter_path)
            self.model_key = (model_path, adapter_path, draft_model_path)
            with reported_as(UnusableDrafter):
                draft_model = "auto" if draft_model_path is None else draft_model_path
                self._find_drafter(model_path, draft_model)
        except BaseException:
            self.reset()
            raise
        finally:
            self.loading = None

    def _load_model(self, model_path: str, adapter_path: str | None) -> None:
        lazily = bound(ModelProvider._load, load=partial(mlx_lm.server.load, lazy=True))
        try:
            lazily(self, model_path, adapter_path, None)
        except RepositoryNotFoundError as error:
            raise ModelUnavailable(
                f"The model {model_path} does not exist, neither here nor on the Hugging Face hub, "
                "or it is gated; check its name, or log in with `hf auth login`."
            ) from error
        except Exception:
            check_model(model_path)  # says better what is wrong with a directory
            raise
        self._read_weights()

    def _read_weights(self) -> None:
        parameters: Any = tree_flatten(self.model.parameters())
        arrays = [array for _, array in parameters if isinstance(array, mx.array)]
        total, done, chunk = sum(array.nbytes for array in arrays), 0, []
        for array in arrays:
            chunk.append(array)
            if sum(a.nbytes for a in chunk) >= READ_BYTES or array is arrays[-1]:
                mx.eval(chunk)
                done += sum(a.nbytes for a in chunk)
                self.loading, chunk = (done, total), []

    def _find_drafter(self, model_path: str, draft_model: str) -> None:
        if draft_model == "auto":
            with suppress(SpecError, OSError):
                self.model.mlx_spec_source = local_path(model_path)
            return pair_loaded(self.model)
        where = partial(local_path, model_path)
        self.model.mlx_spec = pair(self.model, self.tokenizer, where, draft_model)
        return None


class SpecResponseGenerator(ResponseGenerator):
    """mlx_lm.server's, with drafts, a record of each request, and a decoding thread that outlives
    an error.

    Args: those of mlx_lm.server's, and
        options: depth and acceptance law of a request that does not say, from mlx_lm.server's
            GenerationArguments.
        ended: is called with the counters of each generation when it ends.
        loaded: is called, in the decoding thread, when the default model is there.
        failed: is called, in the decoding thread, with the error that ends it: that of loading
            the default model, or one that comes without a request to blame.
    """

    def __init__(
        self,
        model_provider: ModelProvider,
        prompt_cache: Any,
        *,
        options: Callable[[Any], SpecOptions],
        ended: Callable[[SpecStats], None] = lambda stats: None,
        loaded: Callable[[], None] = lambda: None,
        failed: Callable[[Exception], None] = lambda error: None,
    ):
        self.ledger = Ledger()
        self.options = options
        self.ended = ended
        self.loaded = loaded
        self.failed = failed
        self._starting: Record | None = None
        super().__init__(model_provider, prompt_cache)  # starts the thread

    def generate(
        self,
        request: Any,
        generation_args: Any,
        progress_callback: Callable[[int, int], None] | None = None,
    ) -> tuple[Any, Iterator[Any]]:
        """As mlx_lm.server's. A request may bring a `record`; otherwise it gets one."""
        record = self._record_of(request, generation_args)
        self.ledger.begin(record)
        with in_ledger(self.ledger, record):
            if not self.generation_available():
                raise RuntimeError("The generation thread died; start the server again.")
            context, responses = super().generate(
                request, generation_args, counted(record, progress_callback)
            )
        record.started(context)
        return context, self._recorded(record, responses)

    def stop(self, timeout_s: float) -> None:
        """Stop all generations; wait for the decoding thread, but not for ever."""
        self._stop = True
        for record in self.ledger.active():
            if record.context is not None:
                record.context.stop()
        self._generation_thread.join(timeout_s)

    def _recorded(self, record: Record, responses: Iterator[Any]) -> Iterator[Any]:
        try:
            with in_ledger(self.ledger, record):
                for response in responses:
                    self.ledger.add_token(record, response.finish_reason)
                    check_connected(record)
                    yield response
        finally:
            self.ledger.end(record)

    def _run_generate(self) -> None:
        try:
            self.model_provider.load_default()
        except Exception as error:
            self._fail(error)
            return
        self.loaded()
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
        active = self.ledger.active()
        queues = [queue for record in active if (queue := record.queue) is not None]
        for queue in queues:
            queue.put(RuntimeError(one_line(error)))
        return bool(queues)

    def _fail(self, error: Exception) -> None:
        self._generation_failed = True
        self.ledger.last_error = one_line(error)
        self.failed(error)

    def _next_request(self, timeout: float | None = None) -> Any:
        taken = super()._next_request(timeout)
        if taken is not None:
            queue, request, args = taken
            record = self._record_of(request, args)
            record.queue = queue
            try:
                check_connected(record)
            except ConnectionError as error:  # it gave up waiting; no model is loaded for it
                queue.put(error)
                return None
        return taken

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        check_tokens(tokenizer, args)
        self._starting = self._record_of(request, args)
        tokenized = super()._tokenize(tokenizer, request, args)
        if not isinstance(tokenized[0], list) or not tokenized[0]:
            raise ValueError("The prompt has no tokens; check chat_template_kwargs.")
        return tokenized

    def _plan(self) -> Plan:
        """For the sequence that is inserted now: the one that was tokenized last."""
        assert self._starting is not None
        pair_loaded(self.model_provider.model)
        return Plan(self._starting.options, self._starting.stats)

    def _generate(self) -> None:
        generator = partial(SpecBatchGenerator, plan=self._plan, ended=self.ended)
        bound(ResponseGenerator._generate, BatchGenerator=generator)(self)

    def _serve_single(self, request: Any, stream: Any) -> None:
        record = self._record_of(*request[1:])
        stats = record.stats
        pair_loaded(self.model_provider.model)

        def stream_with_drafts(*, prompt_progress_callback: Callable, **options: Any) -> Any:
            options |= asdict(record.options)
            progress = stoppable(record, prompt_progress_callback)
            return stream_generate(prompt_progress_callback=progress, stats=stats, **options)

        serve = bound(ResponseGenerator._serve_single, stream_generate=stream_with_drafts)
        serve(self, request, stream)
        stats.conclude()
        self.ended(stats)

    def _record_of(self, request: Any, args: Any) -> Record:
        """A request's record, which is made if there is none."""
        if "record" not in vars(request):
            request.record = Record(self.options(args))
        return request.record


def check_tokens(tokenizer: Any, args: Any) -> None:
    """Raises ValueError for ids that the model does not have: decoding them would fail."""
    size = len(tokenizer)
    if args.sampling.top_k >= size:
        raise ValueError(f"top_k is {args.sampling.top_k}; the model has {size} tokens.")
    for token in args.logits.logit_bias or ():
        if not 0 <= token < size:
            raise ValueError(f"logit_bias names token {token}; the model has {size} tokens.")
