"""From sampled ids to results.

Owns: the end of a sequence (which id, string or length ended it) and its text. Invariant: every token of a live
sequence is looked at exactly once, in order, before any later step's results. It deliberately decodes a sequence only
when it is complete, in one go; only where a stop string or a reader waits for text does `TextProgress` follow it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.logprobs import LogprobsBuilder
from nanovllm.engine.request import Request, Tokenizer
from nanovllm.engine.scheduler import Step
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.stop import TextProgress
from nanovllm.outputs import CompletionOutput, RequestOutput


class OutputProcessor:
    """Finds ended sequences in a step's results and builds their outputs.

    Args:
        tokenizer: None where there is none: text is then "".
        vocab_size: of the model.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.detokenizer = Detokenizer(tokenizer)
        self.logprobs = LogprobsBuilder(self.detokenizer)

    def follow(self, seq: Sequence, request: Request) -> None:
        """Before a sequence is queued: follow its text from its first token on, if there is a reason to."""
        if request.params.stop or request.is_streamed:
            seq.text_progress = TextProgress(request.params, self.detokenizer, request.is_streamed)

    def process(self, step: Step, requests: dict[str, Request]) -> list[Sequence]:
        """Sequences that this step's tokens ended, `finish_reason` set.

        One plain loop: it runs every step.
        """
        finished: list[Sequence] = []
        for seq in step.seqs[: step.plan.num_sampled]:
            if seq.finish_reason is not None:
                continue  # it ended while this step was in flight
            token_ids = seq.token_ids
            num_tokens, token_id = len(token_ids), token_ids[-1]
            if num_tokens - seq.num_prompt_tokens == 1:
                self._note_first_token(requests.get(seq.request_id))
            # what nearly every token fails at, before anything is looked up
            may_end = token_id < 0 or token_id in seq.end_ids or num_tokens >= seq.max_total_tokens
            if may_end or seq.text_progress is not None:
                request = requests.get(seq.request_id)
                if request is not None and self.check_end(seq, request):
                    finished.append(seq)
        return finished

    @staticmethod
    def _note_first_token(request: Request | None) -> None:
        if request is not None and request.metrics.first_token_time is None:
            request.metrics.first_token_time = time.monotonic()

    def check_end(self, seq: Sequence, request: Request) -> bool:
        """Whether the newest token of `seq` ended it; sets its finish_reason."""
        if len(seq.token_ids) == seq.num_prompt_tokens:
            return False
        token_id = seq.token_ids[-1]
        if token_id < 0:
            seq.finish_reason = "error"
            if request.rules_out_all(seq.token_ids[seq.num_prompt_tokens : -1], self.vocab_size):
                request.error = (
                    "the request's rules (logit_bias, allowed_token_ids, bad_words, min_tokens) leave no token to be "
                    f"output token {seq.num_output_tokens}"
                )
            else:
                request.error = (
                    f"the logits of output token {seq.num_output_tokens} are not finite (NaN or inf): the weights or "
                    "the dtype do not suit this prompt; dtype='float32' or 'bfloat16' has more range than 'float16'"
                )
        elif token_id in request.end_ids:
            if token_id in (request.params.stop_token_ids or ()):
                seq.stop_reason = token_id
            elif seq.text_progress is not None:
                seq.stop_reason = seq.text_progress.special_stop(token_id)
            seq.finish_reason = "stop"
        elif seq.text_progress is not None and (stop := seq.text_progress.advance(seq)) is not None:
            seq.stop_reason = stop
            seq.finish_reason = "stop"
        elif len(seq.token_ids) >= seq.max_total_tokens:
            seq.finish_reason = "length"
        return seq.finish_reason is not None

    def check_end_again(self, seq: Sequence, request: Request) -> bool:
        """The same after an exception, which may have come in the middle: the text is read from its start."""
        self.follow(seq, request)
        return self.check_end(seq, request)

    def output(self, request: Request) -> RequestOutput:
        """The result of a finished request, text decoded."""
        request.metrics.finished_time = time.monotonic()
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._completion(request, seq) for seq in request.seqs],
            prompt_logprobs=self.logprobs.of_prompt(request.seqs[0], request.params.detokenize),
            num_cached_tokens=request.seqs[0].num_cached_tokens,
            error=request.error,
            metrics=request.metrics,
        )

    def _completion(self, request: Request, seq: Sequence) -> CompletionOutput:
        token_ids = seq.token_ids[seq.num_prompt_tokens :]
        if seq.finish_reason == "error":
            token_ids = token_ids[:-1]
        completion = CompletionOutput(index=seq.index, token_ids=token_ids, finish_reason=seq.finish_reason)
        completion.stop_reason = seq.stop_reason
        completion.text = self._text(token_ids, seq, request)
        self.logprobs.add_to(completion, seq, request.params.detokenize)
        return completion

    def _text(self, token_ids: list[int], seq: Sequence, request: Request) -> str:
        """One decode, without the end id that fired, cut at the stop string that fired."""
        params = request.params
        if not params.detokenize:
            return ""
        stop_start = seq.text_progress.stop_start if seq.text_progress is not None else None
        ended_by_last_token = seq.finish_reason == "stop" and stop_start is None
        text_ids = token_ids[:-1] if ended_by_last_token else token_ids
        text = self.detokenizer.decode(text_ids, params.skip_special_tokens)[:stop_start]
        is_included = params.include_stop_str_in_output and isinstance(seq.stop_reason, str)
        return text + str(seq.stop_reason) if is_included else text


def lost_output(request: Request, error: Exception) -> RequestOutput:
    """The result of a request that an error in a step has ended."""
    output = error_output(request.request_id, request.prompt, request.prompt_token_ids, f"it was lost to {error!r}")
    output.metrics = request.metrics
    return output


def error_output(request_id: str, prompt: str | None, token_ids: Iterable[int], error: str) -> RequestOutput:
    """The result of a request that was refused, or lost."""
    return RequestOutput(request_id, prompt, list(token_ids), [CompletionOutput(finish_reason="error")], error=error)
