"""The tokenizer of a model folder.

Owns: how it is found and loaded. Invariant: a folder without tokenizer files is refused, since transformers would make
up an empty tokenizer. It deliberately wraps nothing: the result is transformers' own object.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nanovllm.config import Config

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def _has_files(config: Config) -> bool:
    return any((Path(config.tokenizer or config.model) / name).is_file() for name in _TOKENIZER_FILES)


def _needs_none(config: Config) -> bool:
    """Weights are random and there is no tokenizer beside them: token ids will do."""
    return config.load_format == "dummy" and config.tokenizer is None and not _has_files(config)


def check_tokenizer_files(config: Config) -> None:
    """Quick, before a model is built for nothing.

    Raises:
        ValueError: the folder has no tokenizer, and one is needed.
    """
    if not _has_files(config) and not _needs_none(config):
        raise _not_loaded(config, f"it has none of {', '.join(_TOKENIZER_FILES)}")


def load_tokenizer(config: Config) -> Any:
    """The folder's tokenizer; none is fine where weights are random.

    Raises:
        ValueError: no tokenizer can be loaded from the folder.
    """
    if _needs_none(config):
        return None
    folder = str(config.tokenizer or config.model)
    try:
        return tokenizer_class(Path(folder)).from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise _not_loaded(config, str(error)) from error


def tokenizer_class(folder: Path) -> Any:
    """AutoTokenizer, or the class that it would find for Qwen3.

    Finding one takes AutoTokenizer the import of transformers' model code: seconds of a start, with some releases.
    """
    import transformers

    settings, model = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "config.json")
    names = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
    is_qwen3 = settings.get("tokenizer_class") in names and model.get("model_type", "qwen3") == "qwen3"
    if is_qwen3 and "auto_map" not in settings and (folder / "tokenizer.json").is_file():
        found = getattr(transformers, "Qwen2Tokenizer", None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerFast):  # before 5 it is not
            return found
    return transformers.AutoTokenizer


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    values = json.loads(path.read_text(encoding="utf-8"))
    return values if isinstance(values, dict) else {}


def _not_loaded(config: Config, reason: str) -> ValueError:
    return ValueError(
        f"no tokenizer could be loaded from {str(config.tokenizer or config.model)!r} ({reason}); give "
        "tokenizer=FOLDER, or skip_tokenizer_init=True to work with token ids"
    )
