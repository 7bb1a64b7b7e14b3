"""Answer a few questions in one batch: `python example.py [--model FOLDER]`.

Without --model it gets SmolLM2-135M-Instruct (93 MB, once). Runs on the GPU where there is one, else on the CPU.
"""

from __future__ import annotations

import argparse
import time

from nanovllm import LLM, SamplingParams
from nanovllm.entrypoints.smollm2 import get_smollm2

QUESTIONS = [
    "What is the capital of France?",
    "Introduce yourself in one sentence.",
    "Name three colours of the rainbow.",
    "Write a short poem about the sea.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer a few questions in one batch.")
    parser.add_argument("--model", help="folder of a chat model; by default SmolLM2-135M-Instruct is downloaded")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer, in tokens")
    args = parser.parse_args()

    with LLM(args.model or get_smollm2(), max_model_len=2048) as llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        start = time.perf_counter()
        outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=args.max_tokens))
        seconds = time.perf_counter() - start
        where = f"{llm.config.device}, {llm.config.dtype}"

    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"\nPrompt:     {question}\nCompletion: {output['text'].strip()}\nFinished:   {output['finish_reason']}")
    num_tokens = sum(len(output["token_ids"]) for output in outputs)
    speed = f"{num_tokens / seconds:.0f} tokens/s ({where})"
    print(f"\n{len(outputs)} answers, {num_tokens} tokens in {seconds:.2f} s: {speed}")


if __name__ == "__main__":
    main()
