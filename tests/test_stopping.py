"""What ends a text, and where: stop strings against a search in the plain text, alone and in the engine."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.stop import StopStrings, TextProgress
from tests.test_detokenizer import byte_level, llama2, metaspace, wordpiece
from tests.tiny_models import make_tiny_model

# A random model's text, without the many bytes that it would hold: ids 0-2 are special, and up to 258 single bytes.
LETTERS = [*range(30, 60), *range(259, 300)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, allowed_token_ids=LETTERS)
PROMPT = [5, 6, 7, 8, 9]


# ---- the search, without an engine ------------------------------------------------------------------------------


def followed(detokenizer: Detokenizer, ids: list[int], params: SamplingParams):
    """(stop string, start in the text, tokens that it took) as the incremental search sees it; None: no stop."""
    progress = TextProgress(params, detokenizer, is_streamed=True)
    seq = Sequence("r", [1], params, max_total_tokens=10**6)
    shown = ""
    for num_tokens, token_id in enumerate(ids, start=1):
        seq.token_ids.append(token_id)
        stop = progress.advance(seq)
        if stop is not None:
            assert progress.stop_start is not None and progress.stop_start >= len(shown)
            return stop, progress.stop_start, num_tokens
        shown += progress.shown(len(shown))
        held = detokenizer.decode(ids[:num_tokens], True)[len(shown) :].rstrip("\ufffd")
        assert (
            not held
            or any(string.startswith(held[0]) for string in params.stop)
            or held == progress._unsure[-len(held) :]
        )
    return None


def searched(detokenizer: Detokenizer, ids: list[int], params: SamplingParams):
    """The same in the plain text of every prefix of the ids."""
    seen = len(detokenizer.decode(ids[: params.min_tokens], True).rstrip("\ufffd"))
    for num_tokens in range(params.min_tokens + 1, len(ids) + 1):
        text = detokenizer.decode(ids[:num_tokens], True)
        found = []
        for string in params.stop:
            starts = [i for i in range(len(text)) if text.startswith(string, i) and i + len(string) > seen]
            found += [(start, len(string), string) for start in starts]
        if found:
            start, _, string = min(found)
            return string, start, num_tokens
    return None


@pytest.mark.parametrize("make", [byte_level, llama2, metaspace, wordpiece], ids=lambda make: make.__name__)
@pytest.mark.parametrize("min_tokens", [0, 3])
def test_incremental_search_finds_what_a_search_in_the_text_finds(make, min_tokens):
    tokenizer = make()
    detokenizer = Detokenizer(tokenizer)
    rng = random.Random(5)
    words = ["the", "lazy", "dog", "fox", "naïve", "日本語", "🙂🙂", "a", "b", "\n", "Größe"]
    num_stopped = num_late = 0
    for _ in range(600):
        text = " ".join(rng.choice(words) for _ in range(8))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        text = detokenizer.decode(ids, True)
        stops = []
        for _ in range(rng.randrange(1, 4)):
            start = rng.randrange(len(text))
            stops.append(text[start : start + rng.randrange(1, 6)])
        params = SamplingParams(max_tokens=None, min_tokens=min_tokens, stop=stops)
        expected = searched(detokenizer, ids, params)
        assert followed(detokenizer, ids, params) == expected, (text, stops)
        num_stopped += expected is not None
        num_late += expected is not None and expected[2] < len(ids)
    assert num_stopped > 200 and num_late > 100


def test_earliest_match_wins_and_then_the_shorter():
    stops = StopStrings(SamplingParams(stop=["bc", "abcd", "ab", "c"]), Detokenizer(None))
    assert stops.find("xxabcd", 0) == (2, "ab")
    assert stops.find("xxabcd", 4) == (2, "abcd")  # "ab" was seen before, and did not count
    assert stops.find("xxbc", 0) == (2, "bc")
    assert stops.find("xx", 0) is None
    assert [stops.num_held(text) for text in ("x", "a", "xab", "xabc", "xb", "abx")] == [0, 1, 2, 3, 1, 0]


def test_a_held_newline_counts_once_and_in_its_own_token():
    """With byte fallback a newline is a byte token, whose text is certain only when the next token has come."""
    tokenizer = llama2()
    newline, word = tokenizer.convert_tokens_to_ids(["<0x0A>", "a"])
    detokenizer = Detokenizer(tokenizer)
    assert followed(detokenizer, [word, newline, word], SamplingParams(stop="\n")) == ("\n", 1, 2)
    late = SamplingParams(stop="\n", min_tokens=2)
    assert followed(detokenizer, [word, newline, word, word], late) is None
    assert followed(detokenizer, [word, newline, word, newline], late) == ("\n", 3, 4)


# ---- the parameters ---------------------------------------------------------------------------------------------


def test_stop_is_normalised_and_checked():
    assert SamplingParams(stop="a").stop == ("a",) and SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams().stop == SamplingParams(stop=[]).stop == SamplingParams(stop=None).stop == ()
    for bad in ("", ["a", ""]):
        with pytest.raises(ValueError, match="stop must not hold an empty string"):
            SamplingParams(stop=bad)
    for bad in (5, ["a", 5], b"a"):
        with pytest.raises(TypeError, match="stop must be"):
            SamplingParams(stop=bad)
    with pytest.raises(ValueError, match="detokenize must be True where stop is given, got False"):
        SamplingParams(stop="a", detokenize=False)
    with pytest.raises(TypeError, match="include_stop_str_in_output must be a bool"):
        SamplingParams(include_stop_str_in_output="yes")


# ---- in the engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=True)
    with LLM(folder, dtype="float32", device="cpu", max_model_len=128, kvcache_block_size=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(llm):
    """A greedy answer, its ids, and the length of its text after each of them."""
    output = generated(llm, GREEDY)
    ids = output["token_ids"]
    assert len(output["text"]) > 20
    lengths = [len(llm.tokenizer.decode(ids[:end], skip_special_tokens=True).rstrip("\ufffd")) for end in range(25)]
    return output["text"], ids, lengths


def generated(llm, params, prompt=PROMPT):
    return llm.generate(prompt, params, use_tqdm=False)[0]


def expected_stop(text: str, lengths: list[int], stop: str) -> tuple[int, int]:
    """(start in the text, tokens that complete it)"""
    start = text.index(stop)
    return start, next(n for n, length in enumerate(lengths) if length >= start + len(stop))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_stop_anywhere_in_the_text(llm, plain, include, length):
    text, ids, lengths = plain
    stops = [text[i : i + length] for i in range(0, len(text) - length, 3) if "\ufffd" not in text[: i + length]]
    assert stops
    params = [dataclasses.replace(GREEDY, stop=stop, include_stop_str_in_output=include) for stop in stops]
    outputs = llm.generate([PROMPT] * len(stops), params, use_tqdm=False)
    for stop, output in zip(stops, outputs, strict=True):
        start, num_tokens = expected_stop(text, lengths, stop)
        assert (output["finish_reason"], output["stop_reason"]) == ("stop", stop)
        assert output["text"] == text[:start] + (stop if include else "")
        assert output["token_ids"] == ids[:num_tokens]


def test_stop_at_the_very_start(llm, plain):
    text, ids, lengths = plain
    output = generated(llm, dataclasses.replace(GREEDY, stop=text[:2]))
    assert output["text"] == "" and output["token_ids"] == ids[: expected_stop(text, lengths, text[:2])[1]]


def test_a_stop_that_never_comes(llm, plain):
    output = generated(llm, dataclasses.replace(GREEDY, stop=["never seen", plain[0] + "x"]))
    assert (output["text"], output["finish_reason"], output["stop_reason"]) == (plain[0], "length", None)


def test_several_stops_name_the_one_that_fired(llm, plain):
    text, _, _ = plain
    late, early = text[12:14], text[3:5]
    assert text.index(early) < text.index(late)
    output = generated(llm, dataclasses.replace(GREEDY, stop=[late, "zzzz", early]))
    assert output["stop_reason"] == early and output["text"] == text[: text.index(early)]
    kept = generated(llm, dataclasses.replace(GREEDY, stop=[late, "zzzz", early], include_stop_str_in_output=True))
    assert kept["stop_reason"] == early and kept["text"] == output["text"] + early


def test_a_stop_in_the_last_allowed_token_is_a_stop(llm, plain):
    text, ids, lengths = plain
    stop = text[6:9]
    start, num_tokens = expected_stop(text, lengths, stop)
    output = generated(llm, dataclasses.replace(GREEDY, stop=stop, max_tokens=num_tokens))
    assert (output["finish_reason"], output["text"], len(output["token_ids"])) == ("stop", text[:start], num_tokens)


@pytest.mark.parametrize("min_tokens", [1, 4, 9, 15, 24])
def test_min_tokens_comes_before_any_stop(llm, plain, min_tokens):
    text, ids, lengths = plain
    stops = sorted({character for character in text if text.count(character) > 1 and character != "\ufffd"})
    params = dataclasses.replace(GREEDY, stop=stops, min_tokens=min_tokens)
    output = generated(llm, params)
    assert len(output["token_ids"]) >= min_tokens
    seen = lengths[min_tokens]
    starts = [i for i in range(seen, len(text)) if text[i] in stops]
    if starts:
        num_tokens = next(n for n, length in enumerate(lengths) if length > starts[0])
        assert num_tokens > min_tokens
        assert (output["text"], output["stop_reason"]) == (text[: starts[0]], text[starts[0]])
        assert output["token_ids"] == ids[:num_tokens]
    else:
        assert output["finish_reason"] == "length" and output["text"] == text


def test_end_ids_have_no_stop_reason_and_stop_ids_their_own(llm, plain):
    _, ids, _ = plain
    output = generated(llm, dataclasses.replace(GREEDY, stop_token_ids=[ids[6]], stop="never seen"))
    assert output["stop_reason"] == ids[6] and output["finish_reason"] == "stop"
    eos = llm.tokenizer.eos_token_id
    forced = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[eos])
    output = generated(llm, forced)
    assert (output["token_ids"], output["text"], output["stop_reason"]) == ([eos], "", None)


def test_every_end_id_of_generation_config_stops(llm, tmp_path):
    folder = shutil.copytree(llm.config.model, tmp_path / "copy")
    config = json.loads((folder / "generation_config.json").read_text()) | {"eos_token_id": [40, 41]}
    (folder / "generation_config.json").write_text(json.dumps(config))
    with LLM(folder, dtype="float32", device="cpu", max_model_len=64) as copy:
        for token_id in (40, 41, copy.tokenizer.eos_token_id):
            forced = SamplingParams(temperature=0, max_tokens=5, allowed_token_ids=[token_id])
            output = generated(copy, forced)
            assert (output["token_ids"], output["finish_reason"]) == ([token_id], "stop")
            assert (output["text"], output["stop_reason"]) == ("", None)
            past = generated(copy, dataclasses.replace(forced, ignore_eos=True))
            assert past["token_ids"] == [token_id] * 5 and past["finish_reason"] == "length"


def test_ids_beyond_the_tokenizer(llm):
    num_texts, vocab_size = len(llm.tokenizer), llm.config.model_config.vocab_size
    assert num_texts < vocab_size
    params = SamplingParams(temperature=2.0, max_tokens=100, ignore_eos=True, seed=1, stop="never seen")
    outputs = llm.generate([PROMPT] * 20, [dataclasses.replace(params, seed=i) for i in range(20)], use_tqdm=False)
    assert any(token_id >= num_texts for output in outputs for token_id in output["token_ids"])
    for output in outputs:
        known = [token_id for token_id in output["token_ids"] if token_id < num_texts]
        assert output["text"] == llm.tokenizer.decode(known, skip_special_tokens=True)
    only = SamplingParams(max_tokens=6, allowed_token_ids=[vocab_size - 1], stop="a", ignore_eos=True)
    assert generated(llm, only)["text"] == ""
    assert generated(llm, GREEDY, generated(llm, only)["token_ids"])["finish_reason"] == "length"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_special_token_as_stop_string(llm, skip, include, ignore_eos):
    stop = "<|im_end|>"
    params = SamplingParams(
        temperature=0,
        max_tokens=4,
        stop=[stop, "x"],
        allowed_token_ids=[llm.tokenizer.eos_token_id],
        skip_special_tokens=skip,
        include_stop_str_in_output=include,
        ignore_eos=ignore_eos,
    )
    output = generated(llm, params)
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", stop)
    assert output["token_ids"] == [llm.tokenizer.eos_token_id]
    assert output["text"] == (stop if include else "")


def test_a_special_stop_waits_for_min_tokens(llm):
    start, _ = llm.tokenizer.convert_tokens_to_ids(["<|im_start|>", "a"])
    params = SamplingParams(
        temperature=0, max_tokens=9, min_tokens=3, stop="<|im_start|>", allowed_token_ids=[start], ignore_eos=True
    )
    output = generated(llm, params)
    assert output["token_ids"] == [start] * 4 and output["stop_reason"] == "<|im_start|>" and output["text"] == ""


def test_detokenize_off_gives_no_text(llm, plain):
    output = generated(llm, dataclasses.replace(GREEDY, detokenize=False))
    assert output["text"] == "" and output["token_ids"] == plain[1]


def test_stop_strings_need_a_tokenizer(llm):
    with LLM(llm.config.model, skip_tokenizer_init=True, dtype="float32", device="cpu", max_model_len=64) as bare:
        with pytest.raises(ValueError, match=r"request 1: stop strings need a tokenizer.*got stop=\('a',\)"):
            bare.generate([PROMPT, PROMPT], [GREEDY, dataclasses.replace(GREEDY, stop="a")], use_tqdm=False)
        assert generated(bare, GREEDY)["text"] == ""


def test_stop_ends_every_sample_by_itself(llm):
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    free = generated(llm, params)
    stop = free.outputs[0].text[3:5]
    output = generated(llm, dataclasses.replace(params, stop=stop))
    for before, after in zip(free.outputs, output.outputs, strict=True):
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
        if stop in before.text:
            assert (after.text, after.stop_reason) == (before.text[: before.text.index(stop)], stop)
        else:
            assert (after.text, after.finish_reason) == (before.text, "length")


def test_other_requests_go_on_from_the_same_text_after_an_exception(llm, plain, monkeypatch):
    text, ids, lengths = plain
    stop = text[12:16]
    start, num_tokens = expected_stop(text, lengths, stop)
    params = dataclasses.replace(GREEDY, stop=stop)
    bystander = llm.generate_iter(iter([([6], dataclasses.replace(GREEDY, max_tokens=1)), (PROMPT, params)]))
    assert next(bystander)[0] == 0
    advance, calls = TextProgress.advance, 0

    def failing(self, seq):
        nonlocal calls
        calls += 1
        stopped = advance(self, seq)
        if calls == 4:  # the text is ahead of what the engine knows of it
            raise KeyboardInterrupt
        return stopped

    monkeypatch.setattr(TextProgress, "advance", failing)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[9, 9]], dataclasses.replace(GREEDY, stop="never"), use_tqdm=False)
    monkeypatch.undo()
    [(_, output)] = bystander
    assert (output["text"], output["stop_reason"]) == (text[:start], stop)
    assert output["token_ids"] == ids[:num_tokens]


def test_preempted_sequences_stop_where_they_would_have(llm, plain):
    text, _, _ = plain
    params = dataclasses.replace(GREEDY, stop=text[-6:])
    with LLM(
        llm.config.model,
        dtype="float32",
        device="cpu",
        max_model_len=64,
        kvcache_block_size=8,
        num_kvcache_blocks=8,
        enable_prefix_caching=False,
    ) as small:
        small.generate([[5]] * 100, SamplingParams(max_tokens=20, stop_token_ids=list(range(320))), use_tqdm=False)
        outputs = small.generate([PROMPT] * 6, params, use_tqdm=False)
        assert {output["text"] for output in outputs} == {text[: text.index(text[-6:])]}
        assert small.stats()["preemptions"] > 0


def test_the_first_token_s_time_is_known_for_the_shortest_prompt(llm):
    metrics = generated(llm, GREEDY, [5]).metrics
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
