"""Logprobs of outputs and prompts: what transformers' log_softmax says, however the work is scheduled."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import Logprob, RequestOutput
from nanovllm.worker import logprobs as logprobs_module
from nanovllm.worker.logprobs import compute_logprobs, most_probable
from tests.reference import load_reference, reference_logits
from tests.test_penalties import PROMPTS
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
BLOCK_SIZE = 8
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=True)


def engine(folder, **options) -> LLM:
    defaults = dict(dtype="float32", device="cpu", max_model_len=128, kvcache_block_size=BLOCK_SIZE)
    return LLM(folder, **(defaults | options))


@pytest.fixture(scope="module")
def llm(folder):
    with engine(folder) as llm:
        yield llm


def check_positions(positions, logits: torch.Tensor, token_ids: list[int], num_top: int, tolerance=TOLERANCE) -> None:
    """`positions` against the log-softmax of reference logits [n, V] that predict `token_ids`."""
    assert len(positions) == len(token_ids) == len(logits)
    exact = logits.log_softmax(-1)
    num_top = len(exact[0]) if num_top < 0 else num_top
    for position, row, token_id in zip(positions, exact, token_ids, strict=True):
        assert next(iter(position)) == token_id
        assert len(position) == num_top + (position[token_id].rank > num_top)
        last = row.topk(num_top).values.min() if num_top else float("inf")
        for some_id, entry in position.items():
            assert some_id == token_id or row[some_id] > last - tolerance
            assert abs(entry.logprob - row[some_id].item()) < tolerance
            best, worst = (1 + int((row > row[some_id] + nearly).sum()) for nearly in (tolerance, -tolerance))
            assert best <= entry.rank <= worst


def check_output(folder, output: RequestOutput, params: SamplingParams) -> None:
    """Both kinds of logprobs of one result, if asked for, against a reference forward of its tokens."""
    prompt, tokens = output.prompt_token_ids, output["token_ids"]
    logits = reference_logits(folder, prompt + tokens)
    if params.logprobs is not None:
        check_positions(output["logprobs"], logits[len(prompt) - 1 : -1], tokens, params.logprobs)
        chosen = [position[token].logprob for position, token in zip(output["logprobs"], tokens, strict=True)]
        assert output["cumulative_logprob"] == pytest.approx(sum(chosen), abs=1e-6)
    else:
        assert output["logprobs"] is None and output["cumulative_logprob"] is None
    if params.prompt_logprobs is not None:
        assert output.prompt_logprobs[0] is None
        check_positions(output.prompt_logprobs[1:], logits[: len(prompt) - 1], prompt[1:], params.prompt_logprobs)
    else:
        assert output.prompt_logprobs is None


KINDS = [
    GREEDY,
    replace(GREEDY, logprobs=0, prompt_logprobs=2),
    replace(GREEDY, logprobs=None),
    replace(GREEDY, logprobs=None, prompt_logprobs=0),
    replace(GREEDY, logprobs=5, temperature=1.0, seed=3, top_p=0.9),
    replace(GREEDY, logprobs=1, prompt_logprobs=5, temperature=1.0, seed=4, repetition_penalty=1.5),
    replace(GREEDY, logprobs=4, stop_token_ids=list(range(0, VOCAB_SIZE, 2)), min_tokens=5),
    replace(GREEDY, logprobs=2, logit_bias={5: 50.0}, stop_token_ids=[5], min_tokens=4),
    replace(GREEDY, logprobs=2, presence_penalty=1.5, allowed_token_ids=list(range(5, 60)), bad_words=["fox"]),
]
ALL_PARAMS = [KINDS[i % len(KINDS)] for i in range(len(PROMPTS))]


def test_equal_transformers(folder, llm):
    outputs = llm.generate(PROMPTS, ALL_PARAMS, use_tqdm=False)
    for output, params in zip(outputs, ALL_PARAMS, strict=True):
        check_output(folder, output, params)
    for prompt, params in zip(PROMPTS[:8], ALL_PARAMS, strict=False):
        check_output(folder, llm.generate(prompt, params, use_tqdm=False)[0], params)


@pytest.mark.parametrize(
    "options",
    [
        dict(max_num_batched_tokens=5),
        dict(max_num_batched_tokens=13, max_in_flight=2),
        dict(max_in_flight=3, max_num_seqs=4, num_kvcache_blocks=10),
        dict(enable_prefix_caching=False, max_num_seqs=1),
    ],
    ids=str,
)
def test_no_schedule_changes_them(folder, options):
    with engine(folder, **options) as llm:
        for _ in range(2):  # the second time from cached prefixes, where they may be read
            outputs = llm.generate(PROMPTS, ALL_PARAMS, use_tqdm=False)
            for output, params in zip(outputs, ALL_PARAMS, strict=True):
                check_output(folder, output, params)


@pytest.mark.parametrize("budget", [6, 64])
def test_a_preempted_request_has_each_logprob_once(folder, budget):
    params = replace(GREEDY, max_tokens=40, prompt_logprobs=1, stop_token_ids=[300])
    prompts = [[10 + i] * 9 for i in range(6)]
    with engine(folder, num_kvcache_blocks=14, max_in_flight=2, max_num_batched_tokens=budget) as llm:
        llm.generate([[5]] * 200, SamplingParams(max_tokens=64, stop_token_ids=list(range(320))), False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats()["preemptions"] > 0
    for output in outputs:
        check_output(folder, output, params)


def test_temperature_and_rules_leave_them_raw(folder, llm):
    """top_k=1 gives the same tokens at any temperature."""
    params = [replace(GREEDY, temperature=temperature, top_k=1) for temperature in (0.5, 1.5)]
    cool, hot = llm.generate([PROMPTS[4]] * 2, params, use_tqdm=False)
    assert cool["token_ids"] == hot["token_ids"]
    check_output(folder, cool, params[0])
    check_output(folder, hot, params[1])  # not equal to the last bit: one may have read the other's prefix
    ruled = replace(GREEDY, logit_bias={77: 1000.0}, frequency_penalty=0.5)
    output = llm.generate([PROMPTS[4]], ruled, use_tqdm=False)[0]
    assert output["token_ids"] == [77] * NUM_TOKENS
    check_output(folder, output, ruled)


@pytest.mark.parametrize("length", [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 30])
def test_prompt_logprobs_twice(folder, length):
    """They are whole the second time too; what they left in the prefix cache serves others."""
    prompt = [(7 * i) % 200 + 3 for i in range(length)]
    params = replace(GREEDY, prompt_logprobs=2)
    with engine(folder) as llm:
        first = llm.generate(prompt, params, use_tqdm=False)[0]
        second = llm.generate(prompt, params, use_tqdm=False)[0]
        assert len(first.prompt_logprobs) == length
        check_output(folder, first, params)
        assert second.prompt_logprobs == first.prompt_logprobs and second["logprobs"] == first["logprobs"]
        assert second.num_cached_tokens == 0
        plain = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
        assert plain.num_cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert plain["token_ids"] == first["token_ids"]


def test_all_alternatives(folder, llm):
    params = replace(GREEDY, max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    more = replace(params, logprobs=VOCAB_SIZE + 1, prompt_logprobs=VOCAB_SIZE)
    outputs = llm.generate([[5, 6, 7]] * 2, [params, more], use_tqdm=False)
    check_output(folder, outputs[0], params)
    assert len(outputs[0]["logprobs"][0]) == VOCAB_SIZE
    assert outputs[1].prompt_logprobs == outputs[0].prompt_logprobs
    assert math.isclose(sum(math.exp(entry.logprob) for entry in outputs[0]["logprobs"][0].values()), 1, abs_tol=1e-5)


def test_pieces_change_nothing(folder, monkeypatch):
    monkeypatch.setattr(logprobs_module, "PROMPT_ELEMENTS", 3 * VOCAB_SIZE)
    monkeypatch.setattr(logprobs_module, "TOP_ELEMENTS", 2 * VOCAB_SIZE)
    with engine(folder) as llm:
        outputs = llm.generate(PROMPTS, ALL_PARAMS, use_tqdm=False)
    for output, params in zip(outputs, ALL_PARAMS, strict=True):
        check_output(folder, output, params)


def test_nothing_is_computed_that_nobody_asked_for(llm, monkeypatch):
    def fail(*_):
        raise AssertionError("logprobs were computed")

    monkeypatch.setattr(logprobs_module, "compute_logprobs", fail)
    output = llm.generate(PROMPTS[:3], replace(GREEDY, logprobs=None), use_tqdm=False)[0]
    assert (output["logprobs"], output["cumulative_logprob"], output.prompt_logprobs) == (None, None, None)


# ---- what else touches a result -------------------------------------------------------------------------------------


def test_samples_of_one_prompt(folder, llm):
    params = replace(GREEDY, temperature=1.0, seed=1, n=3, prompt_logprobs=1)
    for prompt in (PROMPTS[4], [9] * 20):
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        logits = [reference_logits(folder, prompt + list(sample.token_ids)) for sample in output.outputs]
        for sample, rows in zip(output.outputs, logits, strict=True):
            check_positions(sample.logprobs, rows[len(prompt) - 1 : -1], sample.token_ids, 3)
        assert output.prompt_logprobs[0] is None
        check_positions(output.prompt_logprobs[1:], logits[0][: len(prompt) - 1], prompt[1:], 1)


def test_a_stop_ends_both_lists_alike(llm):
    free = llm.generate(PROMPTS[4], GREEDY, use_tqdm=False)[0]
    stop = replace(GREEDY, stop_token_ids=[free["token_ids"][4]])
    output = llm.generate(PROMPTS[4], stop, use_tqdm=False)[0]
    assert output["finish_reason"] == "stop" and len(output["logprobs"]) == len(output["token_ids"]) < NUM_TOKENS


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("place", ["submit", "_collect", "update", "schedule", "process", "collect_logprobs"])
@pytest.mark.parametrize("failing_call", [2, 4, 6])
def test_they_stay_with_a_request_that_outlives_an_exception(folder, monkeypatch, interrupt, place, failing_call):
    params = replace(GREEDY, prompt_logprobs=1)
    with engine(folder, max_num_batched_tokens=6, max_in_flight=2) as llm:
        survivor = llm.add_request(PROMPTS[4], params)
        owners = {
            "submit": llm.engine.executor,
            "_collect": llm.engine,
            "update": llm.engine.scheduler,
            "schedule": llm.engine.scheduler,
            "process": llm.engine.output_processor,
        }
        owner = owners.get(place)
        original = getattr(owner, place) if owner is not None else None
        if original is None:
            import nanovllm.engine.llm_engine as owner

            original = owner.collect_logprobs
        calls = 0

        def failing(*args, **kwargs):
            nonlocal calls
            calls += 1
            if place == "collect_logprobs":
                original(*args, **kwargs)  # the worst moment: taken, but not yet the tokens
            if calls == failing_call:
                raise interrupt("planted")
            return None if place == "collect_logprobs" else original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, place, failing)
            # a step of the survivor alone is its own fault
            is_its_own = failing_call == 2 and interrupt is RuntimeError and place != "schedule"
            with nullcontext() if is_its_own else pytest.raises(interrupt, match="planted"):
                llm.generate([[5, 6, 7]] * 2, params, use_tqdm=False)
        outputs = []
        while not llm.is_finished():
            outputs += llm.step()
    assert [output.request_id for output in outputs] == [survivor]
    if is_its_own:
        assert outputs[0].error == "it was lost to RuntimeError('planted')"
    else:
        check_output(folder, outputs[0], params)


def test_decoded_tokens(folder, llm):
    params = replace(GREEDY, prompt_logprobs=1)
    output = llm.generate("the fox runs", params, use_tqdm=False)[0]
    for position in [*output.prompt_logprobs[1:], *output["logprobs"]]:
        for token_id, entry in position.items():
            assert entry.decoded_token == llm.tokenizer.decode([token_id])
    top = VOCAB_SIZE - 1  # beyond the tokenizer
    beyond = llm.generate([[5, top]], params, use_tqdm=False)[0]
    assert beyond.prompt_logprobs[1][top].decoded_token == ""
    silent = llm.generate([[5, 6]], replace(params, detokenize=False), use_tqdm=False)[0]
    assert {entry.decoded_token for entry in silent["logprobs"][0].values()} == {None}
    with engine(folder, skip_tokenizer_init=True) as without:
        output = without.generate([[5, 6]], params, use_tqdm=False)[0]
        assert {entry.decoded_token for entry in output.prompt_logprobs[1].values()} == {None}
        check_output(folder, output, params)


def test_a_row_that_is_not_finite_keeps_what_came_before(folder):
    params = replace(GREEDY, prompt_logprobs=1)
    with engine(folder) as llm:
        runner = llm.engine.executor.runner
        good = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]
        broken = llm.add_request([5, 6, 7], params)
        for _ in range(3):
            llm.step()
        with torch.no_grad():
            runner.model.lm_head.weight.fill_(float("nan"))
            runner.weights.pack()
        outputs = []
        while not llm.is_finished():
            outputs += llm.step()
    assert [output.request_id for output in outputs] == [broken]
    assert outputs[0]["finish_reason"] == "error" and outputs[0].error is not None
    assert outputs[0]["token_ids"] == good["token_ids"][: len(outputs[0]["token_ids"])] != []
    assert len(outputs[0]["logprobs"]) == len(outputs[0]["token_ids"])


def test_results_are_plain_values(llm):
    output = llm.generate([[5, 6, 7]], replace(GREEDY, prompt_logprobs=1), use_tqdm=False)[0]
    for position in [output.prompt_logprobs[1], output["logprobs"][0]]:
        for token_id, entry in position.items():
            assert type(token_id) is int and isinstance(entry, Logprob)
            assert (type(entry.logprob), type(entry.rank), type(entry.decoded_token)) == (float, int, str)


# ---- the search for the most probable -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_top", [1, 5, 64])
def test_of_equals_the_lower_id_comes_first(num_top):
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-4, 5, (7, 64), generator=generator).float() * 0.5
    x[2] = 0.0
    x[3, ::2] = -0.0
    x[4, 10:] = float("-inf")
    ids, values = most_probable(x, num_top)
    order = x.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, order.values[:, :num_top]) and torch.equal(ids, order.indices[:, :num_top])


def test_the_chosen_tokens_rank_agrees_with_the_list():
    logits = torch.randint(-3, 4, (5, 40), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    index = torch.arange(5).repeat_interleave(40)
    tokens = torch.arange(40, dtype=torch.int32).repeat(5)
    [words] = compute_logprobs(logits, index, tokens, 40)
    ids = words[:, 2:42]
    assert torch.equal(ids.gather(1, words[:, 1:2].long() - 1)[:, 0], tokens)


# ---- on a GPU -------------------------------------------------------------------------------------------------------

GPU = dict(device="cuda", num_kvcache_blocks=400, max_num_seqs=32, kvcache_block_size=None)


@pytest.mark.gpu(seconds=12)
@pytest.mark.parametrize("options", [{}, dict(enforce_eager=True, max_num_batched_tokens=40)], ids=str)
def test_gpu_float32(folder, options):
    with engine(folder, **GPU, **options) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, ALL_PARAMS, use_tqdm=False)
            for output, params in zip(outputs, ALL_PARAMS, strict=True):
                check_output(folder, output, params)


@pytest.mark.gpu(seconds=16)
def test_gpu_bfloat16_is_as_near_as_transformers(tmp_path):
    """On average, and at most twice as far, from the float32 reference as transformers' own bfloat16 run."""
    folder = make_tiny_model(
        tmp_path, "qwen3", hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, num_hidden_layers=4, vocab_size=32000,
    )  # fmt: skip
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=1, logprobs=0, prompt_logprobs=0)
    prompts = [[(31 * i * j) % 30000 + 3 for i in range(1, 60 + 9 * j)] for j in range(1, 9)]
    with engine(folder, **(GPU | dict(dtype="bfloat16", skip_tokenizer_init=True, max_model_len=256))) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    ours, theirs = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        token_ids = prompt + output["token_ids"]
        targets = torch.tensor(token_ids[1:])[:, None]
        runs = [reference_logits(folder, token_ids, dtype, "cuda") for dtype in (torch.float32, torch.bfloat16)]
        exact, rounded = (run[:-1].log_softmax(-1).gather(1, targets)[:, 0] for run in runs)
        positions = [*output.prompt_logprobs[1:], *output["logprobs"]]
        mine = torch.tensor([position[i].logprob for position, i in zip(positions, token_ids[1:], strict=True)])
        ours.append((mine - exact).abs())
        theirs.append((rounded - exact).abs())
    assert torch.cat(ours).mean() <= 1.1 * torch.cat(theirs).mean()
    assert torch.cat(ours).max() <= 2 * torch.cat(theirs).max()
    load_reference.cache_clear()
