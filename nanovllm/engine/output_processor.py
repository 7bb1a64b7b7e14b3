"""From sampled ids to results.

Owns: the end of a request (which id or length ended it) and its text. Invariant: every token of a live sequence is
looked at exactly once, in order, before any later step's results. It deliberately decodes a request only when it is
complete: nobody reads half a result here, and one decode of all ids is exact.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from nanovllm.engine.request import Request, Tokenizer
from nanovllm.engine.scheduler import Step
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import CompletionOutput, RequestOutput


class OutputProcessor:
    """Finds ended sequences in a step's results and builds their outputs.

    Args:
        tokenizer: None where there is none: text is then "".
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._num_text_ids = len(tokenizer) if tokenizer is not None else 0

    def process(self, step: Step, requests: dict[str, Request]) -> list[Request]:
        """Requests that this step's tokens ended, `finish_reason` set on their sequences.

        One plain loop: it runs every step.
        """
        finished: list[Request] = []
        plan = step.plan
        now: float | None = None
        for i in range(plan.num_sampled):
            seq = step.seqs[i]
            request = requests.get(seq.request_id)
            if request is None or request.seq is not seq or seq.finish_reason is not None:
                continue  # ended, or gone, while this step was in flight
            if i >= plan.num_decodes and request.metrics.first_token_time is None:
                now = now or time.monotonic()
                request.metrics.first_token_time = now
            if self.check_end(seq, request):
                finished.append(request)
        return finished

    @staticmethod
    def check_end(seq: Sequence, request: Request) -> bool:
        """Whether the newest token of `seq` ended it; sets its finish_reason."""
        if len(seq.token_ids) == seq.num_prompt_tokens:
            return False
        token_id = seq.token_ids[-1]
        if token_id < 0:
            seq.finish_reason = "error"
            position = len(seq.token_ids) - seq.num_prompt_tokens
            request.error = (
                f"the logits of output token {position} are not finite (NaN or inf): the weights or the dtype do not "
                "suit this prompt; dtype='float32' or 'bfloat16' has more range than 'float16'"
            )
        elif token_id in request.end_ids:
            seq.finish_reason = "stop"
        elif len(seq.token_ids) >= seq.max_total_tokens:
            seq.finish_reason = "length"
        return seq.finish_reason is not None

    def output(self, request: Request) -> RequestOutput:
        """The result of a finished request, text decoded."""
        seq = request.seq
        assert seq is not None
        request.metrics.finished_time = time.monotonic()
        token_ids = seq.token_ids[seq.num_prompt_tokens :]
        if request.error is not None:
            token_ids = token_ids[:-1]
        completion = CompletionOutput(token_ids=token_ids, finish_reason=seq.finish_reason)
        text_ids = token_ids
        if seq.finish_reason == "stop":
            text_ids = token_ids[:-1]
            if token_ids[-1] in (request.params.stop_token_ids or ()):
                completion.stop_reason = token_ids[-1]
        completion.text = self.decode(text_ids, request.params.skip_special_tokens)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            num_cached_tokens=seq.num_cached_tokens,
            error=request.error,
            metrics=request.metrics,
        )

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Text of `token_ids`; ids beyond the tokenizer (a padded vocabulary's) have none."""
        if self.tokenizer is None or not token_ids:
            return ""
        if max(token_ids) >= self._num_text_ids:
            token_ids = [token_id for token_id in token_ids if token_id < self._num_text_ids]
        return self.tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )


def error_output(request_id: str, prompt: str | None, token_ids: Iterable[int], error: str) -> RequestOutput:
    """The result of a request that was refused."""
    return RequestOutput(request_id, prompt, list(token_ids), [CompletionOutput(finish_reason="error")], error=error)
