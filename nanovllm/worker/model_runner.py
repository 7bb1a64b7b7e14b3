"""Executes plans: one ModelRunner per rank.

Owns: the model, the rows, the KV cache, the graphs and the two streams. Invariant: everything that changes device
state is enqueued on the compute stream in the order of the plans; the copy stream only reads finished outputs. It
deliberately decides nothing about scheduling, and never waits for the device inside `execute`.

A step, and where two of them overlap (max_in_flight = 2):

    host     | schedule k+1 | submit k+1 | wait k ......| update, process k | schedule k+2 | submit k+2 | ...
    compute  |  step k ............................| step k+1 ..............................| step k+2 ...
    copy     |                                     | ids of k |                             | ids of k+1 |
"""

from __future__ import annotations

import gc
import logging
import time

import torch

from nanovllm.attention import AttentionSpec, choose_backend
from nanovllm.config import Config
from nanovllm.kernels.advance import advance
from nanovllm.layers.parallel import SINGLE, SingleRank, local_heads
from nanovllm.messages import SchedulerOutput
from nanovllm.models import build_model
from nanovllm.worker.cuda_graphs import CudaGraphs, DecodeGraph, graph_sizes
from nanovllm.worker.input_batch import InputBatch
from nanovllm.worker.kv_cache import GpuMemory, KVCache, bytes_per_block, num_blocks_for_cpu
from nanovllm.worker.loader import initialize_dummy_weights, load_weights
from nanovllm.worker.logprobs import PendingLogprobs
from nanovllm.worker.output_ring import OutputRing, PendingOutput
from nanovllm.worker.parallel import RankGroup
from nanovllm.worker.persistent_batch import PersistentBatch
from nanovllm.worker.platform import compute_stream, resolve_device, resolve_dtype
from nanovllm.worker.step_sampler import StepSampler
from nanovllm.worker.step_shape import StepShape
from nanovllm.worker.warmup import KernelWarmup, attention_calls, model_calls, product_calls, step_calls, tune_products
from nanovllm.worker.weights import Source, Weights

logger = logging.getLogger("nanovllm")

GRAPH_NODE_BYTES = 1 << 13  # what the driver keeps a kernel node of a graph; measured, see docs/performance.md


Sampled = tuple[torch.Tensor, PendingLogprobs | None]  # ids int32 [S], and what some rows want to know of them


class ModelRunner:
    """Builds the model on its device and runs steps.

    Args:
        config: engine options; the ones left "auto" or None are resolved here and written back.
        tp: the ranks that the model is cut over, and which of them this is.

    Raises:
        ValueError: an option that cannot work on this device, or too little memory.
    """

    def __init__(self, config: Config, tp: RankGroup | SingleRank = SINGLE) -> None:
        self.config = config
        self.tp = tp
        self.model_config = config.model_config
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, self.model_config.dtype, self.device)
        config.device, config.dtype = self.device.type, str(self.dtype).removeprefix("torch.")
        if config.max_in_flight is None:
            config.max_in_flight = 2 if self.is_cuda else 1
        self.stream = compute_stream(self.device)
        self.memory = GpuMemory(self.device, config.gpu_memory_utilization) if self.is_cuda else None
        self.graphs: CudaGraphs | None = None
        self.graph_sizes = graph_sizes(config.max_num_seqs, self.model_config.hidden_size)
        with torch.cuda.stream(self.stream), torch.no_grad():
            self.warmup = KernelWarmup(self.device, self.stream)
            for phase in (self._build_model, self._build_batch, self._allocate_kv_cache, self._capture_graphs):
                started = time.perf_counter()
                phase()
                logger.debug("start-up: %s took %.2f s", phase.__name__, time.perf_counter() - started)
        self._log_start()

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    # ---- construction -------------------------------------------------------------------------------------------

    def _build_model(self) -> None:
        config, model_config = self.config, self.model_config
        self.num_heads, self.num_kv_heads = local_heads(model_config.num_heads, model_config.num_kv_heads, self.tp.size)
        self.warmup.start(model_calls(model_config, self.tp.size, self.dtype, self.device))
        self.backend = choose_backend(
            config.attention_backend,
            AttentionSpec(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=model_config.head_dim,
                dtype=self.dtype,
                device=self.device,
                max_num_seqs=config.max_num_seqs,
                max_model_len=config.max_model_len,
                block_size=config.kvcache_block_size,
                windows=frozenset(model_config.layer_windows),
            ),
        )
        self.block_size = config.kvcache_block_size = self.backend.block_size
        self.max_blocks_per_seq = -(-config.max_model_len // self.block_size)
        self.warmup.start(
            attention_calls(model_config, self.tp.size, self.dtype, self.device, self.backend, config.max_num_seqs)
            + step_calls(self.backend, self.device)
        )
        self.model = build_model(model_config, self.backend, self.dtype, self.device, tp=self.tp)
        self.warmup.start(product_calls(self.model, self.dtype, self.graph_sizes))
        self.weights = Weights(self.model, model_config)
        if config.load_format == "dummy":
            initialize_dummy_weights(self.model, config.seed)
        else:
            load_weights(self.model, config.model, model_config)
        self.weights.pack()

    def _build_batch(self) -> None:
        config = self.config
        num_slots = (config.max_in_flight or 1) + 1
        self.batch = PersistentBatch(
            config.max_num_seqs, config.max_model_len, self.max_blocks_per_seq, self.device, num_slots
        )
        self.inputs = InputBatch(
            self.batch, max(config.max_num_batched_tokens, config.max_num_seqs), config.max_num_seqs, self.block_size
        )
        # one buffer for all graphs: each holding its own logits would cost gigabytes
        head = self.model.lm_head
        self.logits = torch.empty(config.max_num_seqs, len(head.weight), dtype=self.dtype, device=self.device)
        self.sampler = StepSampler(self.batch, head, config.max_num_seqs, self.model.compute_logits, self.tp)
        self.outputs = OutputRing(config.max_num_seqs, self.device, self.stream, num_slots)
        self.warmup.wait()

    def _allocate_kv_cache(self) -> None:
        config, memory = self.config, self.memory
        block_bytes = self._block_bytes()
        num_blocks = config.num_kvcache_blocks
        if memory is not None:
            self._profile()
        if num_blocks is None and memory is not None:
            num_blocks = memory.num_blocks(
                block_bytes, self._graph_bytes(), self.max_blocks_per_seq + 1, config.gpu_memory_utilization
            )
        elif num_blocks is None:
            num_blocks = num_blocks_for_cpu(block_bytes, config.max_num_seqs, self.max_blocks_per_seq)
        self.num_kvcache_blocks = config.num_kvcache_blocks = self.tp.minimum(num_blocks)  # the poorest rank's
        self._new_kv_cache()

    def _new_kv_cache(self) -> None:
        self.kv_cache: KVCache | None = KVCache(
            self.model_config.num_layers, self.num_kvcache_blocks, self.block_size, self.num_kv_heads,
            self.model_config.head_dim, self.dtype, self.device,
        )  # fmt: skip

    def _block_bytes(self) -> int:
        config = self.model_config
        return bytes_per_block(config.num_layers, self.block_size, self.num_kv_heads, config.head_dim, self.dtype)

    def _profile(self) -> None:
        """Run the largest step once, on row 0 alone, so that its workspace is in torch's pool before the KV cache is
        sized.

        It compiles the kernels of a prompt step too. All rows share row 0's block table, which is block 0.
        """
        config = self.config
        self.num_kvcache_blocks = 2
        self._new_kv_cache()
        num_tokens = config.max_num_batched_tokens
        tune_products(self.model, num_tokens)
        num_rows = max(min(config.max_num_seqs, num_tokens), -(-num_tokens // config.max_model_len))
        num_rows = min(num_rows, config.max_num_seqs)
        lengths = [min(num_tokens // num_rows, config.max_model_len)] * num_rows
        plan = SchedulerOutput(-1, [0] * num_rows, lengths, 0, num_rows, max_seq_len=max(lengths))
        self.batch.apply(plan, num_rows)
        self._run_step(StepShape.of(plan), plan)
        torch.cuda.synchronize(self.device)
        self.kv_cache = None

    def _graph_bytes(self) -> int:
        """An estimate of what the graphs will take: the largest one's tensors, and the driver's share of each graph."""
        if self.config.enforce_eager:
            return 0
        size = self.config.max_num_seqs
        model_config = self.model_config
        widest = max(2 * model_config.intermediate_size, 4 * model_config.hidden_size)
        tensors = 8 * size * widest * self.dtype.itemsize
        num_nodes = 10 * model_config.num_layers * len(self.graph_sizes)
        return tensors + num_nodes * GRAPH_NODE_BYTES

    def _capture_graphs(self) -> None:
        if not self.is_cuda or self.config.enforce_eager:
            return
        bound = self.config.max_model_len
        graphs = CudaGraphs(self.graph_sizes, bound, self._decode_logits, self._sample_decodes)
        assert self.stream is not None
        free, _ = torch.cuda.mem_get_info(self.device)
        graphs.capture(self.stream)
        taken = free - torch.cuda.mem_get_info(self.device)[0]
        logger.debug("graphs took %d MiB, %d MiB were set aside", taken >> 20, self._graph_bytes() >> 20)
        self.graphs = graphs

    def _log_start(self) -> None:
        capacity = (self.num_kvcache_blocks - 1) * self.block_size
        kv_bytes = self.num_kvcache_blocks * self._block_bytes()
        weight_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        gib = 1 << 30
        held = f", {self.memory.held() / gib:.2f} GiB held in all" if self.memory is not None else ""
        logger.info(
            "%s (%s) in %s on %s, attention %s, KV cache of %d tokens (%d blocks of %d); "
            "weights %.2f GiB, KV %.2f GiB%s",
            self.config.model,
            self.model_config.architecture,
            self.config.dtype,
            self.device,
            self.backend.name,
            capacity,
            self.num_kvcache_blocks,
            self.block_size,
            weight_bytes / gib,
            kv_bytes / gib,
            held,
        )

    # ---- a step -------------------------------------------------------------------------------------------------

    def execute(self, plan: SchedulerOutput) -> PendingOutput:
        """Enqueue one step and return at once; `.wait()` gives its sampled ids."""
        with torch.cuda.stream(self.stream), torch.inference_mode():
            started = self.outputs.begin()
            graphs = self.graphs if plan.num_decodes == len(plan.rows) else None
            num_padded = graphs.padded_size(len(plan.rows)) if graphs is not None else len(plan.rows)
            self.batch.apply(plan, num_padded)
            if plan.block_copies:
                assert self.kv_cache is not None
                self.kv_cache.copy_blocks(plan.block_copies)
            self.sampler.apply_plan(plan)
            if graphs is not None:
                sampled, logprobs = self._replay(graphs[num_padded], plan, num_padded)
            else:
                sampled, logprobs = self._run_step(StepShape.of(plan), plan)
            return self.outputs.end(started, sampled[: plan.num_sampled], logprobs)

    def _run_step(self, shape: StepShape, plan: SchedulerOutput) -> Sampled:
        """Prepare, model, logits, sample, advance, launched one by one."""
        logits = self._forward(shape, plan)
        edits = self.sampler.edits.of_step(plan)
        sampled, logprobs = self.sampler.sample_step(logits, self._sampling_rows(shape), plan, edits)
        self._advance(sampled, shape)
        return sampled, logprobs

    def _forward(self, shape: StepShape, plan: SchedulerOutput | None = None) -> torch.Tensor:
        metadata = self.inputs.prepare(
            shape.num_rows,
            shape.num_tokens,
            shape.num_decodes,
            shape.max_query_len,
            shape.max_seq_len,
            shape.has_cached_prefix,
        )
        input_ids, positions = self.inputs.input_ids, self.inputs.positions
        num_tokens = shape.num_tokens
        last_tokens = None  # int64 [S], of the rows that sample, where there are other tokens too
        if shape.num_decodes != shape.num_rows:
            last_tokens = metadata.cu_seqlens_q[1 : shape.num_sampled + 1].long() - 1
        wants_all = plan is not None and self.sampler.logprobs.wants_prompts(plan)
        metadata.wanted = None if wants_all else last_tokens
        assert self.kv_cache is not None
        hidden = self.model(input_ids[:num_tokens], positions[:num_tokens], self.kv_cache.layers, metadata)
        if plan is not None:
            self.sampler.logprobs.of_prompts(plan, hidden)
        if wants_all:
            hidden = hidden[last_tokens]  # [S, H]
        return self.model.compute_logits(hidden, self.logits[: shape.num_sampled])  # [S, V / ranks]

    def _sampling_rows(self, shape: StepShape) -> torch.Tensor:
        return self.batch.step_rows[: shape.num_sampled]  # int32 [S]

    def _advance(self, sampled: torch.Tensor, shape: StepShape) -> None:
        batch = self.batch
        is_decode = shape.num_decodes == shape.num_rows
        cu_seqlens_q = self.inputs.decode_cu_seqlens_q if is_decode else batch.step_cu_seqlens_q
        advance(
            batch.step_rows[: shape.num_rows],
            cu_seqlens_q[: shape.num_rows + 1],
            shape.num_sampled,
            sampled,
            batch.token_ids,
            batch.num_tokens,
            batch.num_computed,
        )

    def _decode_logits(self, size: int, max_seq_len: int) -> torch.Tensor:
        return self._forward(StepShape.decode(size, max_seq_len))

    def _sample_decodes(self, logits: torch.Tensor, size: int) -> torch.Tensor:
        shape = StepShape.decode(size, self.config.max_model_len)
        sampled = self.sampler.sample(logits, self._sampling_rows(shape))
        self._advance(sampled, shape)
        return sampled

    def _replay(self, graph: DecodeGraph, plan: SchedulerOutput, size: int) -> Sampled:
        graph.replay_model(plan.max_seq_len)
        edits = self.sampler.edits.of_step(plan)
        if self.sampler.is_plain(plan, edits):
            graph.sample.replay()
            return graph.sampled, self.sampler.logprobs.finish(plan, graph.logits, graph.sampled)
        shape = StepShape.decode(size, self.config.max_model_len)  # rarer sampling runs outside the graph
        sampled, logprobs = self.sampler.sample_step(graph.logits, self._sampling_rows(shape), plan, edits)
        self._advance(sampled, shape)
        return sampled, logprobs

    # ---- life ---------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until everything enqueued has run; raises what the device raised."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        """After a broken step: forget what the host believes the device to hold. The next plans bring all rows anew."""
        self.batch.reset()
        self.sampler.reset()

    def sleep(self, keep_weights: bool) -> None:
        """Give back the memory of graphs, KV cache, logits and weights; rows and small buffers stay."""
        self.synchronize()
        if self.graphs is not None:
            self.graphs.clear()
            self.graphs = None
        self.kv_cache = None
        self.logits.untyped_storage().resize_(0)
        self.weights.release(keep_weights)
        self._empty_cache()

    def wake_up(self) -> None:
        """Take the memory again, as far as it was given back; graphs are captured anew. All of it or none."""
        try:
            with torch.cuda.stream(self.stream), torch.no_grad():
                self._take_memory()
                self.batch.step_rows.zero_()  # graphs warm up on row 0: others may be full, and would overflow
                self.reset()
                if self.graphs is None:
                    self._capture_graphs()
            self.synchronize()
        except BaseException:
            self.sleep(keep_weights=self.weights.missing is None)
            raise
        self.weights.settle()

    def _take_memory(self) -> None:
        """Raises on every rank when one has too little: the others would wait for it in collective calls."""
        try:
            self.weights.restore()
            self.logits.untyped_storage().resize_(self.logits.numel() * self.logits.element_size())
            if self.kv_cache is None:
                self._new_kv_cache()
        except (RuntimeError, MemoryError):
            self.tp.all_succeed(False)
            raise
        if not self.tp.all_succeed(True):
            raise RuntimeError("another rank has too little memory")

    def update_weights(self, source: Source) -> None:
        """Replace the weights in place, in the caller's stream, in which the tensors may just be computed."""
        self.synchronize()
        with torch.no_grad():
            self.weights.update(source)
        self.synchronize()

    def close(self) -> None:
        """Give back all device memory."""
        if self.graphs is not None:
            self.graphs.clear()
        for name in [
            "graphs",
            "model",
            "weights",
            "kv_cache",
            "batch",
            "inputs",
            "logits",
            "sampler",
            "outputs",
            "backend",
        ]:
            if hasattr(self, name):
                delattr(self, name)
        self._empty_cache()

    def _empty_cache(self) -> None:
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def stats(self) -> dict[str, float]:
        """On a GPU: mean_step_ms and host_exposed_ms, since the engine started."""
        return self.outputs.stats() if self.is_cuda else {}
