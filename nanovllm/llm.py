"""What users call.

Owns: the tokenizer, and how a batch of prompts becomes requests and a list of results in order. Invariant: all
requests of a generate are checked before any of them runs, and when it returns or raises, none of them is left
behind. It deliberately knows nothing of blocks, rows or devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanovllm.config import Config
from nanovllm.engine.llm_engine import Call, LLMEngine
from nanovllm.engine.output_processor import error_output
from nanovllm.engine.request import Prompt, Request, is_single_prompt, split_prompt
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


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
        self.tokenizer = None if self.config.skip_tokenizer_init else _load_tokenizer(self.config)
        self.engine = LLMEngine(self.config, self.tokenizer)
        self.num_kvcache_blocks = self.engine.num_kvcache_blocks
        self._loop_call = Call()  # what add_request took

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer, or None."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """generation_config.json's advice (temperature, top_k, top_p) over the defaults of SamplingParams."""
        return SamplingParams(**self.config.model_config.default_sampling)

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
            RuntimeError: a request's logits were not finite (with on_error="raise"), or the device failed.
        """
        _check_on_error(on_error)
        batch: list[Any] = [prompts] if is_single_prompt(prompts) else list(prompts)
        params = self._params_list(sampling_params, len(batch))
        outputs: list[RequestOutput | None] = [None] * len(batch)
        requests: list[Request] = []
        for position, checked in enumerate(self._check_batch(batch, params, on_error)):
            if isinstance(checked, RequestOutput):
                outputs[position] = checked
            else:
                requests.append(checked)
        call = Call()
        try:
            self.engine.submit(requests, call)
            with _Progress(len(requests), use_tqdm) as progress:
                for position, output in self.engine.run(call):
                    outputs[position] = output
                    progress.add(output)
                    if output.error is not None and on_error == "raise":
                        raise RuntimeError(f"request {position}: {output.error}")
        finally:  # whatever came up, none of them stays behind
            if call.pending:
                self.engine.abort(list(call.pending))
        assert all(output is not None for output in outputs)
        return [output for output in outputs if output is not None]

    def generate_iter(
        self,
        requests: Iterable[Prompt | tuple[Prompt, SamplingParams]],
        sampling_params: SamplingParams | None = None,
        on_error: str = "raise",
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Complete an iterable of any length; results as (position, output) in the order in which they finish.

        An item is a prompt, or a pair of a prompt and its SamplingParams. It is pulled, and checked, when there is
        room: at most twice max_num_seqs requests are held. Closing the iterator aborts what runs.

        Raises: as generate; a request that cannot run raises when it is pulled, and the others of this call are
        dropped.
        """
        _check_on_error(on_error)
        default = sampling_params or self.get_default_sampling_params()
        return self._generate_iter(iter(requests), default, on_error)

    def _generate_iter(
        self, items: Iterator[Any], default: SamplingParams, on_error: str
    ) -> Iterator[tuple[int, RequestOutput]]:
        room = 2 * self.config.max_num_seqs
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
                for checked in self._check_batch(prompts, params, on_error, first=position):
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
                    return
        finally:
            if call.pending:
                self.engine.abort(list(call.pending))

    # ---- a caller's own loop ------------------------------------------------------------------------------------

    def add_request(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue one request for `step`; returns its id.

        Raises:
            ValueError: a request that cannot run, or an id in use.
        """
        params = sampling_params if sampling_params is not None else self.get_default_sampling_params()
        _check_params(params)
        (text, token_ids), *_ = self._tokenize([prompt])
        request = self.engine.limits.check(request_id or self.engine.new_request_id(), text, token_ids, params)
        self.engine.submit([request], self._loop_call)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """One turn of the engine; the requests of `add_request` that finished since the last one."""
        if self._loop_call.pending:
            self.engine.turn(self._loop_call)
        finished = [output for _, output in self._loop_call.finished]
        self._loop_call.finished.clear()
        return finished

    def abort(self, request_id: str) -> None:
        """Drop a request; an id that is not queued or running is passed over."""
        self.engine.abort([request_id])

    def is_finished(self) -> bool:
        """Whether everything that `add_request` took has been given out."""
        return not self._loop_call.pending and not self._loop_call.finished

    # ---- facts and life -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Counts since the start: prompt_tokens_computed, prompt_tokens_cached, generated_tokens, steps, preemptions,
        max_seqs_in_flight, kv_blocks_total, kv_blocks_free (that sequences can use), and on a GPU mean_step_ms
        (device time of a step) and host_exposed_ms (device time lost between steps, waiting for the host)."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Give back all device memory that the engine took; may be called again."""
        if hasattr(self, "engine"):
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- checks -------------------------------------------------------------------------------------------------

    def _params_list(self, sampling_params: Params, num_prompts: int) -> list[Any]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * num_prompts
        if isinstance(sampling_params, str | dict) or not isinstance(sampling_params, Iterable):
            raise TypeError(
                f"sampling_params must be a SamplingParams or one for each prompt, got {type(sampling_params).__name__}"
            )
        params = list(sampling_params)
        if len(params) != num_prompts:
            raise ValueError(
                f"{num_prompts} prompts, but {len(params)} sampling_params: give one, or one for each prompt"
            )
        return params

    def _check_batch(
        self, prompts: list[Any], params: list[Any], on_error: str, first: int = 0
    ) -> list[Request | RequestOutput]:
        """Requests of prompts, checked; with on_error="return" an error output in place of one that cannot run."""
        checked: list[Request | RequestOutput] = []
        split: list[tuple[str | None, list[int] | None] | Exception] = []
        for prompt in prompts:
            try:
                split.append(split_prompt(prompt))
            except (TypeError, ValueError) as error:
                split.append(error)
        tokenized = iter(self._tokenize_texts([s[0] for s in split if isinstance(s, tuple) and s[1] is None]))
        for i, (parts, param) in enumerate(zip(split, params, strict=True)):
            text, token_ids = (None, []) if isinstance(parts, Exception) else (parts[0], parts[1])
            request_id = self.engine.new_request_id()
            try:
                if isinstance(parts, Exception):
                    raise parts
                if token_ids is None:
                    token_ids = next(tokenized)
                _check_params(param)
                request = self.engine.limits.check(request_id, text, token_ids, param)
                request.position = first + i
                checked.append(request)
            except (TypeError, ValueError) as error:
                if on_error == "raise":
                    raise type(error)(f"request {first + i}: {error}") from None
                checked.append(error_output(request_id, text, token_ids or [], str(error)))
        return checked

    def _tokenize(self, prompts: list[Any]) -> list[tuple[str | None, list[int]]]:
        split = [split_prompt(prompt) for prompt in prompts]
        texts = iter(self._tokenize_texts([text for text, token_ids in split if token_ids is None]))
        return [(text, next(texts) if token_ids is None else token_ids) for text, token_ids in split]

    def _tokenize_texts(self, texts: list[Any]) -> list[list[int]]:
        if not texts:
            return []
        if self.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer, and this engine has none: give token ids")
        return [list(ids) for ids in self.tokenizer(texts)["input_ids"]]


def _check_on_error(on_error: str) -> None:
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error must be 'raise' or 'return', got {on_error!r}")


def _check_params(params: Any) -> None:
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be a SamplingParams, got {type(params).__name__}")


def _load_tokenizer(config: Config) -> Any:
    """The folder's tokenizer; none is fine where weights are random.

    Raises:
        ValueError: no tokenizer can be loaded from the folder.
    """
    from transformers import AutoTokenizer

    folder = Path(config.tokenizer or config.model)
    has_files = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    if not has_files and config.load_format == "dummy" and config.tokenizer is None:
        return None
    try:
        if not has_files:  # transformers would make an empty one
            raise OSError(f"it has none of {', '.join(_TOKENIZER_FILES)}")
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"no tokenizer could be loaded from {str(folder)!r} ({error}); give tokenizer=FOLDER, or "
            "skip_tokenizer_init=True to work with token ids"
        ) from error


class _Progress:
    """Requests done, and prefill and decode tokens per second."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._bar = tqdm(total=total, desc="Generating", unit="request", disable=not enabled, dynamic_ncols=True)
        self._prompt_tokens = 0
        self._output_tokens = 0

    def add(self, output: RequestOutput) -> None:
        self._prompt_tokens += len(output.prompt_token_ids)
        self._output_tokens += len(output["token_ids"])
        if not self._bar.disable:
            elapsed = max(self._bar.format_dict["elapsed"], 1e-9)
            self._bar.set_postfix_str(
                f"prefill {self._prompt_tokens / elapsed:.0f} tok/s, decode {self._output_tokens / elapsed:.0f} tok/s",
                refresh=False,
            )
            self._bar.update(1)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
