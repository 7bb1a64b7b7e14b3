"""A training loop around the engine: `python examples/rollout.py [--model FOLDER] [--steps N]`.

Each round samples several answers to every prompt, scores them, takes one step of policy gradient on the model, and
gives the engine the new weights. Engine and trainer share one device, one after the other: the engine sleeps while the
trainer works. The reward is a toy (answers are to do without the letter "e"), so that a few rounds show it rise.

Without --model it gets SmolLM2-135M-Instruct (93 MB, once). Runs on the GPU where there is one, else on the CPU, where
three rounds take a few minutes.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.entrypoints.smollm2 import get_smollm2

QUESTIONS = [
    "Describe the sea in one sentence.",
    "What do dogs like?",
    "Name some animals.",
    "How do you make tea?",
]
MICRO_BATCH = 4  # samples in one backward pass: bounds the trainer's memory


def reward_of(text: str) -> float:
    """Toy reward: minus the share of an answer's letters that are an "e" (about 0.12 in English); silence is worst."""
    letters = [letter for letter in text.lower() if letter.isalpha()]
    return -letters.count("e") / len(letters) if letters else -1.0


def advantages_of(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards [prompts, samples] relative to the other samples of their prompt (GRPO, arXiv:2402.03300)."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def train(policy: torch.nn.Module, outputs: list[RequestOutput], rewards: torch.Tensor, device: str, lr: float) -> None:
    """One step of plain policy gradient: make samples that did better than the others of their prompt likelier."""
    policy.to(device).train()
    samples = [(output.prompt_token_ids, c.token_ids) for output in outputs for c in output.outputs]
    weights = advantages_of(rewards).flatten()
    num_tokens = sum(len(answer) for _, answer in samples)
    for start in range(0, len(samples), MICRO_BATCH):
        batch = samples[start : start + MICRO_BATCH]
        longest = max(len(prompt) + len(answer) for prompt, answer in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        is_answer = torch.zeros(len(batch), longest)
        for row, (prompt, answer) in enumerate(batch):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            is_answer[row, len(prompt) : len(prompt) + len(answer)] = 1.0
        ids, is_answer = ids.to(device), is_answer.to(device)
        # padding stands behind the answers, where a causal model's earlier tokens do not see it
        logits = policy(ids).logits[:, :-1].float()  # [B, L - 1, V]
        nll = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")  # [B * (L - 1)]
        weight = weights[start : start + len(batch), None].to(device) * is_answer[:, 1:]  # [B, L - 1]
        (weight.flatten() * nll).sum().div(num_tokens).backward()
    with torch.no_grad():
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        for parameter in policy.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad.sign()  # any optimizer of yours; this one has no state
                parameter.grad = None
    policy.to("cpu").eval()  # out of the way before the engine wakes up


def main() -> None:
    parser = argparse.ArgumentParser(description="Sample, score, train, update the weights, again.")
    parser.add_argument("--model", help="folder of a chat model; by default SmolLM2-135M-Instruct is downloaded")
    parser.add_argument("--steps", type=int, default=3, help="rounds of sampling and training")
    parser.add_argument("--samples", type=int, default=4, help="answers to each question")
    parser.add_argument("--max-tokens", type=int, default=24, help="longest answer, in tokens")
    parser.add_argument("--lr", type=float, default=1e-4, help="step of each weight")
    args = parser.parse_args()

    folder = args.model or get_smollm2()
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with LLM(folder, max_model_len=512, max_num_seqs=64, max_num_batched_tokens=4096, dtype="float32") as llm:
        device = llm.config.device
        tokenizer = llm.get_tokenizer()
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
            for question in QUESTIONS
        ]
        for step in range(args.steps + 1):
            start = time.perf_counter()
            params = SamplingParams(n=args.samples, temperature=1.0, seed=step, max_tokens=args.max_tokens)
            outputs = llm.generate(prompts, params, use_tqdm=False)  # each prompt is computed once
            rewards = torch.tensor([[reward_of(c.text) for c in output.outputs] for output in outputs])
            sampled = time.perf_counter()
            print(f"step {step}: mean reward {rewards.mean():.3f}, sampled in {sampled - start:.1f} s")
            print(f"  {QUESTIONS[0]} -> {outputs[0]['text'].strip()!r}")
            if step == args.steps:
                break
            llm.sleep(level=2)  # weights, KV cache and graphs leave the device; new weights come anyway
            train(policy, outputs, rewards, device, args.lr)
            trained = time.perf_counter()
            llm.wake_up()
            llm.update_weights(policy.named_parameters())  # in the engine's dtype, tensor by tensor; drops cached KV
            print(f"  trained in {trained - sampled:.1f} s, engine back after {time.perf_counter() - trained:.1f} s")


if __name__ == "__main__":
    main()
