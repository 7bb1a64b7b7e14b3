"""The tokenizer of a model folder.

Owns: how it is found and loaded. Invariant: a folder without tokenizer files is refused, since transformers would make
up an empty tokenizer. It deliberately wraps nothing: the result is transformers' own object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanovllm.config import Config

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def load_tokenizer(config: Config) -> Any:
    """The folder's tokenizer; none is fine where weights are random.

    Raises:
        ValueError: no tokenizer can be loaded from the folder.
    """
    from transformers import AutoTokenizer

    folder = Path(config.tokenizer or config.model)
    has_files = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    if not has_files and config.load_format == "dummy" and config.tokenizer is None:
        return None
    try:
        if not has_files:  # transformers would make an empty one
            raise OSError(f"it has none of {', '.join(_TOKENIZER_FILES)}")
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"no tokenizer could be loaded from {str(folder)!r} ({error}); give tokenizer=FOLDER, or "
            "skip_tokenizer_init=True to work with token ids"
        ) from error
