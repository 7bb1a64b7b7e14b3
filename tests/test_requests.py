"""The contract of a request: every prompt form, every refusal, and an engine that works after each of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from nanovllm import LLM, CompletionOutput, RequestOutput, SamplingParams
from nanovllm.engine.request import Request, queue_order
from tests.reference import reference_greedy
from tests.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(
        folder, dtype="float32", device="cpu", max_model_len=64, num_kvcache_blocks=9, kvcache_block_size=8
    ) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        stats = llm.stats()
        assert stats["kv_blocks_free"] == stats["kv_blocks_total"]
        assert llm.is_finished()
        expected = reference_greedy(request.getfixturevalue("folder"), PROMPT, 8)
        assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]["token_ids"] == expected


def test_nano_vllm_usage(folder):
    llm = LLM(
        folder, enforce_eager=True, tensor_parallel_size=1, max_model_len=4096, gpu_memory_utilization=0.1
    )  # a tenth: on a GPU, tests run side by side
    params = SamplingParams(temperature=0.6, max_tokens=256, ignore_eos=True)
    params = dataclasses.replace(params, max_tokens=16)
    outputs = llm.generate(["Hello, world", "introduce yourself"], params, use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [16, 16]
    assert isinstance(outputs[0]["text"], str)
    outputs = llm.generate([[5, 6], [7, 8, 9]], [params, params], use_tqdm=False)
    assert len(outputs) == 2
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[5, 6]], params, use_tqdm=False)


def test_a_result_can_be_asked_what_it_has():
    output = RequestOutput("7", "hi", [1, 2], [CompletionOutput(text="there", token_ids=[3])])
    for key, value in {"text": "there", "token_ids": [3], "prompt": "hi", "request_id": "7", "error": None}.items():
        assert key in output and output[key] == value
    for key in ("texts", "outputs.text", 0, None):
        assert key not in output
        with pytest.raises(KeyError):
            output[key]


def test_prompt_forms_agree(llm):
    text = "the cat sat on the mat"
    ids = llm.tokenizer(text)["input_ids"]
    forms = [text, ids, tuple(ids), {"prompt": text}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(output["token_ids"]) for output in outputs}) == 1
    assert outputs[0].prompt == text and outputs[1].prompt is None
    assert all(output.prompt_token_ids == ids for output in outputs)
    for bare in (text, ids, {"prompt": text}):
        assert len(llm.generate(bare, GREEDY, use_tqdm=False)) == 1
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], ValueError, "request 1: the prompt is empty"),
        ([5, 5000], ValueError, "request 1: token id 5000 is outside the vocabulary: ids are 0 to"),
        ([5, -1], ValueError, "request 1: token id -1 is outside"),
        ([5] * 64, ValueError, r"request 1: the prompt has 64 tokens.*at most 63"),
        (5, TypeError, "request 1: a prompt must be a str"),
        ([5, "a"], TypeError, "request 1: a prompt's token ids must be ints"),
        ([5, True], TypeError, "request 1: a prompt's token ids must be ints"),
        ({"text": "a"}, ValueError, 'request 1: a dict prompt needs "prompt"'),
        ({"prompt": 5}, TypeError, 'request 1: "prompt" must be a str'),
        (None, TypeError, "request 1: a prompt must be a str"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(llm, prompt, error, message):
    steps = llm.stats()["steps"]
    with pytest.raises(error, match=message):
        llm.generate([PROMPT, prompt, PROMPT], GREEDY, use_tqdm=False)
    assert llm.stats()["steps"] == steps
    outputs = llm.generate([PROMPT, prompt, PROMPT], GREEDY, use_tqdm=False, on_error="return")
    assert [output["finish_reason"] for output in outputs] == ["length", "error", "length"]
    assert outputs[1].error is not None and f"request 1: {outputs[1].error}".startswith(message[:20])
    assert outputs[1]["token_ids"] == [] and outputs[1]["text"] == ""


def test_empty_text_is_refused_where_the_tokenizer_adds_nothing(llm):
    with pytest.raises(ValueError, match="request 1: the prompt is empty"):
        llm.generate(["a", "", "b"], GREEDY, use_tqdm=False)


def test_pool_limits(folder):
    with LLM(
        folder, dtype="float32", device="cpu", max_model_len=256, num_kvcache_blocks=5, kvcache_block_size=8
    ) as llm:
        prompts = [PROMPT, [5] * 33, PROMPT]
        with pytest.raises(ValueError, match=r"request 1: .* KV cache for 40 tokens .*holds 32"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
        assert [len(output["token_ids"]) for output in outputs] == [8, 0, 8]
        # the last sampled token needs no slot, so 25 + 8 tokens just fit
        assert len(llm.generate([[5] * 25], GREEDY, use_tqdm=False)[0]["token_ids"]) == 8
        # no max_tokens: as far as the pool reaches
        unbounded = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        assert len(llm.generate([[5] * 20], unbounded, use_tqdm=False)[0]["token_ids"]) == 13


def test_stop_ids(llm):
    expected = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]["token_ids"]
    stop = expected[4]
    first = expected.index(stop)
    params = dataclasses.replace(GREEDY, stop_token_ids=[stop])
    output = llm.generate(PROMPT, params, use_tqdm=False)[0]
    assert output["token_ids"] == expected[: first + 1]
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", stop)
    assert output["text"] == llm.tokenizer.decode(expected[:first], skip_special_tokens=True)
    with pytest.raises(ValueError, match="stop token id 100000 is outside the vocabulary"):
        llm.generate(PROMPT, SamplingParams(stop_token_ids=[100000]), use_tqdm=False)


def test_min_tokens_holds_end_ids_back(llm):
    expected = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]["token_ids"]
    params = dataclasses.replace(GREEDY, stop_token_ids=[expected[0]], min_tokens=5)
    both = llm.generate([PROMPT, PROMPT], [params, GREEDY], use_tqdm=False)
    assert expected[0] not in both[0]["token_ids"][:5] and len(both[0]["token_ids"]) >= 5
    assert both[1]["token_ids"] == expected


def test_length_ends_at_max_model_len(llm):
    outputs = llm.generate(
        [[5] * 59, [5] * 63], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), use_tqdm=False
    )
    assert [len(output["token_ids"]) for output in outputs] == [5, 1]
    assert [output["finish_reason"] for output in outputs] == ["length", "length"]


def test_truncation(llm):
    ids = [(i % 50) + 5 for i in range(100)]
    keep = dataclasses.replace(GREEDY, truncate_prompt_tokens=10)
    fill = dataclasses.replace(GREEDY, truncate_prompt_tokens=-1)
    outputs = llm.generate([ids, ids], [keep, fill], use_tqdm=False)
    assert outputs[0].prompt_token_ids == ids[-10:]
    assert outputs[1].prompt_token_ids == ids[-56:] and len(outputs[1]["token_ids"]) == 8


def test_params_list_of_another_length(llm):
    with pytest.raises(ValueError, match="3 prompts, but 2 sampling_params"):
        llm.generate([PROMPT] * 3, [GREEDY] * 2, use_tqdm=False)
    with pytest.raises(TypeError, match="sampling_params must be"):
        llm.generate([PROMPT], "greedy", use_tqdm=False)
    with pytest.raises(ValueError, match="on_error must be"):
        llm.generate([PROMPT], GREEDY, use_tqdm=False, on_error="ignore")


def test_outputs_in_order_of_prompts(llm):
    params = [dataclasses.replace(GREEDY, max_tokens=20 - i) for i in range(20)]
    outputs = llm.generate([[5 + i] for i in range(20)], params, use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == list(range(20, 0, -1))
    assert [output.prompt_token_ids for output in outputs] == [[5 + i] for i in range(20)]


def test_the_last_requests_of_a_call_start_longest_first(folder):
    """Fewer steps, and else nothing changes: each output is what the request gives in a call of its own place."""
    lengths = [4, 4, 4, 4, 9, 3, 40, 5]
    params = [SamplingParams(temperature=0.7, max_tokens=n, ignore_eos=True) for n in lengths]  # seeds by place
    prompts = [[10 + i, 3, 5] for i in range(len(lengths))]
    outputs = {}
    for max_num_seqs in (4, 8):
        with LLM(folder, max_num_seqs=max_num_seqs, max_model_len=128, seed=5) as llm:
            outputs[max_num_seqs] = llm.generate(prompts, params, use_tqdm=False)
            num_steps = llm.stats()["steps"]
        assert [len(output["token_ids"]) for output in outputs[max_num_seqs]] == lengths
        # The first four leave after 4 tokens; then the one of 40 is the first to start, not the third.
        assert num_steps <= {4: 4 + 40 + 1, 8: 40 + 1}[max_num_seqs]
    assert [o["token_ids"] for o in outputs[4]] == [o["token_ids"] for o in outputs[8]]


def test_queue_order_moves_only_the_last_requests():
    def request(position, num_prompt_tokens, num_output_tokens):
        tokens = list(range(num_prompt_tokens))
        total = num_prompt_tokens + num_output_tokens
        return Request(str(position), None, tokens, SamplingParams(max_tokens=num_output_tokens), (), total)

    lengths = [(5, 1), (1, 9), (7, 2), (900, 3), (2, 8), (3, 3), (4, 8)]
    requests = [request(i, *each) for i, each in enumerate(lengths)]
    order = {n: [int(r.request_id) for r in queue_order(requests, n)] for n in (1, 4, 7, 100)}
    assert order[1] == [0, 1, 2, 3, 4, 5, 6]
    assert order[4] == [0, 1, 2, 4, 6, 3, 5]  # equal ones stay as they came
    assert order[7] == order[100] == [1, 4, 6, 3, 5, 2, 0]


def test_own_loop(llm):
    first = llm.add_request(PROMPT, GREEDY)
    second = llm.add_request("the cat", GREEDY, request_id="mine")
    dropped = llm.add_request(PROMPT, GREEDY)
    assert second == "mine"
    with pytest.raises(ValueError, match="'mine' is in use"):
        llm.add_request(PROMPT, GREEDY, request_id="mine")
    llm.step()
    llm.abort(dropped)
    llm.abort("no such request")
    outputs = {}
    while not llm.is_finished():
        for output in llm.step():
            outputs[output.request_id] = output
    assert set(outputs) == {first, "mine"}
    assert all(output.finished and len(output["token_ids"]) == 8 for output in outputs.values())
    metrics = outputs[first].metrics
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


def test_generate_iter_takes_any_length_and_holds_few(llm):
    pulled = 0

    def requests():
        nonlocal pulled
        for i in range(60):
            pulled += 1
            yield ([5 + i], dataclasses.replace(GREEDY, max_tokens=1 + i % 4)) if i % 2 else [5 + i]

    small = LLM(llm.config.model, dtype="float32", device="cpu", max_model_len=64, max_num_seqs=4, kvcache_block_size=8)
    iterator = small.generate_iter(requests(), GREEDY)
    results = dict([next(iterator)])
    assert pulled <= 9
    results |= dict(iterator)
    assert sorted(results) == list(range(60))
    assert all(results[i].prompt_token_ids == [5 + i] for i in range(60))
    assert all(len(results[i]["token_ids"]) == (1 + i % 4 if i % 2 else 8) for i in range(60))
    small.close()


def test_a_call_inside_a_suspended_iterator(llm):
    expected = llm.generate([[5], [6], [7]], GREEDY, use_tqdm=False)
    iterator = llm.generate_iter([[5], [6], [7]], GREEDY)
    results = dict([next(iterator)])
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]["finish_reason"] == "length"
    results |= dict(iterator)
    assert [results[i]["token_ids"] for i in range(3)] == [output["token_ids"] for output in expected]


def test_closing_an_iterator_aborts_its_requests(llm):
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (1, 30, 30)]
    iterator = llm.generate_iter(zip([[5], [6], [7]], params, strict=True))
    next(iterator)
    iterator.close()  # the fixture checks that nothing is left


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError, MemoryError])
@pytest.mark.parametrize("place", ["submit", "wait", "update", "schedule", "process"])
def test_an_exception_inside_a_call_leaves_a_usable_engine(llm, monkeypatch, interrupt, place):
    engine = llm.engine
    targets = {
        "submit": (engine.executor, "submit"),
        "wait": (engine, "_collect"),
        "update": (engine.scheduler, "update"),
        "schedule": (engine.scheduler, "schedule"),
        "process": (engine.output_processor, "process"),
    }
    owner, name = targets[place]
    original = getattr(owner, name)
    calls = 0

    def failing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise interrupt("planted")
        return original(*args, **kwargs)

    survivor = llm.generate_iter([[9, 8, 7]], GREEDY)  # another caller's request, in the engine all along
    reference = llm.generate([[9, 8, 7]], GREEDY, use_tqdm=False)[0]["token_ids"]
    bystander = llm.generate_iter(iter([([9, 8, 7], GREEDY), ([6], dataclasses.replace(GREEDY, max_tokens=1))]))
    assert next(bystander)[0] == 1
    monkeypatch.setattr(type(owner), name, lambda self, *args, **kwargs: failing(*args, **kwargs))
    with pytest.raises(interrupt, match="planted"):
        llm.generate([PROMPT] * 3, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert [output["token_ids"] for _, output in bystander] == [reference]
    assert [output["token_ids"] for _, output in survivor] == [reference]


def test_ids_beyond_the_tokenizer_have_no_text(llm):
    assert len(llm.tokenizer) < llm.config.model_config.vocab_size
    params = SamplingParams(temperature=2.0, max_tokens=50, ignore_eos=True, seed=1)
    outputs = llm.generate([[5, 6]] * 40, params, use_tqdm=False)
    assert all(isinstance(output["text"], str) for output in outputs)
    top = llm.config.model_config.vocab_size - 1
    assert llm.engine.output_processor.detokenizer.decode([top, top], True) == ""
    assert llm.generate([[5, top]], GREEDY, use_tqdm=False)[0]["finish_reason"] == "length"


def test_settings_beyond_what_the_device_counts(llm):
    """Allowed, since a filter that large is off: they must not fail in the middle of a run."""
    params = SamplingParams(top_k=2**40, temperature=1e300, max_tokens=4, ignore_eos=True, seed=1)
    assert len(llm.generate(PROMPT, params, use_tqdm=False)[0]["token_ids"]) == 4


def test_arrays_and_tensors_as_prompts(llm):
    def answers(prompts) -> list[list[int]]:
        return [output.prompt_token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]

    for make in (np.array, torch.tensor):
        assert answers(make([5, 6, 7])) == [[5, 6, 7]]
        assert answers([make([1, 2]), make([3])]) == [[1, 2], [3]]
        assert answers([make([3]), make([1, 2])]) == [[3], [1, 2]]
        assert answers(make([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
        assert answers([make(5), make(6)]) == answers(list(make([5, 6]))) == [[5, 6]]
        with pytest.raises(TypeError):
            answers(make([1.5, 2.5]))
    assert answers(np.array(["a b", "c"])) == answers(["a b", "c"])


def test_what_a_tokenizer_returns_is_a_prompt(llm):
    text = "the cat sat"
    ids = llm.tokenizer(text)["input_ids"]
    for prompt in (llm.tokenizer(text), llm.tokenizer(text, return_tensors="pt"), [llm.tokenizer(text)]):
        assert [o.prompt_token_ids for o in llm.generate(prompt, GREEDY, use_tqdm=False)] == [ids]
    with pytest.raises(TypeError, match="token ids must be ints, got .*list"):
        llm.generate(llm.tokenizer([text, text]), GREEDY, use_tqdm=False)
    for prompt in (text, {"prompt": text}):
        with pytest.raises(TypeError, match="requests must be an iterable of prompts, got one prompt, a"):
            llm.generate_iter(prompt, GREEDY)


def test_half_a_surrogate_pair(llm):
    bad = "abc\ud800"
    with pytest.raises(ValueError, match=r"request 1: character 3 of the text is half"):
        llm.generate(["fine", bad], GREEDY, use_tqdm=False)
    outputs = llm.generate(["fine", {"prompt": bad}], GREEDY, use_tqdm=False, on_error="return")
    assert [output["finish_reason"] for output in outputs] == ["length", "error"]
    assert "half of a surrogate pair" in outputs[1].error
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        llm.add_request(bad, GREEDY)
    with pytest.raises(ValueError, match="request 0: character 3 of the text"):
        llm.chat([{"role": "user", "content": bad}], GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}")
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        llm.generate("fine", dataclasses.replace(GREEDY, bad_words=[bad]), use_tqdm=False)
    assert len(llm.generate("fine", dataclasses.replace(GREEDY, stop=bad), use_tqdm=False)) == 1  # never met


def test_an_aborted_request_never_comes_out(llm):
    """Though it had finished, and nobody had fetched it."""
    short = dataclasses.replace(GREEDY, max_tokens=1)
    ids = [llm.add_request([5 + i], short) for i in range(3)]
    llm.generate(PROMPT, GREEDY, use_tqdm=False)
    llm.abort(ids[1])
    llm.abort("nobody's")
    assert not llm.is_finished()
    assert [output.request_id for output in llm.step()] == [ids[0], ids[2]]
    assert llm.is_finished()


@pytest.mark.parametrize(
    "rules",
    [
        dict(allowed_token_ids=[5, 6], logit_bias={5: float("-inf"), 6: float("-inf")}),
        dict(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=2),
        dict(logit_bias=dict.fromkeys(range(1000), float("-inf"))),
    ],
)
def test_rules_that_leave_no_token(llm, rules):
    vocab_size = llm.config.model_config.vocab_size
    if len(rules.get("logit_bias", {})) > 2:
        rules = dict(logit_bias=dict.fromkeys(range(vocab_size), float("-inf")))
    message = "request 0: the request's rules .* leave no token to be output token 1"
    with pytest.raises(RuntimeError, match=message):
        llm.generate(PROMPT, dataclasses.replace(GREEDY, **rules), use_tqdm=False)


def test_what_cannot_be_a_request_is_said_before_anything_runs(folder):
    with LLM(folder, dtype="float32", device="cpu", max_model_len=64) as llm:
        with pytest.raises(TypeError, match="prompts must be"):
            llm.generate(None)
        with pytest.raises(TypeError, match="request_id must be a str"):
            llm.abort(["0"])
        with pytest.raises(ValueError, match="request 0: multi_modal_data is not supported"):
            llm.generate({"prompt": "a", "multi_modal_data": {"image": 1}})
        assert llm.stats()["steps"] == 0
        assert llm.generate([[7]], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
