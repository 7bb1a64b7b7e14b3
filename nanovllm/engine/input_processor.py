"""From what a caller passes to checked requests.

Owns: the tokenizing of prompts and conversations, and the reading of a call's sampling parameters. Invariant: a text
gets exactly one start token, whoever wrote it: the tokenizer, a chat template or the caller. It deliberately queues
nothing: all requests of a call are checked before any of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nanovllm.engine.output_processor import error_output
from nanovllm.engine.request import Limits, Request, check_text, split_prompt
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams


class InputProcessor:
    """Turns prompts into requests.

    Args:
        tokenizer: a transformers tokenizer; None: token ids only.
        limits: what the engine can run.
        new_request_id: gives a fresh id.
    """

    def __init__(self, tokenizer: Any, limits: Limits, new_request_id: Callable[[], str]) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.new_request_id = new_request_id

    # ---- requests -----------------------------------------------------------------------------------------------

    def check_one(self, prompt: Any, params: Any, request_id: str | None = None) -> Request:
        """A request of its own.

        Raises:
            ValueError, TypeError: a request that cannot run.
        """
        check_params(params)
        text, token_ids = split_prompt(prompt)
        if token_ids is None:
            [token_ids] = self._tokenize([text])
        return self.limits.check(request_id or self.new_request_id(), text, token_ids, params)

    def check_batch(
        self, prompts: list[Any], params: list[Any], on_error: str, first: int = 0
    ) -> list[Request | RequestOutput]:
        """Requests of prompts, in order; `first` is the position of the first in its call.

        With on_error="return" an error output stands in place of one that cannot run.

        Raises:
            ValueError, TypeError: with on_error="raise": a request that cannot run, with its position.
        """
        checked: list[Request | RequestOutput] = []
        split: list[tuple[str | None, list[int] | None] | Exception] = []
        for prompt in prompts:
            try:
                split.append(split_prompt(prompt))
            except (TypeError, ValueError) as error:
                split.append(error)
        tokenized = iter(self._tokenize([s[0] for s in split if isinstance(s, tuple) and s[1] is None]))
        for i, (parts, param) in enumerate(zip(split, params, strict=True)):
            text, token_ids = (None, []) if isinstance(parts, Exception) else (parts[0], parts[1])
            request_id = self.new_request_id()
            try:
                if isinstance(parts, Exception):
                    raise parts
                if token_ids is None:
                    token_ids = next(tokenized)
                check_params(param)
                request = self.limits.check(request_id, text, token_ids, param)
                request.position = first + i
                checked.append(request)
            except (TypeError, ValueError) as error:
                if on_error == "raise":
                    raise type(error)(f"request {first + i}: {error}") from None
                checked.append(error_output(request_id, text, token_ids or [], str(error)))
        return checked

    def _tokenize(self, texts: list[Any]) -> list[list[int]]:
        """Token ids of texts, with the start token that the tokenizer adds, but never with a second one."""
        if not texts:
            return []
        if self.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer, and this engine has none: give token ids")
        token_ids = [list(ids) for ids in self.tokenizer(texts)["input_ids"]]
        start = getattr(self.tokenizer, "bos_token", None)
        if start:
            self._drop_second_start(texts, token_ids, start)
        return token_ids

    def _drop_second_start(self, texts: list[str], token_ids: list[list[int]], start: str) -> None:
        """Where a text begins with the start token (as the output of a chat template does), the tokenizer's is one
        too many."""
        positions = [i for i, text in enumerate(texts) if text.startswith(start)]
        if not positions:
            return
        plain = self.tokenizer([texts[i] for i in positions], add_special_tokens=False)["input_ids"]
        pair = [self.tokenizer.bos_token_id] * 2
        for i, ids in zip(positions, plain, strict=True):
            if len(token_ids[i]) > len(ids) and token_ids[i][:2] == pair and ids[:1] == pair[:1]:
                del token_ids[i][0]

    # ---- conversations ------------------------------------------------------------------------------------------

    def render(self, messages: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
        """Conversations as prompts: the text that the chat template makes of them and its token ids.

        Nothing is added to what the template writes: start and end tokens are its business.

        Args:
            messages: one conversation (a list of dicts with "role" and "content") or a list of conversations.
            options: of `apply_chat_template`.

        Raises:
            ValueError: there is no tokenizer or no chat template, or the template refuses a conversation.
            TypeError: something that is no conversation.
        """
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer, and this engine has none: use generate with token ids")
        if not options.get("chat_template") and not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template: give chat_template=..., or use generate")
        if options.get("add_generation_prompt") and options.get("continue_final_message"):
            raise ValueError(
                "continue_final_message=True goes on with the last message, and add_generation_prompt=True begins a "
                "new one: set one of them to False"
            )
        texts = [self._render_one(i, conversation, options) for i, conversation in enumerate(_conversations(messages))]
        token_ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return [{"prompt": text, "prompt_token_ids": list(ids)} for text, ids in zip(texts, token_ids, strict=True)]

    def _render_one(self, position: int, conversation: Any, options: dict[str, Any]) -> str:
        try:
            if not isinstance(conversation, Sequence) or not conversation:
                raise ValueError(f"a conversation must be a list with at least one message, got {conversation!r}")
            messages = [_message(message) for message in conversation]
        except (TypeError, ValueError) as error:
            raise type(error)(f"request {position}: {error}") from None
        try:
            return self.tokenizer.apply_chat_template(messages, **(options | {"tokenize": False}))
        except Exception as error:  # a template is a program, and raises what it likes
            raise ValueError(f"request {position}: the chat template failed: {error}") from error


def params_list(sampling_params: Any, num_prompts: int) -> list[Any]:
    """One SamplingParams for each prompt.

    Raises:
        ValueError: a list of another length.
        TypeError: neither a SamplingParams nor a list.
    """
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if isinstance(sampling_params, str | Mapping) or not isinstance(sampling_params, Iterable):
        raise TypeError(
            f"sampling_params must be a SamplingParams or one for each prompt, got {type(sampling_params).__name__}"
        )
    params = list(sampling_params)
    if len(params) != num_prompts:
        raise ValueError(f"{num_prompts} prompts, but {len(params)} sampling_params: give one, or one for each prompt")
    return params


def check_params(params: Any) -> None:
    """Raises TypeError for what is no SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be a SamplingParams, got {type(params).__name__}")


def _conversations(messages: Any) -> list[Any]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(
            "messages must be a list of dicts with role and content, or a list of such lists, "
            f"got {type(messages).__name__}"
        )
    is_one = len(messages) > 0 and isinstance(messages[0], Mapping)
    return [messages] if is_one else list(messages)


def _message(message: Any) -> dict[str, Any]:
    """A message as templates expect it: parts of text joined to one string.

    Raises:
        TypeError: no message.
        ValueError: a message without a role, or a part that is not text.
    """
    if not isinstance(message, Mapping):
        raise TypeError(f"a message must be a dict with role and content, got {type(message).__name__}")
    if "role" not in message:
        raise ValueError(f"a message needs a role, got the keys {sorted(map(str, message))}")
    content = message.get("content")
    if isinstance(content, str):
        check_text(content)
    if not isinstance(content, list | tuple):
        return dict(message)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"a message's content must be text, got a part of type {kind!r}")
    return {**message, "content": "\n".join(str(part.get("text", "")) for part in content)}
