"""Conversations become prompts with one start token; streams are the text of generate in pieces."""

from __future__ import annotations

import dataclasses

import pytest
from tokenizers import processors

from nanovllm import LLM, SamplingParams
from nanovllm.entrypoints.smollm2 import DownloadError, get_smollm2
from tests.test_detokenizer import byte_level, llama2
from tests.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9]
HELLO = [{"role": "user", "content": "What is the capital of France?"}]
LONGER = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Größe 🙂"},
    {"role": "assistant", "content": "Yes"},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=True)
    with LLM(folder, dtype="float32", device="cpu", max_model_len=256, kvcache_block_size=8) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        assert llm.generate([[5]], GREEDY, use_tqdm=False)[0]["finish_reason"] == "length"
        stats = llm.stats()
        assert stats["kv_blocks_free"] == stats["kv_blocks_total"]


# ---- chat -------------------------------------------------------------------------------------------------------


def template_ids(llm, messages, **options):
    return llm.tokenizer.apply_chat_template(messages, return_dict=False, **{"add_generation_prompt": True} | options)


def test_one_conversation_or_several(llm):
    expected = [template_ids(llm, messages) for messages in (HELLO, LONGER)]
    outputs = llm.chat([HELLO, LONGER], GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == expected
    assert outputs[0].prompt == "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    by_ids = llm.generate(expected, GREEDY, use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in by_ids]
    [alone] = llm.chat(HELLO, GREEDY, use_tqdm=False)
    assert alone["token_ids"] == outputs[0]["token_ids"]
    assert llm.chat([], GREEDY, use_tqdm=False) == []
    each = [dataclasses.replace(GREEDY, max_tokens=n) for n in (2, 3)]
    assert [len(output["token_ids"]) for output in llm.chat((HELLO, tuple(LONGER)), each, use_tqdm=False)] == [2, 3]
    assert len(llm.chat(HELLO, use_tqdm=False)) == 1  # the model's own sampling parameters


def test_how_a_prompt_ends(llm):
    [output] = llm.chat(LONGER, GREEDY, False, add_generation_prompt=False)
    assert output.prompt_token_ids == template_ids(llm, LONGER, add_generation_prompt=False)
    [output] = llm.chat(LONGER, GREEDY, False, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt is not None and output.prompt.endswith("<|im_start|>assistant\nYes")
    with pytest.raises(ValueError, match="set one of them to False"):
        llm.chat(LONGER, GREEDY, False, continue_final_message=True)


def test_templates_and_what_they_are_given(llm):
    template = "{{ tools[0]['name'] if tools else '-' }}|{{ thinking }}|{{ messages[0]['content'] }}"
    [output] = llm.chat(HELLO, GREEDY, False, chat_template=template, chat_template_kwargs={"thinking": False})
    assert output.prompt == "-|False|What is the capital of France?"
    [output] = llm.chat(
        HELLO, GREEDY, False, template, tools=[{"name": "add"}], chat_template_kwargs={"tokenize": True}
    )
    assert output.prompt == "add||What is the capital of France?"


def test_parts_of_text_are_joined(llm):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    [output] = llm.chat([{"role": "user", "content": parts}], GREEDY, False)
    assert output.prompt_token_ids == template_ids(llm, [{"role": "user", "content": "one\ntwo"}])


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ("hello", TypeError, "messages must be a list of dicts .*, got str"),
        (HELLO[0], TypeError, "messages must be a list of dicts .*, got dict"),
        ([HELLO, []], ValueError, "request 1: a conversation must be a list with at least one message"),
        ([HELLO, 5], ValueError, "request 1: a conversation must be a list"),
        ([HELLO, ["hello"]], TypeError, "request 1: a message must be a dict with role and content, got str"),
        ([HELLO, [{"content": "a"}]], ValueError, r"request 1: a message needs a role, got the keys \['content'\]"),
        (
            [HELLO, [{"role": "user", "content": [{"type": "image_url"}]}]],
            ValueError,
            "request 1: a message's content must be text, got a part of type 'image_url'",
        ),
        ([HELLO, [{"role": "user", "content": "x" * 2000}]], ValueError, "request 1: the prompt has .* tokens"),
    ],
)
def test_bad_conversations_are_named_before_anything_runs(llm, messages, error, message):
    steps = llm.stats()["steps"]
    with pytest.raises(error, match=message):
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert llm.stats()["steps"] == steps


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}a", "one at a time"),
        ("{{ messages[2]['content'] + 1 }}", "request 0: the chat template failed"),
        ("{% for %}", "request 0: the chat template failed"),
    ],
)
def test_a_failing_template_is_named(llm, template, message):
    with pytest.raises(ValueError, match=rf"request \d: the chat template failed.*|{message}") as raised:
        llm.chat([HELLO, LONGER], GREEDY, use_tqdm=False, chat_template=template)
    assert message in str(raised.value)


def test_a_text_tokenizer_and_a_template_are_needed(llm, tmp_path):
    folder = make_tiny_model(tmp_path, "qwen3", tokenizer=True)
    for path in tmp_path.glob("chat_template*"):
        path.unlink()
    with LLM(folder, dtype="float32", device="cpu", max_model_len=64) as bare:
        bare.tokenizer.chat_template = None
        with pytest.raises(ValueError, match="the tokenizer has no chat template: give chat_template="):
            bare.chat(HELLO, GREEDY, use_tqdm=False)
        assert bare.chat(HELLO, GREEDY, False, chat_template="{{ messages[0]['role'] }}")[0].prompt == "user"
    with LLM(folder, dtype="float32", device="cpu", max_model_len=64, skip_tokenizer_init=True) as bare:
        with pytest.raises(ValueError, match="chat needs a tokenizer"):
            bare.chat(HELLO, GREEDY, use_tqdm=False)
        with pytest.raises(ValueError, match="needs a tokenizer"):
            bare.stream(PROMPT, GREEDY)


def with_start_token(make, folder):
    """A model whose tokenizer puts <s> before every text, and whose template writes it too."""
    tokenizer = make()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    make_tiny_model(folder, "llama", vocab_size=512)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("make", [llama2, byte_level], ids=lambda make: make.__name__)
def test_exactly_one_start_token(make, tmp_path):
    with LLM(with_start_token(make, tmp_path), dtype="float32", device="cpu", max_model_len=128) as llm:
        start = llm.tokenizer.bos_token_id
        assert llm.tokenizer("the fox")["input_ids"][0] == start

        [output] = llm.chat([{"role": "user", "content": "the fox"}], GREEDY, use_tqdm=False)
        ids = output.prompt_token_ids
        assert ids[0] == start and ids.count(start) == 1
        assert output.prompt == "<s>[user] the fox"
        prompts = [output.prompt, "the fox", {"prompt": output.prompt}, "<s><s>the fox", "the <s> fox", "<s>"]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert outputs[0].prompt_token_ids == outputs[2].prompt_token_ids == ids
        counts = [output.prompt_token_ids.count(start) for output in outputs]
        assert counts == [1, 1, 1, 2, 2, 1]
        assert all(output.prompt_token_ids[0] == start for output in outputs)
        assert list(llm.stream("<s>the fox", GREEDY))
        llm.add_request("<s>the fox", GREEDY)
        while not (finished := llm.step()):
            pass
        assert finished[0].prompt_token_ids.count(start) == 1


def test_a_start_token_that_the_tokenizer_does_not_add_stays(tmp_path):
    folder = with_start_token(byte_level, tmp_path)
    with LLM(folder, dtype="float32", device="cpu", max_model_len=128) as llm:
        llm.tokenizer.backend_tokenizer.post_processor = processors.ByteLevel()
        outputs = llm.generate(["the fox", "<s>the fox", "<s><s>the fox"], GREEDY, use_tqdm=False)
        assert [output.prompt_token_ids.count(llm.tokenizer.bos_token_id) for output in outputs] == [0, 1, 2]


# ---- stream -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_pieces_joined_are_the_text(llm, seed):
    params = SamplingParams(temperature=2.0, max_tokens=60, ignore_eos=True, seed=seed)  # bytes, and ids without text
    whole = llm.generate(PROMPT, params, use_tqdm=False)[0]["text"]
    pieces = list(llm.stream(PROMPT, params))
    assert "".join(pieces) == whole and len(pieces) > 10 and all(pieces)


def test_emoji_and_cjk_come_whole(llm):
    """Only the bytes of some characters are allowed, so that whole ones, parts and nonsense come in any order."""
    ids = llm.tokenizer("日本語🙂é", add_special_tokens=False)["input_ids"]
    assert len(ids) > 10
    for seed in range(4):
        params = SamplingParams(seed=seed, max_tokens=60, ignore_eos=True, allowed_token_ids=sorted(set(ids)))
        pieces = list(llm.stream(ids, params))
        assert "".join(pieces) == llm.generate(ids, params, use_tqdm=False)[0]["text"]


def test_stop_strings_are_never_shown(llm):
    free = dataclasses.replace(GREEDY, max_tokens=40)
    text = llm.generate(PROMPT, free, use_tqdm=False)[0]["text"]
    for length in (2, 6):
        for start in range(0, min(len(text) - length, 40), 7):
            stop = text[start : start + length]
            if "\ufffd" in stop:
                continue
            include = start % 2 == 0
            params = dataclasses.replace(free, stop=["zz", stop], include_stop_str_in_output=include)
            pieces = list(llm.stream(PROMPT, params))
            assert "".join(pieces) == text[: text.index(stop)] + (stop if include else "")


def test_a_stream_and_other_calls_take_turns(llm):
    expected = llm.generate([PROMPT, [9, 8], [7]], GREEDY, use_tqdm=False)
    streams = [llm.stream(output.prompt_token_ids, GREEDY) for output in expected[:2]]
    iterator = llm.generate_iter([[7], [8]], GREEDY)
    texts = [next(stream) for stream in streams]
    first = dict([next(iterator)])
    texts[0] += next(streams[0])
    assert llm.generate([7], GREEDY, use_tqdm=False)[0]["text"] == expected[2]["text"]
    texts = [text + "".join(stream) for text, stream in zip(texts, streams, strict=True)]
    assert texts == [output["text"] for output in expected[:2]]
    assert (first | dict(iterator))[0]["text"] == expected[2]["text"]


def test_closing_a_stream_aborts_its_request(llm):
    stream = llm.stream(PROMPT, dataclasses.replace(GREEDY, max_tokens=200))
    next(stream)
    stream.close()
    assert list(stream) == []
    llm.stream(PROMPT, GREEDY)  # never begun: nothing is queued; the fixture looks


def test_a_stream_survives_the_failure_of_another_call(llm, monkeypatch):
    expected = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]["text"]
    stream = llm.stream(PROMPT, GREEDY)
    text = next(stream)
    process = type(llm.engine.output_processor).process
    monkeypatch.setattr(type(llm.engine.output_processor), "process", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate([[9, 9]], GREEDY, use_tqdm=False)
    monkeypatch.setattr(type(llm.engine.output_processor), "process", process)
    assert text + "".join(stream) == expected


def test_what_cannot_be_streamed(llm):
    with pytest.raises(ValueError, match="n must be 1 in a stream, got 2"):
        llm.stream(PROMPT, SamplingParams(n=2))
    with pytest.raises(ValueError, match="detokenize=True"):
        llm.stream(PROMPT, SamplingParams(detokenize=False))
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.stream([], GREEDY)
    with pytest.raises(TypeError, match="sampling_params must be a SamplingParams"):
        llm.stream(PROMPT, [GREEDY])
    stream = llm.stream(PROMPT, dataclasses.replace(GREEDY, max_tokens=100))
    next(stream)
    llm.abort(stream.gi_frame.f_locals["request"].request_id)
    with pytest.raises(RuntimeError, match="was aborted"):
        list(stream)


# ---- a real model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    try:
        folder = get_smollm2()
    except DownloadError as error:
        pytest.skip(str(error))
    with LLM(folder, dtype="float32", device="cpu", max_model_len=256) as llm:
        yield llm


@pytest.mark.slow
def test_smollm2_stops_inside_its_tokens(smollm2):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=16)
    [output] = smollm2.chat(messages, params, use_tqdm=False)
    text, ids = output["text"], output["token_ids"]
    assert text.startswith("The capital of France is Paris")
    expected = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert output.prompt_token_ids == expected
    ends = [len(smollm2.tokenizer.decode(ids[:n], skip_special_tokens=True)) for n in range(len(ids) + 1)]
    stops = ["apital of Fran", "ance is Pa", "e capi"]
    for stop in stops:  # they begin and end inside tokens
        start = text.index(stop)
        assert start not in ends and start + len(stop) not in ends
    each = [dataclasses.replace(params, stop=[stop, "never"]) for stop in stops]
    for stop, stopped in zip(stops, smollm2.chat([messages] * 3, each, use_tqdm=False), strict=True):
        assert stopped["text"] == text[: text.index(stop)]
        assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
        num_tokens = next(n for n, length in enumerate(ends) if length >= text.index(stop) + len(stop))
        assert stopped["token_ids"] == ids[:num_tokens]
    pieces = list(smollm2.stream(expected, each[1]))
    assert "".join(pieces) == text[: text.index(stops[1])] and len(pieces) > 2


@pytest.mark.slow
def test_smollm2_repeats_emoji(smollm2):
    messages = [{"role": "user", "content": "Repeat exactly: 🙂🚀 日本語 naïve 🙂🚀 日本語 naïve"}]
    [prompt] = smollm2.inputs.render(messages, {"add_generation_prompt": True})
    params = SamplingParams(temperature=0, max_tokens=20)
    [output] = smollm2.generate([prompt], params, use_tqdm=False)
    ids = output["token_ids"]
    kept = ids[:-1] if output["finish_reason"] == "stop" else ids
    assert output["text"] == smollm2.tokenizer.decode(kept, skip_special_tokens=True)
    assert any(ord(character) > 0x2000 for character in output["text"])
    pieces = list(smollm2.stream(prompt, params))
    assert "".join(pieces) == output["text"]
    assert "\ufffd" not in "".join(pieces[:-1])
