"""The rarer sampling: every rule of a request against a plain oracle on transformers' logits, alone and in company."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.sampling import sample_reference
from nanovllm.layers.sampler import Sampler
from nanovllm.messages import NewRow, SchedulerOutput
from nanovllm.worker import logits as logits_module
from nanovllm.worker.persistent_batch import PersistentBatch
from tests.reference import reference_logits
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

NUM_TOKENS = 14
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
NEVER = float("-inf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=True)


def engine(folder, **options) -> LLM:
    defaults = dict(dtype="float32", device="cpu", max_model_len=128, kvcache_block_size=8)
    return LLM(folder, **(defaults | options))


@pytest.fixture(scope="module")
def llm(folder):
    with engine(folder) as llm:
        yield llm


def generated(llm: LLM, prompts, params) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 60) for _ in range(rng.choice([1, 7, 8, 9, 20]))] for _ in range(count)]


# ---- the oracle -----------------------------------------------------------------------------------------------------


def word_ids(tokenizer, params: SamplingParams) -> list[list[int]]:
    words = [space + word.lstrip() for word in params.bad_words or () for space in ("", " ")]
    return [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]


def edited(logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams, words) -> torch.Tensor:
    """`logits` [V] as the request's rules leave them, one token at a time."""
    x = logits.tolist()
    for token_id in range(len(x)):
        banned = params.allowed_token_ids is not None and token_id not in params.allowed_token_ids
        banned |= len(output) < params.min_tokens and token_id in (params.stop_token_ids or ())
        for word in words:
            prefix = word[:-1]
            banned |= word[-1] == token_id and output[len(output) - len(prefix) :] == prefix
        if banned:
            x[token_id] = NEVER
        x[token_id] += (params.logit_bias or {}).get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            r = params.repetition_penalty
            x[token_id] = x[token_id] / r if x[token_id] > 0 else x[token_id] * r
        count = output.count(token_id)
        x[token_id] -= params.frequency_penalty * count
        x[token_id] -= params.presence_penalty * (count > 0)
    return torch.tensor(x)


def oracle(folder, prompt: list[int], params: SamplingParams, words=()) -> list[int]:
    """The tokens that the request must give, from transformers' logits alone."""
    output: list[int] = []
    row = torch.zeros(1, dtype=torch.int32)
    for _ in range(params.max_tokens or 0):
        x = edited(reference_logits(folder, prompt + output)[-1], prompt, output, params, words)
        settings = dict(temperature=params.temperature, top_p=params.top_p, min_p=params.min_p)
        floats = {name: torch.tensor([value]) for name, value in settings.items()}
        top_k = torch.tensor([max(0, params.top_k)], dtype=torch.int32)
        seeds = torch.tensor([[params.seed or 0, 0]], dtype=torch.int32)
        position = torch.tensor([len(prompt) + len(output)], dtype=torch.int32)
        output.append(int(sample_reference(x[None], row, top_k=top_k, seeds=seeds, num_tokens=position, **floats)[0]))
        if output[-1] in (params.stop_token_ids or ()):
            break
    return output


RULES = {
    "repetition": dict(repetition_penalty=1.5),
    "repetition-below-1": dict(repetition_penalty=0.8),
    "presence": dict(presence_penalty=2.0),
    "presence-negative": dict(presence_penalty=-1.5),
    "frequency": dict(frequency_penalty=1.25),
    "frequency-negative": dict(frequency_penalty=-0.5),
    "all-penalties": dict(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.75),
    "bias": dict(logit_bias={7: 3.5, 200: -2.0, 31: NEVER}),
    "bias-and-repetition": dict(logit_bias={i: i % 5 - 2.0 for i in range(0, 320, 3)}, repetition_penalty=1.3),
    "allowed": dict(allowed_token_ids=list(range(10, 200, 7))),
    "allowed-others": dict(allowed_token_ids=[5, 6, 319], frequency_penalty=0.5),
    "bad-words": dict(bad_words=["a", " the", "e", "fox jumps", "Paris"]),
    "held-back": dict(stop_token_ids=list(range(0, 320, 2)), min_tokens=6),
    "held-back-and-penalty": dict(stop_token_ids=list(range(1, 320, 2)), min_tokens=4, presence_penalty=1.0),
    "sampled": dict(temperature=1.0, seed=5, frequency_penalty=1.0, repetition_penalty=1.1),
    "sampled-and-filtered": dict(temperature=0.8, seed=9, top_k=20, top_p=0.9, presence_penalty=1.5, bad_words=["dog"]),
    "nothing": dict(),
    "nothing-sampled": dict(temperature=1.0, seed=3, top_p=0.9),
}
PARAMS = [replace(GREEDY, **rules) for rules in RULES.values()]
PROMPTS = prompts(len(RULES))


@pytest.fixture(scope="module")
def expected(folder, llm) -> list[list[int]]:
    return [
        oracle(folder, prompt, params, word_ids(llm.tokenizer, params))
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


def test_alone_and_in_company_equal_the_oracle(llm, expected):
    """Rows that ask for nothing are among them: they get what they get alone."""
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert generated(llm, PROMPTS, PARAMS) == expected
    for prompt, params, tokens in zip(PROMPTS, PARAMS, expected, strict=True):
        assert generated(llm, [prompt], params) == [tokens]


@pytest.mark.parametrize(
    "options",
    [
        dict(max_num_batched_tokens=9),
        dict(max_in_flight=2, max_num_seqs=5),
        dict(max_in_flight=3, num_kvcache_blocks=12),
        dict(enable_prefix_caching=False, max_num_seqs=1),
    ],
    ids=str,
)
def test_no_schedule_changes_them(folder, expected, options):
    with engine(folder, **options) as llm:
        for _ in range(2):
            assert generated(llm, PROMPTS, PARAMS) == expected


def test_preempted_rows_count_what_they_had(folder):
    """A resumed row's output counts as output, not as prompt, and holds its end ids back no longer than before."""
    rules = replace(GREEDY, max_tokens=40, frequency_penalty=0.6, stop_token_ids=[300], min_tokens=30)
    starts = [[10 + i] * 9 for i in range(6)]
    with engine(folder) as llm:
        alone = [generated(llm, [prompt], rules)[0] for prompt in starts]
    with engine(folder, num_kvcache_blocks=14, max_in_flight=2) as llm:
        llm.generate([[5]] * 200, SamplingParams(max_tokens=64, stop_token_ids=list(range(320))), False)
        assert generated(llm, starts, rules) == alone
        assert llm.stats()["preemptions"] > 0


@pytest.mark.parametrize("num_rows", [1, 3])
def test_pieces_change_nothing(folder, expected, monkeypatch, num_rows):
    monkeypatch.setattr(logits_module, "PIECE_ELEMENTS", num_rows * VOCAB_SIZE)
    with engine(folder) as llm:
        assert generated(llm, PROMPTS, PARAMS) == expected


def test_index_tensors_are_made_once_for_a_steady_batch(folder, monkeypatch):
    made = 0
    original = logits_module.to_device

    def counting(*args):
        nonlocal made
        made += 1
        return original(*args)

    monkeypatch.setattr(logits_module, "to_device", counting)
    rules = replace(GREEDY, max_tokens=60, repetition_penalty=1.2, logit_bias={5: 1.0}, bad_words=["fox"])
    with engine(folder) as llm:
        llm.generate([[7, 8]] * 4, [replace(rules, max_tokens=2)] * 4, use_tqdm=False)
        few = made
        llm.generate([[7, 8]] * 4, rules, use_tqdm=False)
        assert made - few <= 2 * few
        made = 0
        llm.generate([[7, 8]] * 4, GREEDY, use_tqdm=False)
        assert made == 0


@pytest.mark.parametrize("rules", [[0, 1, 2], [1], []], ids=str)
def test_padding_of_a_graph_is_left_alone(rules):
    """A replayed graph's logits have rows behind the plan's own, all of device row 0."""
    batch = PersistentBatch(7, 32, 2, torch.device("cpu"), 2)
    asking = replace(GREEDY, temperature=1.0, repetition_penalty=1.5, logit_bias={3: 2.0}, allowed_token_ids=range(90))
    held = replace(GREEDY, min_tokens=3)
    new_rows = [
        NewRow(row, [5, 6, row], 2, 2, [1, 2], asking if index in rules else held, seed=row, end_ids=(7, 9))
        for index, row in enumerate([3, 1, 5])
    ]
    plan = SchedulerOutput(0, [3, 1, 5], [1, 1, 1], 3, 3, new_rows=new_rows)
    batch.apply(plan, 8)
    logits = torch.randn(8, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    results = []
    for size in (3, 8):
        edits = logits_module.LogitsEdits(batch, VOCAB_SIZE)
        edits.apply_plan(plan)
        of_step, own = edits.of_step(plan), logits[:size].clone()
        results.append(of_step.sample(own, batch.step_rows[:size], Sampler(VOCAB_SIZE, 7, "cpu"), batch))
        assert torch.equal(own[3:], logits[3:size])
        assert all(torch.equal(own[index], logits[index]) for index in rules)
    assert results[1].shape == (8,) and torch.equal(results[0], results[1][:3])
    assert not set(results[0].tolist()) & {7, 9}


# ---- single rules ---------------------------------------------------------------------------------------------------


def test_bias_forces_and_rules_out(llm):
    assert generated(llm, [[5, 6]], replace(GREEDY, logit_bias={123: 1000.0})) == [[123] * NUM_TOKENS]
    plain = generated(llm, [[5, 6]], GREEDY)[0]
    without = generated(llm, [[5, 6]], replace(GREEDY, logit_bias=dict.fromkeys(plain, NEVER)))[0]
    assert not set(plain) & set(without)
    assert generated(llm, [[5, 6]], replace(GREEDY, logit_bias={})) == [plain]


def test_allowed_token_ids_restrict(llm):
    params = replace(GREEDY, temperature=2.0, max_tokens=30, allowed_token_ids=[9, 11, 250])
    others = replace(params, allowed_token_ids=[9, 12])
    outputs = generated(llm, [[5, 6]] * 20, [params, others] * 10)
    assert {token for tokens in outputs[::2] for token in tokens} == {9, 11, 250}
    assert {token for tokens in outputs[1::2] for token in tokens} == {9, 12}
    assert generated(llm, [[5]], replace(GREEDY, allowed_token_ids=[8])) == [[8] * NUM_TOKENS]


def test_an_end_id_that_is_not_allowed_does_not_come(llm):
    end = llm.engine.limits.eos_token_ids[0]
    params = SamplingParams(temperature=1.0, max_tokens=40, logit_bias={end: 1000.0}, allowed_token_ids=[8, 9])
    assert llm.generate([[5]], params, use_tqdm=False)[0]["finish_reason"] == "length"


def contains(tokens: list[int], word: list[int]) -> bool:
    return any(tokens[i : i + len(word)] == word for i in range(len(tokens) - len(word) + 1))


def test_bad_words_never_appear(llm):
    """Sampled hot over few tokens, so that the words would come up many times."""
    tokenizer = llm.tokenizer
    words = ["fox runs", "the", "dog", "ab"]
    ids = [word_ids(tokenizer, SamplingParams(bad_words=[word])) for word in words]
    assert any(len(word) > 2 for variants in ids for word in variants)
    used = sorted({token for variants in ids for word in variants for token in word})
    hot = SamplingParams(temperature=3.0, max_tokens=60, ignore_eos=True, allowed_token_ids=[*used, 30, 31, 32])
    start = [ids[0][0][:-1]] * 30  # the prompt's end does not count as the beginning of a word
    seeded = [replace(hot, seed=seed) for seed in range(len(start))]
    free = generated(llm, start, seeded)
    bound = generated(llm, start, [replace(params, bad_words=words) for params in seeded])
    for variants in ids:
        for word in variants:
            if len(word) < 3:
                assert any(contains(tokens, word) for tokens in free)
            assert not any(contains(tokens, word) for tokens in bound)
    last = ids[0][0][-1]
    forced = replace(GREEDY, max_tokens=2, logit_bias={last: 500.0}, bad_words=["fox runs"])
    assert generated(llm, [start[0]], forced)[0] == [last, last]


def test_bad_words_need_a_tokenizer(folder):
    with (
        engine(folder, skip_tokenizer_init=True) as llm,
        pytest.raises(ValueError, match="request 0: bad_words need a tokenizer"),
    ):
        llm.generate([[5]], SamplingParams(bad_words=["a"]), use_tqdm=False)


def test_a_row_without_any_token_left_is_an_error_of_its_own(llm):
    params = replace(GREEDY, allowed_token_ids=[8], logit_bias={8: NEVER})
    with pytest.raises(RuntimeError, match="request 1"):
        llm.generate([[5], [6], [7]], [GREEDY, params, GREEDY], use_tqdm=False)
    outputs = llm.generate([[5], [6], [7]], [GREEDY, params, GREEDY], use_tqdm=False, on_error="return")
    assert [output["finish_reason"] for output in outputs] == ["length", "error", "length"]
    assert outputs[1]["token_ids"] == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logit_bias", {VOCAB_SIZE: 1.0}, "logit_bias token id 320 is outside the vocabulary"),
        ("allowed_token_ids", [3, 400], "allowed token id 400 is outside the vocabulary"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(llm, field, value, message):
    with pytest.raises(ValueError, match=f"request 1: {message}: ids are 0 to 319"):
        llm.generate([[5], [5]], [GREEDY, SamplingParams(**{field: value})], use_tqdm=False)
    assert llm.is_finished()


# ---- greedy, temperature and seeds in company -----------------------------------------------------------------------


def test_greedy_is_the_argmax_in_any_company(folder, llm):
    prompt = PROMPTS[4]
    argmax = oracle(folder, prompt, GREEDY)
    assert generated(llm, [prompt] * 20, GREEDY) == [argmax] * 20
    hot = replace(GREEDY, temperature=1.5)
    outputs = generated(llm, [prompt] * 20, [GREEDY, hot] * 10)
    assert outputs[::2] == [argmax] * 10
    assert len({tuple(tokens) for tokens in outputs[1::2]}) == 10


def test_low_temperatures(folder, llm):
    """Up to 1e-5 greedy; at 1e-3 another token than the argmax only where the two are nearly equal."""
    for prompt in PROMPTS[:6]:
        argmax = oracle(folder, prompt, GREEDY)
        for temperature in (1e-8, 1e-6, 1e-5):
            assert generated(llm, [prompt], replace(GREEDY, temperature=temperature)) == [argmax]
        tokens = generated(llm, [prompt], replace(GREEDY, temperature=1e-3, seed=1))[0]
        logits = reference_logits(folder, prompt + tokens)[len(prompt) - 1 : -1]
        gaps = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert gaps.max() < 0.03


def test_a_seed_repeats_beside_one_without(llm):
    seeded, unseeded = replace(GREEDY, temperature=1.0, seed=7), replace(GREEDY, temperature=1.0)
    alone = [generated(llm, [[5, 6]], seeded)[0] for _ in range(4)]
    beside = [generated(llm, [[5, 6], [5, 6]], [unseeded, seeded]) for _ in range(4)]
    assert {tuple(tokens) for tokens in alone} == {tuple(tokens) for _, tokens in beside}
    assert len({tuple(tokens) for tokens in alone}) == 1
    assert len({tuple(tokens) for tokens, _ in beside}) == 4


# ---- what the constructor takes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 3),
        ("frequency_penalty", float("nan")),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", {5: float("inf")}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", [""]),
        ("bad_words", ["a", " "]),
        ("logprobs", -2),
        ("prompt_logprobs", -5),
    ],
)
def test_out_of_range(field, value):
    with pytest.raises(ValueError, match=f"{field} must"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", "1"),
        ("presence_penalty", None),
        ("logit_bias", [5]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: "1"}),
        ("allowed_token_ids", "5"),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", ["5"]),
        ("bad_words", "word"),
        ("bad_words", [5]),
        ("logprobs", True),
        ("logprobs", 1.0),
        ("prompt_logprobs", "all"),
    ],
)
def test_wrong_types(field, value):
    with pytest.raises(TypeError, match=field):
        SamplingParams(**{field: value})


def test_edges_are_accepted_and_kept_apart_from_the_caller():
    ids, bias = [3, 4], {5: 1}
    params = SamplingParams(
        repetition_penalty=0.01, presence_penalty=-2, frequency_penalty=2, logit_bias=bias, allowed_token_ids=ids,
        bad_words=[], logprobs=-1, prompt_logprobs=0,
    )  # fmt: skip
    ids.append(7)
    bias[9] = 2.0
    assert params.allowed_token_ids == (3, 4) and params.logit_bias == {5: 1.0} and params.bad_words == ()
    assert hash(params) == hash(replace(params)) and params == replace(params)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu(seconds=12)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_gpu_equals_the_oracle(folder, expected, enforce_eager):
    options = dict(device="cuda", num_kvcache_blocks=400, max_num_seqs=32, kvcache_block_size=None)
    with engine(folder, enforce_eager=enforce_eager, **options) as llm:
        for _ in range(2):
            assert generated(llm, PROMPTS, PARAMS) == expected
        assert generated(llm, PROMPTS[:3], PARAMS[:3]) == expected[:3]  # a padded graph


@pytest.mark.gpu(seconds=12)
def test_gpu_steps_wait_for_nothing(folder):
    """With rules and logprobs: no call of a step synchronises, once its kernels are compiled."""
    params = [replace(params, logprobs=2, prompt_logprobs=1) for params in PARAMS]
    options = dict(device="cuda", num_kvcache_blocks=400, max_num_seqs=32, kvcache_block_size=None)
    with engine(folder, **options) as llm:
        llm.generate(PROMPTS, params, use_tqdm=False)
        submit = llm.engine.executor.submit

        def watched(plan):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return submit(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        llm.engine.executor.submit = watched
        llm.generate(PROMPTS, params, use_tqdm=False)
