"""Incremental decoding is exact: the pieces joined are one decode of the ids, for every kind of decoder, and nothing
is given out that a later id takes back."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanovllm.engine.detokenizer import Detokenizer
from tests.tiny_models import make_tiny_tokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "tokens, and tokens: naïve Größe 日本語 🙂", "a b  c   d e"]
SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def sentencepiece(decoder) -> PreTrainedTokenizerFast:
    """As Llama 2 converts: byte fallback, a prefix space, added tokens of both kinds."""
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=[*SPECIALS, *BYTES, "▁", "▁▁"], show_progress=False)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(CORPUS, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIALS]
    tokenizer = Tokenizer.from_str(json.dumps(state))  # byte tokens are in the vocabulary, but not special
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("é", special=False)])
    return wrapped(tokenizer)


def llama2() -> PreTrainedTokenizerFast:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return sentencepiece(decoders.Sequence(parts))


def gemma() -> PreTrainedTokenizerFast:
    return sentencepiece(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def metaspace() -> PreTrainedTokenizerFast:
    return sentencepiece(decoders.Metaspace())


def metaspace_bytes() -> PreTrainedTokenizerFast:
    return sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


def no_decoder() -> PreTrainedTokenizerFast:
    return sentencepiece(None)


def wordpiece(cleanup: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    return wrapped(tokenizer)


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # "é" stands for a byte in the vocabulary's alphabet, "日本" has characters that are not in it
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("é", special=False), AddedToken("日本")])
    return wrapped(tokenizer)


def byte_level_in_sequence() -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    return tokenizer


EXACT = [llama2, gemma, metaspace, metaspace_bytes, no_decoder, wordpiece, byte_level, byte_level_in_sequence]


def real_tokenizers() -> list[Path]:
    """Folders of real tokenizers on this machine; NANOVLLM_TEST_TOKENIZERS names them, with colons between."""
    return [Path(folder) for folder in os.environ.get("NANOVLLM_TEST_TOKENIZERS", "").split(":") if folder]


def pushed(detokenizer: Detokenizer, ids: list[int], skip: bool) -> list[tuple[str, str]]:
    """After each id: what is certain in all, and what is unsure."""
    decoder = detokenizer.incremental(skip)
    certain, states = "", []
    for token_id in ids:
        certain += decoder.push(token_id)
        states.append((certain, decoder.unsure))
    return states


def check_exact(detokenizer: Detokenizer, ids: list[int], skip: bool) -> None:
    whole = detokenizer.decode(ids, skip)
    for end, (certain, unsure) in enumerate(pushed(detokenizer, ids, skip), start=1):
        so_far = detokenizer.decode(ids[:end], skip)
        assert whole.startswith(certain), (ids, skip, end)
        assert so_far.startswith(certain), (ids, skip, end)
        rest = so_far[len(certain) :]
        if "\ufffd" not in rest:
            assert unsure == rest, (ids, skip, end)  # whole characters are seen at once
        else:
            assert not unsure or set(rest) == {"\ufffd"}, (ids, skip, end)


def random_ids(rng: random.Random, tokenizer: PreTrainedTokenizerFast, hot: list[int]) -> list[int]:
    """Anything, with many bytes, specials and ids beyond the tokenizer."""
    return [
        rng.choice(hot) if rng.random() < 0.5 else rng.randrange(len(tokenizer) + 5)
        for _ in range(rng.randrange(1, 12))
    ]


def hot_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    ids = list(tokenizer.all_special_ids)
    for text in ("é", "🙂", "日本語", " a", "\n", "  ", "€", "naïve", "<think>"):
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
    ids += [i for i in (tokenizer.convert_tokens_to_ids(t) for t in BYTES[::16] + ["▁", "▁▁", "<0x20>"]) if i]
    return [token_id for token_id in ids if token_id is not None]


@pytest.mark.parametrize("make", EXACT, ids=lambda make: make.__name__)
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_joined_are_one_decode(make, skip):
    tokenizer = make()
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer._kind == ("bytes" if "byte_level" in make.__name__ else "text")
    rng, hot = random.Random(7), hot_ids(tokenizer)
    for _ in range(1500):
        check_exact(detokenizer, random_ids(rng, tokenizer, hot), skip)


@pytest.mark.parametrize("make", EXACT, ids=lambda make: make.__name__)
def test_text_comes_as_soon_as_it_is_certain(make):
    tokenizer = make()
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer("the lazy dog, the fox", add_special_tokens=False)["input_ids"]
    for end, (certain, unsure) in enumerate(pushed(detokenizer, ids, True), start=1):
        assert certain + unsure == detokenizer.decode(ids[:end], True)


@pytest.mark.parametrize("make", [llama2, byte_level], ids=lambda make: make.__name__)
def test_characters_come_whole(make):
    tokenizer = make()
    detokenizer = Detokenizer(tokenizer)
    text = "🙂👩‍👩‍👧 日本語 한국어 naïve Größe"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(text)  # several tokens a character
    states = pushed(detokenizer, ids, True)
    assert all("\ufffd" not in certain + unsure for certain, unsure in states)
    assert "".join(states[-1]) == text


def test_byte_runs_are_held_until_nothing_can_take_them_back():
    tokenizer = llama2()
    detokenizer = Detokenizer(tokenizer)
    e, acute, bad = (tokenizer.convert_tokens_to_ids(token) for token in ("<0xC3>", "<0xA9>", "<0xFF>"))
    plain = tokenizer.convert_tokens_to_ids("a")
    assert pushed(detokenizer, [plain, e, acute, plain], True) == [("a", ""), ("a", ""), ("a", "é"), ("aéa", "")]
    assert pushed(detokenizer, [e, acute, bad, plain], True)[2:] == [("", ""), ("\ufffd\ufffd\ufffda", "")]


def test_ids_without_a_token_have_no_text():
    for make in EXACT:
        tokenizer = make()
        detokenizer = Detokenizer(tokenizer)
        ids = tokenizer("the fox", add_special_tokens=False)["input_ids"]
        mixed = [token_id for token_id in ids for token_id in (10**6, token_id, len(tokenizer))]
        for skip in (True, False):
            assert detokenizer.decode(mixed, skip) == detokenizer.decode(ids, skip)
            assert "".join(pushed(detokenizer, mixed, skip)[-1]) == detokenizer.decode(ids, skip)
        assert detokenizer.decode([10**6] * 3, True) == ""


def test_ids_behind_a_gap_have_text():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 7, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    assert len(fast) == 3
    assert Detokenizer(fast).decode([0, 7, 5], True) == "ab"
    assert pushed(Detokenizer(fast), [0, 7, 5, 7], True)[-1] == ("abb", "")


def test_an_unknown_decoder_goes_through_a_window():
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Replace(Regex("zzz"), "z"), decoders.Fuse()]
    )
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer._kind == "window"
    text = "🙂 naïve 日本語, the quick brown fox"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    states = pushed(detokenizer, ids, True)
    assert states[-1] == (text, "") and not any("\ufffd" in certain for certain, _ in states)
    broken = [tokenizer.convert_tokens_to_ids("â")] * 100  # bytes that never become text do not hold it up for ever
    assert len(pushed(detokenizer, broken, True)[-1][0]) > 50


def test_special_tokens_are_found_by_their_text():
    detokenizer = Detokenizer(byte_level())
    assert detokenizer.special_id("</s>") == 2
    assert detokenizer.special_id("<think>") is None and detokenizer.special_id("the") is None
    assert Detokenizer(None).special_id("</s>") is None and Detokenizer(None).decode([1, 2], True) == ""


@pytest.mark.parametrize("folder", real_tokenizers(), ids=lambda folder: folder.name)
def test_real_tokenizers(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    detokenizer = Detokenizer(tokenizer)
    rng, hot = random.Random(1), hot_ids(tokenizer)
    for _ in range(2000):
        for skip in (True, False):
            check_exact(detokenizer, random_ids(rng, tokenizer, hot), skip)


def test_the_tiny_checkpoint_s_tokenizer(tmp_path):
    tokenizer = make_tiny_tokenizer(tmp_path)
    detokenizer = Detokenizer(tokenizer)
    rng = random.Random(3)
    for _ in range(300):
        check_exact(detokenizer, [rng.randrange(320) for _ in range(20)], True)
