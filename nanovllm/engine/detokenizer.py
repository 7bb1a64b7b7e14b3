"""From token ids to text, at once or as they come.

Owns: what each token id adds to a text. Invariant: the pieces that an incremental decoder gives out are the
beginning of one decode of the same ids, whatever comes after them. It deliberately looks at no stop string: why
somebody reads along is not its matter.

A window over the last ids, or a tokenizer's own DecodeStream, is nearly exact: it holds text back, or fails, where
bytes never become a character. Here the bytes are followed as the kind of decoder prescribes:

    ByteLevel       (GPT-2, Llama 3, Qwen) every token is bytes; what is no UTF-8 becomes U+FFFD, one for each maximal
                    invalid part. Python's incremental decoder has the same rule.
    SentencePiece   (Llama 2, Mistral) every token is text, but for <0x00> to <0xFF>. A run of these is text if the
                    whole run is UTF-8; else every byte of it becomes U+FFFD. A space at the very start is dropped.
    anything else   a window, exact as far as tokens that end whole characters do not change what comes before them.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any, Protocol

from nanovllm.engine.request import Tokenizer

REPLACEMENT = "\ufffd"
MAX_WINDOW = 32  # ids that the window waits for a whole character
# Decoders under which a token's text is its own, but for runs of byte tokens and for the very first token.
_SEPARATE = frozenset({"Metaspace", "WordPiece", "Replace", "ByteFallback", "Fuse", "Strip"})
_BYTE_TOKEN = re.compile("<0x([0-9a-fA-F]{2})>")


class IncrementalDecoder(Protocol):
    """The text of ids that come one by one."""

    def push(self, token_id: int) -> str:
        """Take one id; returns the text that it made certain."""

    @property
    def unsure(self) -> str:
        """Text behind all that is certain: whole characters, but a later id may take them back."""


class Detokenizer:
    """Decodes the ids of one tokenizer.

    Args:
        tokenizer: a transformers tokenizer; None: every text is "".
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer: Any = tokenizer
        self.backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        # a backend passes over ids without a token, and its ids may have gaps, so that len() is no bound
        self._num_text_ids = 2**32 if self.backend is not None or tokenizer is None else len(tokenizer)
        self._kind = _decoder_kind(self.backend)
        self._pieces: dict[bool, _Pieces] = {}
        self._special_ids: dict[str, int] | None = None

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Text of `token_ids`; ids beyond the tokenizer (a padded vocabulary's) have none."""
        if self.tokenizer is None or not token_ids:
            return ""
        if max(token_ids) >= self._num_text_ids:
            token_ids = [token_id for token_id in token_ids if token_id < self._num_text_ids]
        return self.tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def incremental(self, skip_special_tokens: bool) -> IncrementalDecoder:
        """A decoder for one more sequence."""
        if self._kind == "window":
            return _WindowDecoder(self, skip_special_tokens)
        pieces = self._pieces.get(skip_special_tokens)
        if pieces is None:
            pieces_type = _BytePieces if self._kind == "bytes" else _TextPieces
            pieces = self._pieces[skip_special_tokens] = pieces_type(self, skip_special_tokens)
        return _ByteLevelDecoder(pieces) if self._kind == "bytes" else _SentencePieceDecoder(pieces)

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written `text`, if there is one."""
        if self._special_ids is None:
            added = getattr(self.tokenizer, "added_tokens_decoder", {})
            self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        return self._special_ids.get(text)


def _decoder_kind(backend: Any) -> str:
    """ "bytes", "text" or "window": how the tokens of a tokenizer make up a text."""
    if backend is None:
        return "window"
    if backend.decoder is None:
        return "text"
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    names = [part["type"] for part in parts]
    if names == ["ByteLevel"]:
        return "bytes"
    fused = names[names.index("Fuse") :] if "Fuse" in names else []
    trims_end = any(part.get("stop") for part in parts)
    return "text" if _SEPARATE.issuperset(names) and {"Fuse", "Strip"}.issuperset(fused) and not trims_end else "window"


class _Pieces(dict[int, Any]):
    """What each id adds to a text, found when it is first met."""

    def __init__(self, detokenizer: Detokenizer, skip_special_tokens: bool) -> None:
        self._detokenizer = detokenizer
        self._skip_special_tokens = skip_special_tokens

    def text(self, *token_ids: int) -> str:
        """One decode."""
        return self._detokenizer.decode(list(token_ids), self._skip_special_tokens)

    def __missing__(self, token_id: int) -> Any:
        piece = self[token_id] = self.find(token_id)
        return piece

    def find(self, token_id: int) -> Any:
        raise NotImplementedError


def _byte_characters() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary (Radford et al. 2019): printable ones for
    themselves, the others from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class _BytePieces(_Pieces):
    """id -> str, or bytes where they are no whole characters, for a ByteLevel decoder."""

    _BYTES = _byte_characters()

    def find(self, token_id: int) -> str | bytes:
        text = self.text(token_id)
        if REPLACEMENT not in text:
            return text
        token = self._detokenizer.backend.id_to_token(token_id)
        if self._BYTES.keys() >= set(token):
            return bytes(self._BYTES[character] for character in token)
        return token.encode()


class _ByteLevelDecoder:
    __slots__ = ("_pieces", "_codec", "_is_whole")
    unsure = ""

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._codec = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_whole = True  # no character has begun

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if type(piece) is str:
            if self._is_whole:
                return piece
            piece = piece.encode()
        text = self._codec.decode(piece)
        self._is_whole = not self._codec.getstate()[0]
        return text


class _TextPieces(_Pieces):
    """id -> str, or bytes for a byte token: what it adds behind a token that is plain text."""

    def __init__(self, detokenizer: Detokenizer, skip_special_tokens: bool) -> None:
        super().__init__(detokenizer, skip_special_tokens)
        self._anchor = self._find_anchor()
        self._anchor_text = self.text(*self._anchor)

    def _find_anchor(self) -> list[int]:
        """A token with text of its own: what stands behind it does not stand at the start."""
        tokenizer = self._detokenizer.tokenizer
        for token_id in (*tokenizer("a", add_special_tokens=False)["input_ids"], *range(len(tokenizer))):
            text = self.text(token_id)
            if text.strip() and REPLACEMENT not in text and self.text(token_id, token_id).startswith(text):
                return [token_id]
        return []  # no token has text

    def find(self, token_id: int) -> str | bytes:
        text = self.text(*self._anchor, token_id)[len(self._anchor_text) :]
        byte = _BYTE_TOKEN.fullmatch(self._detokenizer.backend.id_to_token(token_id) or "") if text else None
        # without byte fallback such a token is text like any other
        return bytes.fromhex(byte[1]) if byte and text != byte[0] and not text.endswith(f" {byte[0]}") else text


class _SentencePieceDecoder:
    __slots__ = ("_pieces", "_is_start", "_run", "_run_text", "_decode")

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._is_start = True  # no token has come that counts
        self._run = 0  # byte tokens since the last one of text
        self._run_text: str | None = ""  # the characters in them; None: they are no UTF-8
        self._decode: Any = None

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if type(piece) is bytes:
            self._push_byte(token_id, piece)
            return ""
        if not piece:
            return ""  # skipped, or beyond the tokenizer: decoders do not see it
        settled = self._end_run() if self._run else ""
        if self._is_start:
            self._is_start = False
            piece = self._pieces.text(token_id)
        return settled + piece

    @property
    def unsure(self) -> str:
        return self._run_text or ""

    def _push_byte(self, token_id: int, byte: bytes) -> None:
        self._run += 1
        if self._run == 1:
            self._decode = codecs.getincrementaldecoder("utf-8")("strict").decode
        if self._run_text is not None:
            try:
                text = self._decode(byte)
            except UnicodeDecodeError:
                self._run_text = None
            else:
                self._run_text += self._pieces.text(token_id) if self._is_start and text == " " else text
        self._is_start = False

    def _end_run(self) -> str:
        text, count = self._run_text, self._run
        self._run, self._run_text = 0, ""
        if text is not None:
            try:
                return text + self._decode(b"", True)
            except UnicodeDecodeError:
                pass
        return REPLACEMENT * count


class _WindowDecoder:
    __slots__ = ("_detokenizer", "_skip_special_tokens", "_ids", "_num_context")
    unsure = ""

    def __init__(self, detokenizer: Detokenizer, skip_special_tokens: bool) -> None:
        self._detokenizer = detokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._num_context = 0  # leading ids whose text is given out

    def push(self, token_id: int) -> str:
        ids = self._ids
        ids.append(token_id)
        known = self._detokenizer.decode(ids[: self._num_context], self._skip_special_tokens)
        text = self._detokenizer.decode(ids, self._skip_special_tokens)
        is_partial = text.endswith(REPLACEMENT) and len(ids) - self._num_context < MAX_WINDOW
        if is_partial or len(text) <= len(known):
            return ""
        self._ids = ids[self._num_context :]
        self._num_context = len(self._ids)
        return text[len(known) :]
