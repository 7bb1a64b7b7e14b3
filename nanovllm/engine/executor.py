"""Where the engine hands plans to the device.

Owns: the model runner of this process. Invariant: `submit` never waits for the device, and results come back in the
order of the plans. It deliberately adds nothing to a plan: with one rank, a step is one call.
"""

from __future__ import annotations

from nanovllm.config import Config
from nanovllm.messages import SchedulerOutput
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.output_ring import PendingOutput
from nanovllm.worker.weights import Source


class Executor:
    """Runs plans on one device, in this process."""

    def __init__(self, config: Config) -> None:
        self._runner: ModelRunner | None = ModelRunner(config)
        self.num_kvcache_blocks = self._runner.num_kvcache_blocks
        self.block_size = self._runner.block_size

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "the executor is closed"
        return self._runner

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Enqueue a step; `.wait()` of what is returned gives its ModelRunnerOutput."""
        return self.runner.execute(plan)

    @property
    def weights_missing(self) -> str | None:
        """Why there are no weights to compute with, for the error that the caller raises; None: there are."""
        return self.runner.weights.missing

    def sleep(self, level: int) -> None:
        """Give back the memory of KV cache, graphs and weights, whose contents level 1 keeps. Nothing is in flight."""
        self.runner.sleep(keep_weights=level == 1)

    def wake_up(self) -> None:
        """Take the memory again; the KV cache is empty. Raises when there is too little, and holds none then."""
        self.runner.wake_up()

    def update_weights(self, source: Source) -> None:
        """Replace the weights in place. Nothing is in flight."""
        self.runner.update_weights(source)

    def idle(self) -> None:
        """The engine has run out of work for now."""
        self.runner.outputs.idle()

    def recover(self) -> None:
        """After an exception: wait for all that is enqueued and forget it. Raises when the device itself is broken."""
        self.runner.synchronize()
        self.runner.reset()

    def stats(self) -> dict[str, float]:
        return self.runner.stats()

    def close(self) -> None:
        """Give back all device memory; may be called again."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            runner.close()
