"""The workloads by name: which prompts, how long each output, sampled how.

Owns: the draws. Invariant: a name gives the same token ids and lengths on every machine and for every engine, since
all come from Python's `random` with a fixed seed. It deliberately knows no engine and no model but for the size of
the vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_TOKEN_ID = 10_000  # nano-vllm's bench draws ids up to this one
TEMPERATURE = 0.6
QWEN3_FILTERS = {"top_k": 20, "top_p": 0.95}  # Qwen3's generation_config.json


@dataclass(frozen=True)
class Workload:
    """Requests of one run. Every request runs to its output length: end ids are ignored.

    `groups` says what prompts have in common, for the floor that counts shared KV once: a list of (tokens, requests)
    pairs, each a run of tokens that so many requests hold in common; None where nothing is shared.
    """

    name: str
    prompts: list[list[int]]  # token ids
    output_lens: list[int]  # tokens, one for each prompt
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": TEMPERATURE})
    groups: list[tuple[int, int]] | None = None

    @property
    def prompt_lens(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(prompt) for prompt in self.prompts]

    @property
    def num_input_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(self.prompt_lens)

    @property
    def num_output_tokens(self) -> int:
        """Requested output tokens of all requests."""
        return sum(self.output_lens)


def _random_ids(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randint(0, MAX_TOKEN_ID) for _ in range(num_tokens)]


def _mixed(
    name: str, num_requests: int, low: int = 100, high: int = 1024, filters: dict[str, Any] | None = None
) -> Workload:
    """nano-vllm's own bench: each prompt's length, then its ids; after all prompts, every output length."""
    rng = random.Random(0)
    prompts = [_random_ids(rng, rng.randint(low, high)) for _ in range(num_requests)]
    output_lens = [rng.randint(low, high) for _ in range(num_requests)]
    return Workload(name, prompts, output_lens, {"temperature": TEMPERATURE, **(filters or {})})


def _uniform(name: str, num_requests: int, prompt_len: int, output_len: int) -> Workload:
    rng = random.Random(0)
    prompts = [_random_ids(rng, prompt_len) for _ in range(num_requests)]
    return Workload(name, prompts, [output_len] * num_requests)


def _shared(name: str, num_prompts: int = 64, num_samples: int = 8, common: int = 2048, own: int = 128) -> Workload:
    """Samples of one prompt are requests of their own and stand side by side: sharing is for the engine to find."""
    rng = random.Random(0)
    common_ids = _random_ids(rng, common)
    prompts = [common_ids + _random_ids(rng, own) for _ in range(num_prompts)]
    groups = [(common, num_prompts * num_samples)] + [(own, num_samples)] * num_prompts
    repeated = [list(prompt) for prompt in prompts for _ in range(num_samples)]
    return Workload(name, repeated, [256] * len(repeated), groups=groups)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mixed256": lambda: _mixed("mixed256", 256),
    "mixed1024": lambda: _mixed("mixed1024", 1024),
    "mixed2048": lambda: _mixed("mixed2048", 2048),
    "mixed4096": lambda: _mixed("mixed4096", 4096),
    "mixed8192": lambda: _mixed("mixed8192", 8192),
    "mixed256+kp": lambda: _mixed("mixed256+kp", 256, filters=QWEN3_FILTERS),
    "prefill": lambda: _uniform("prefill", 128, 4096, 1),
    "long": lambda: _uniform("long", 64, 7900, 256),
    "shared": lambda: _shared("shared"),
    "single": lambda: _uniform("single", 1, 128, 512),
    "smoke": lambda: _mixed("smoke", 8, low=4, high=24),  # does the benchmark itself work; no speed to speak of
}
CHAT_WORKLOAD = "chat32"  # needs a tokenizer with a chat template: `chat_workload`
WORKLOAD_NAMES = [*WORKLOADS, CHAT_WORKLOAD]


def make_workload(name: str, vocab_size: int, tokenizer: Any = None) -> Workload:
    """Draw the workload `name`. Ids wrap around in a vocabulary smaller than the draw's (tests' tiny models).

    Raises ValueError for an unknown name, and for chat32 without a tokenizer that has a chat template.
    """
    if name == CHAT_WORKLOAD:
        return chat_workload(tokenizer)
    if name not in WORKLOADS:
        raise ValueError(f"workload must be one of {', '.join(WORKLOAD_NAMES)}, got {name!r}")
    workload = WORKLOADS[name]()
    if vocab_size > MAX_TOKEN_ID:
        return workload
    prompts = [[token_id % vocab_size for token_id in prompt] for prompt in workload.prompts]
    return Workload(workload.name, prompts, workload.output_lens, workload.sampling, workload.groups)


def chat_workload(tokenizer: Any, num_requests: int = 32, max_prompt_len: int = 300) -> Workload:
    """Chat prompts of mixed length, real text through the tokenizer's chat template; outputs of 16 to 256 tokens.

    A prompt is a question, most with some sentences of context before it; context is dropped from the end until the
    prompt fits `max_prompt_len` tokens.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(f"workload {CHAT_WORKLOAD} needs a tokenizer with a chat template")
    rng = random.Random(0)
    prompts = []
    for index in range(num_requests):
        question = QUESTIONS[index % len(QUESTIONS)]
        sentences = rng.sample(SENTENCES, rng.randint(0, len(SENTENCES)))
        while True:
            content = " ".join([*sentences, question])
            messages = [{"role": "user", "content": content}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            token_ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            if len(token_ids) <= max_prompt_len or not sentences:
                break
            sentences.pop()
        prompts.append(token_ids)
    output_lens = [rng.randint(16, 256) for _ in range(num_requests)]
    return Workload(CHAT_WORKLOAD, prompts, output_lens)


def warmup_workloads(workload: Workload, vocab_size: int, max_model_len: int) -> list[Workload]:
    """What runs before the clock starts, so that kernels are compiled and memory pools grown: two small calls.

    The first packs a step with prompts as long as the workload's longest and decodes short ones beside them; the
    second extends a prompt of the first, so that an engine with a prefix cache also meets its cached-prefix kernels.
    The ids are not the workload's, so nothing of it is in the cache.
    """
    rng = random.Random(1)
    output_len = min(16, max(workload.output_lens), max_model_len // 4)
    tail_len = min(40, max_model_len // 4)
    longest = max(1, min(max(workload.prompt_lens), max_model_len - output_len - tail_len - 1))
    num_long = max(1, min(len(workload.prompts) // 2, 16_384 // longest, 4))
    num_short = min(len(workload.prompts), 8)

    def ids(num_tokens: int) -> list[int]:
        return [rng.randint(0, min(vocab_size - 1, MAX_TOKEN_ID)) for _ in range(num_tokens)]

    prompts = [ids(longest) for _ in range(num_long)] + [ids(min(64, longest)) for _ in range(num_short)]
    first = Workload("warmup", prompts, [output_len] * len(prompts), workload.sampling)
    extended = [prompts[0] + ids(tail_len), prompts[-1]]
    return [first, Workload("warmup", extended, [output_len] * 2, workload.sampling)]


QUESTIONS = [
    "What is the capital of France?",
    "Summarise this in two sentences.",
    "Explain it to a ten-year-old.",
    "Which single fact here matters most, and why?",
    "Write a short poem about it.",
    "List three questions that a careful reader would ask.",
    "What would you do next? Answer step by step.",
    "Translate the main idea into plain words, without jargon.",
    "How do plants turn light into sugar?",
    "Write an email to a colleague that passes this on, friendly and short.",
    "What is the difference between a list and a tuple in Python?",
    "Give a title for this text and say why you chose it.",
    "Argue against the text in one paragraph.",
    "Why is the sky blue during the day and red in the evening?",
    "Write a Python function that returns the n-th Fibonacci number, and explain its running time.",
    "Name a book that someone who enjoyed this would like.",
]

SENTENCES = [
    "The library at the end of the street opens at nine and closes when the last reader has left.",
    "Bread rises because yeast eats sugar and gives off a gas, which the dough holds in many small bubbles.",
    "A river that runs straight for long is rare: any small bend slows the inner bank and grows with every flood.",
    "The committee met for three hours, agreed on the budget, and left the question of the new roof for spring.",
    "Sound travels about four times faster in water than in air, so a diver cannot tell where it comes from.",
    "My grandmother kept her letters in a biscuit tin, sorted not by date but by how often she wanted to read them.",
    "The first computers filled a room, and the people who ran them knew each fault by its smell.",
    "Migrating birds find their way by the sun, by the stars and by the magnetic field, and check one by another.",
    "To reset the device, hold both buttons for ten seconds until the light blinks twice, then let go.",
    "Prices rose by two percent over the year, mostly in rents, while food became a little cheaper.",
    "A proof is a story in which every sentence follows from those before it, and the last one is a surprise.",
    "The train to the coast leaves from platform four; passengers for the islands change at the harbour.",
]
