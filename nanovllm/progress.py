"""What a user sees while a call runs.

Owns: the progress bar. Invariant: switched off, it costs nothing but two additions a request. It deliberately asks the
engine for nothing: finished results carry all that it shows.
"""

from __future__ import annotations

from tqdm import tqdm

from nanovllm.outputs import RequestOutput


class Progress:
    """Requests done, and prefill and decode tokens per second."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._bar = tqdm(total=total, desc="Generating", unit="request", disable=not enabled, dynamic_ncols=True)
        self._prompt_tokens = 0
        self._output_tokens = 0

    def add(self, output: RequestOutput) -> None:
        """A request that has ended."""
        self._prompt_tokens += len(output.prompt_token_ids)
        self._output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if not self._bar.disable:
            elapsed = max(self._bar.format_dict["elapsed"], 1e-9)
            self._bar.set_postfix_str(
                f"prefill {self._prompt_tokens / elapsed:.0f} tok/s, decode {self._output_tokens / elapsed:.0f} tok/s",
                refresh=False,
            )
            self._bar.update(1)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
