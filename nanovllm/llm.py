"""What users call.

Owns: the ways to ask: whole batches, conversations, streams, iterables of any length, a caller's own loop. Invariant:
all requests of a call are checked before any of them runs, and when it returns or raises, none of them is left behind.
It deliberately knows nothing of blocks, rows or devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.call import Call
from nanovllm.engine.executor import AnyExecutor
from nanovllm.engine.guard import EngineBusyError, Session
from nanovllm.engine.input_processor import InputProcessor, params_list
from nanovllm.engine.replicas import build_engine, start_executors
from nanovllm.engine.request import Prompt, Request, is_single_prompt
from nanovllm.outputs import RequestOutput
from nanovllm.progress import Progress
from nanovllm.sampling_params import SamplingParams
from nanovllm.tokenizer import check_tokenizer_files, load_tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None
Message = Mapping[str, Any]


class LLM:
    """A language model, ready to generate.

    Args:
        model: a local folder with config.json, *.safetensors and tokenizer files.
        **options: see `nanovllm.config.Config` and the README's table.

    Use it as a context manager, or call `close()`; both give back all device memory.

    Raises:
        TypeError: an option that does not exist.
        ValueError: an option, a folder or a model that cannot work, naming field, value and what is allowed.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self.config = Config.from_options(str(model), options)
        executors, self.tokenizer = _start(self.config)
        self.engine = build_engine(self.config, executors, self.tokenizer)
        self.inputs = InputProcessor(self.tokenizer, self.engine.limits, self.engine.new_request_id)
        self.num_kvcache_blocks = self.engine.num_kvcache_blocks

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer, or None."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """generation_config.json's advice (temperature, top_k, top_p) over the defaults of SamplingParams."""
        return SamplingParams(**self.config.model_config.default_sampling)

    def _or_default(self, sampling_params: Any) -> Any:
        return self.get_default_sampling_params() if sampling_params is None else sampling_params

    # ---- whole batches ------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Complete prompts; output i belongs to prompt i.

        Args:
            prompts: strings, lists of token ids, dicts with "prompt" or "prompt_token_ids", or one bare prompt.
            sampling_params: one for all, or one each; None: the model's own advice (`get_default_sampling_params`).
            use_tqdm: show requests done and tokens per second.
            on_error: "raise": a request that cannot run raises before anything runs; "return": its output has
                finish_reason "error" and `error`, and the others run.

        Raises:
            ValueError: a request that cannot run, with its position and the reason; nothing ran, nothing stays queued.
            TypeError: something of the wrong type.
            RuntimeError: a request failed by itself (with on_error="raise"), for example since its logits were not
                finite; or the device failed, or the engine is in use.
        """
        _check_on_error(on_error)
        if not isinstance(prompts, Iterable):
            raise TypeError(f"prompts must be a prompt or a list of prompts, got {prompts!r}")
        batch: list[Any] = [prompts] if is_single_prompt(prompts) else list(prompts)
        params = params_list(self._or_default(sampling_params), len(batch))
        outputs: list[RequestOutput | None] = [None] * len(batch)
        requests: list[Request] = []
        for position, checked in enumerate(self.inputs.check_batch(batch, params, on_error)):
            if isinstance(checked, RequestOutput):
                outputs[position] = checked
            else:
                requests.append(checked)
        call = Call()
        with Session(self.engine):
            try:
                self.engine.submit(requests, call)
                with Progress(len(requests), use_tqdm) as progress:
                    for position, output in self.engine.run(call):
                        outputs[position] = output
                        progress.add(output)
                        if output.error is not None and on_error == "raise":
                            raise RuntimeError(f"request {position}: {output.error}")
            finally:  # whatever came up, none of them stays behind
                self.engine.drop(call)
        assert all(output is not None for output in outputs)
        return [output for output in outputs if output is not None]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, written out by the model's chat template; output i belongs to conversation i.

        Args:
            messages: one conversation, which is a list of dicts with "role" and "content", or a list of conversations.
            sampling_params, use_tqdm: as for generate.
            chat_template: a Jinja template in place of the tokenizer's own.
            add_generation_prompt: end the prompt where the model's answer begins.
            continue_final_message: leave the last message open, for the model to go on with it.
            tools: descriptions of functions, for templates that know them.
            chat_template_kwargs: what else the template takes, such as {"enable_thinking": False}.

        The template alone decides on start tokens: nothing is added to it. `prompt` of the results is its text.

        Raises:
            ValueError: no tokenizer or no chat template, a conversation that the template refuses, with its position,
                or a request that cannot run.
            TypeError, RuntimeError: as generate.
        """
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        return self.generate(self.inputs.render(messages, options), sampling_params, use_tqdm)

    # ---- results as they come -----------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one completion, piece by piece as it is made.

        A piece ends with a whole character and holds nothing that a stop string may yet take back; joined, the pieces
        are the text that generate would return. Closing the iterator aborts the request.

        Raises:
            ValueError: a request that cannot run, that has n above 1, or no text (detokenize=False, no tokenizer).
            TypeError: something of the wrong type.
            RuntimeError: the request failed or was aborted, the device failed, or the engine is in use.
        """
        params = self._or_default(sampling_params)
        request = self.inputs.check_one(prompt, params)
        if params.n > 1:
            raise ValueError(f"n must be 1 in a stream, got {params.n}: use generate or generate_iter")
        if self.tokenizer is None or not params.detokenize:
            raise ValueError("a stream gives out text: it needs a tokenizer and detokenize=True")
        request.is_streamed = True
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[str]:
        call = Call()
        num_given = 0  # characters
        try:
            self.engine.submit([request], call)
            while call.pending:
                self.engine.turn(call)
                # it has no sequence while it waits for another request's trial
                text_progress = request.seqs[0].text_progress if request.seqs else None
                if call.pending and text_progress is not None and (piece := text_progress.shown(num_given)):
                    num_given += len(piece)
                    yield piece
            call.check()
            if not call.finished:
                raise RuntimeError(f"request {request.request_id} was aborted")
            output = call.finished.popleft()[1]
            if output.error is not None:
                raise RuntimeError(output.error)
            if rest := output["text"][num_given:]:
                yield rest
        finally:
            self.engine.drop(call)

    def generate_iter(
        self,
        requests: Iterable[Prompt | tuple[Prompt, SamplingParams]],
        sampling_params: SamplingParams | None = None,
        on_error: str = "raise",
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Complete an iterable of any length; results as (position, output) in the order in which they finish.

        An item is a prompt, or a pair of a prompt and its SamplingParams. It is pulled, and checked, when there is
        room: at most twice max_num_seqs requests an engine are held. Closing the iterator aborts what runs.

        Raises: as generate; a request that cannot run raises when it is pulled, and the others of this call are
        dropped.
        """
        _check_on_error(on_error)
        if isinstance(requests, str | Mapping):
            raise TypeError(f"requests must be an iterable of prompts, got one prompt, a {type(requests).__name__}")
        default = self._or_default(sampling_params)
        return self._generate_iter(iter(requests), default, on_error)

    def _generate_iter(
        self, items: Iterator[Any], default: SamplingParams, on_error: str
    ) -> Iterator[tuple[int, RequestOutput]]:
        room = 2 * self.config.max_num_seqs * self.config.data_parallel_size
        call = Call()
        position, exhausted = 0, False
        try:
            while True:
                prompts: list[Any] = []
                params: list[Any] = []
                while not exhausted and len(call.pending) + len(call.finished) + len(prompts) < room:
                    try:
                        item = next(items)
                    except StopIteration:
                        exhausted = True
                        break
                    pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], SamplingParams)
                    prompts.append(item[0] if pair else item)
                    params.append(item[1] if pair else default)
                for checked in self.inputs.check_batch(prompts, params, on_error, first=position):
                    if isinstance(checked, RequestOutput):
                        call.finished.append((position, checked))
                    else:
                        self.engine.submit([checked], call)
                    position += 1
                while call.finished:
                    index, output = call.finished.popleft()
                    if output.error is not None and on_error == "raise":
                        raise RuntimeError(f"request {index}: {output.error}")
                    yield index, output
                if call.pending:
                    self.engine.turn(call)
                elif exhausted:
                    call.check()
                    return
        finally:
            self.engine.drop(call)

    # ---- a caller's own loop ------------------------------------------------------------------------------------

    def add_request(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue one request for `step`; returns its id.

        Raises:
            ValueError: a request that cannot run, or an id in use.
        """
        request = self.inputs.check_one(prompt, self._or_default(sampling_params), request_id)
        self.engine.submit([request], self.engine.loop_call)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """One turn of the engine; the requests of `add_request` that finished since the last one.

        Raises:
            RuntimeError: the device failed, or the engine was closed before they had finished. As after any exception
                out of a step, an interrupt included, the requests of `add_request` are gone.
        """
        call = self.engine.loop_call
        call.check()
        try:
            if call.pending:
                self.engine.turn(call)
        except EngineBusyError:
            raise  # it was not turned at all
        except BaseException:
            self.engine.drop(call)
            raise
        finished = [output for _, output in call.finished]
        call.finished.clear()
        return finished

    def abort(self, request_id: str) -> None:
        """Drop a request; also one of add_request that has finished, if its result has not been given out.

        An id that is not here is passed over. May be called from anywhere, at any time: from another thread, a signal
        handler or a callback, in the middle of a step too, at whose end it takes effect.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {request_id!r} ({type(request_id).__name__})")
        self.engine.abort([request_id])

    def is_finished(self) -> bool:
        """Whether everything that `add_request` took has been given out."""
        call = self.engine.loop_call
        return not call.pending and not call.finished and call.lost is None

    # ---- training loops -----------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Give back the memory of weights, KV cache and CUDA graphs, for something else to use until `wake_up`.

        Args:
            level: 1: the weights go to (pinned) host memory and come back with wake_up. 2: they are dropped, and
                wake_up has to be followed by update_weights. On a CPU level 1 leaves them where they are.

        Cached prefixes are gone. Asleep, the engine refuses requests; sleeping on is allowed, at level 2 too.

        Raises:
            RuntimeError: requests have not finished, or the engine is closed or dead.
            ValueError: another level.
        """
        self.engine.sleep(level)

    def wake_up(self) -> None:
        """Undo `sleep`: take the memory again and capture the graphs anew; awake, do nothing.

        Raises:
            RuntimeError: there is too little memory; the engine sleeps on and holds none, so this can be tried again.
        """
        self.engine.wake_up()

    def update_weights(self, weights: str | PathLike[str] | Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Replace all weights in place, so that graphs stay valid, and drop cached prefixes.

        Args:
            weights: a checkpoint's folder, or (name, tensor) pairs with a checkpoint's names, as
                `model.named_parameters()` of transformers gives them (or a dict of them); of any float dtype, on any
                device. They are taken one by one, so an iterator may gather or convert each as it is asked for.

        A folder's names and shapes are checked first: refused, it changes nothing. An iterator's fault (a tensor that
        is missing, unexpected, or of the wrong shape; an exception) shows when some are written: the engine then
        refuses requests until an update has gone through.

        Raises:
            RuntimeError: requests have not finished, or the engine is asleep, closed or dead.
            ValueError: the weights do not fit, with every name that is at fault.
            TypeError: something else than a folder or pairs of names and tensors.
        """
        self.engine.update_weights(weights)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. New weights do that by themselves."""
        self.engine.reset_prefix_cache()

    # ---- facts and life -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Counts since the start: prompt_tokens_computed, prompt_tokens_cached, generated_tokens, steps, preemptions,
        max_seqs_in_flight, kv_blocks_total, kv_blocks_free (that sequences can use), and on a GPU mean_step_ms
        (device time of a step) and host_exposed_ms (device time lost between steps, waiting for the host)."""
        return self.engine.stats()

    def close(self) -> None:
        """Give back all device memory that the engine took; may be called again."""
        if hasattr(self, "engine"):
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_on_error(on_error: str) -> None:
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error must be 'raise' or 'return', got {on_error!r}")


def _start(config: Config) -> tuple[list[AnyExecutor], Any]:
    """Model and tokenizer, side by side: the tokenizer takes as long as a small model."""
    if config.skip_tokenizer_init:
        return start_executors(config), None
    check_tokenizer_files(config)
    with ThreadPoolExecutor(1, "tokenizer") as pool:
        loading = pool.submit(load_tokenizer, config)
        executors = start_executors(config)
        try:
            return executors, loading.result()
        except BaseException:
            for executor in executors:
                executor.close()
            raise
