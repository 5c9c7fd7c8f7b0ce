"""Host of vLLM: `python -m verl_mg.engines.vllm.host SOCKET`, started by `process_engine`; see `engine_host`."""

from __future__ import annotations

import asyncio
import base64
import ctypes
import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from verl_mg.data.image_processor import ImageProcessor
from verl_mg.engines import engine_host
from verl_mg.engines.engine import ACCEPTED, CACHED, DRAFTED, GENERATED, PROMPT, VERIFIED, observed_load
from verl_mg.engines.engine_attachment import EngineListener
from verl_mg.engines.engine_host import EngineHost, Result
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.sampled_support import Wire, top_to_wire
from verl_mg.engines.vllm import internals
from verl_mg.engines.vllm.arguments import choices
from verl_mg.images import Image

SEED_STEP = 0x9E3779B97F4A7C15  # odd number that distributes the seeds of a request's continuations
PR_SET_PDEATHSIG = 1  # option of prctl(2): the signal that a process gets when its parent ends
EXCLUDED = -100.0  # bias on the logits of tokens that are never drawn, the lowest that vLLM takes
WATCH_SECONDS = 0.2  # time between two looks at whether vLLM's processes are alive

T = TypeVar("T")


class VLLMHost(EngineHost):
    """Runs vLLM's asynchronous engine."""

    def __init__(
        self,
        options: EngineOptions,
        engine: Any,
        captures_routing: bool,
        processor: ImageProcessor | None,
        statistics: StepStatistics,
    ) -> None:
        super().__init__(options)
        self._statistics = statistics
        self._engine, self._captures_routing, self._processor = engine, captures_routing, processor
        self._attention = ""  # kernels of attention of the workers
        self._adapters: Any = None  # vLLM's request for the adapters that all requests use

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener: EngineListener | None
    ) -> None:
        """Prepares the workers, then serves the messages of ranks; ends the process when vLLM's end."""
        self._attention = " and ".join(dict.fromkeys(await self._rpc("prepare", self._captures_routing)))
        watch = asyncio.get_running_loop().create_task(self._watch())
        await super().serve(reader, writer, listener)
        watch.cancel()

    async def generate(self, requests: Mapping[str, dict[str, Any]]) -> Mapping[str, Awaitable[Result]]:
        """Implements `EngineHost.generate`; vLLM takes requests one by one."""
        return {rid: self._sample(rid, request) for rid, request in requests.items()}

    async def _sample(self, rid: str, request: dict[str, Any]) -> Result:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        seed = request["seed"]
        parameters = SamplingParams(
            max_tokens=request["max_new_tokens"],
            temperature=request["temperature"],
            top_p=request["top_p"],
            top_k=request["top_k"],
            min_p=request["min_p"],
            stop_token_ids=request["stop_token_ids"],
            # vLLM's generator starts again with each request: continuations are to draw other numbers.
            seed=None if seed is None else (seed + len(request["tokens"]) * SEED_STEP) % 2**63,
            logprobs=request["top_logprobs"],  # of the drawn token, and so many likeliest ones
            extra_args={internals.SUPPORT: True} if request["returns_support"] else None,
            logit_bias=dict.fromkeys(request["excluded_token_ids"], EXCLUDED) or None,
            # vLLM also stops at the model's end of sequence, unless it is to ignore that.
            ignore_eos=True,
            stop=request["stop"] or None,
            # The tokens of the string stay, also where it ends in the middle of one.
            include_stop_str_in_output=True,
            detokenize=bool(request["stop"]),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._output(request["tokens"], request["images"], parameters, rid)
        tokens, count = list(output.token_ids), request["top_logprobs"]
        support = await self._support(rid, len(tokens)) if request["returns_support"] else None
        if output.finish_reason not in ("stop", "length", "abort"):
            raise RuntimeError(f"the request ended with {output.finish_reason}")
        return {
            "tokens": tokens,
            "logprobs": [step[token].logprob for token, step in zip(tokens, output.logprobs or (), strict=True)],
            "support": support,
            "top": top_to_wire([_likeliest(step, count) for step in output.logprobs or ()], count) if count else None,
            "finish": output.finish_reason,
            "spans": [
                {"start": span.start, "end": span.end, "version": span.version}
                for span in output.weight_versions or ()
                if span.version.isdecimal()
            ],
            "routed_experts": await self._routed_experts(rid, output, len(request["tokens"]) + len(tokens) - 1)
            if request["routed_experts"] and tokens
            else None,
            "counts": self._statistics.take(),
        }

    def abort(self, rid: str | None) -> None:
        """Implements `EngineHost.abort`."""
        # vLLM has no abort of all requests.
        self._start(self._engine.abort(list(self.open_requests) if rid is None else [rid]))

    async def load(self, payloads: Sequence[str], version: int | None, flush: bool) -> None:
        """Has each worker write its payload into its parameters, and in the end compute what is derived from them."""
        await self._rpc("write_shards", list(payloads), version is not None)
        # Running requests are put back, and compute their keys and values again with the new weights.
        if flush and not await self._call_engine(self._engine.reset_prefix_cache(reset_running_requests=True)):
            raise RuntimeError("the prefix cache cannot be reset while requests run")
        if version is not None:
            if self._processor:
                await self._call_engine(self._engine.reset_encoder_cache())  # features of the old vision tower
            await self._call_engine(self._engine.update_weight_version(str(version)))

    async def read(self, payloads: Sequence[str], is_last: bool) -> None:
        """Has each worker copy its parameters into its payload."""
        await self._rpc("read_shards", list(payloads))

    async def load_adapters(self, payloads: Sequence[str], version: int, config: dict[str, Any]) -> None:
        """Has each worker register the adapters under a new id and name, of which nothing is cached yet."""
        from vllm.lora.request import LoRARequest

        # vLLM's caches are keyed by the name: an old one would serve keys and values of old adapters.
        previous = self._adapters.lora_int_id if self._adapters else None
        number = (previous or 0) + 1
        await self._rpc("replace_adapters", list(payloads), number, previous, config)
        # A path is required, and never read: the workers have the id.
        self._adapters = LoRARequest(f"policy-{version}-{number}", number, "memory")
        await self._call_engine(self._engine.reset_prefix_cache(reset_running_requests=True))
        await self._call_engine(self._engine.update_weight_version(str(version)))

    async def sleep(self, weights: bool, kv: bool, timeout_s: float) -> None:
        """Implements `EngineHost.sleep`; vLLM cannot release the weights and keep the cache."""
        try:
            await asyncio.wait_for(self.abort_until_sent(None), timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"{len(self.open_requests)} requests are not complete {timeout_s:.0f} s after they were aborted"
            ) from None
        if weights:
            await self._call_engine(self._engine.sleep(level=2))  # level 1 would copy the weights to the host
        elif kv:
            await self._call_engine(self._engine.pause_generation(mode="abort"))
            await self._call_engine(self._engine.release_kv_cache_memory())

    async def wake(self, weights: bool, kv: bool) -> None:
        """Implements `EngineHost.wake`; vLLM schedules requests again when all is awake."""
        tags = [tag for tag, selected in (("weights", weights), ("kv_cache", kv)) if selected]
        await self._call_engine(self._engine.wake_up(tags))

    async def pause(self) -> None:
        """Implements `EngineHost.pause`."""
        await self._call_engine(self._engine.pause_generation(mode="keep", clear_cache=not self.options.keep_cache))

    async def unpause(self) -> None:
        """Implements `EngineHost.unpause`."""
        await self._call_engine(self._engine.resume_generation())

    async def chosen(self) -> dict[str, str]:
        """Returns what vLLM has made of the arguments, and the attention of its workers."""
        config = self._engine.vllm_config
        resolved = {
            "enforce_eager": config.model_config.enforce_eager,
            "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
            "moe_backend": config.kernel_config.moe_backend,
        }
        return choices(resolved) | {"attention": self._attention}

    async def size(self) -> dict[str, int]:
        """Implements `EngineHost.size`."""
        config = self._engine.vllm_config
        cache_tokens = config.cache_config.num_gpu_blocks * config.cache_config.block_size
        return {"max_running": config.scheduler_config.max_num_seqs, "cache_tokens": cache_tokens}

    def shutdown(self) -> None:
        """Ends all processes of vLLM."""
        self._engine.shutdown()

    async def _output(self, tokens: list[int], images: list[str], parameters: Any, rid: str) -> Any:

        async def last() -> Any:
            prompt = self._prompt(tokens, images)
            stream = self._engine.generate(prompt, parameters, rid, lora_request=self._adapters)
            return [result async for result in stream][-1]

        result = await self._call_engine(last())
        if result.prompt_token_ids != tokens:
            raise RuntimeError("vLLM has put other placeholders in place of the images than the model's processor")
        return result.outputs[0]

    def _prompt(self, tokens: list[int], encoded: list[str]) -> dict[str, Any]:
        """Returns the prompt of a request; vLLM's processor expands the placeholders of images and makes the pixels."""
        if not encoded or self._processor is None:
            return {"prompt_token_ids": tokens}
        images = tuple(Image(base64.b64decode(text)) for text in encoded)
        return {
            "prompt_token_ids": self._processor.unexpanded(tokens, images),
            "multi_modal_data": {"image": [image.pixels() for image in images]},
            # Keys of the images in its caches, also in the key-value cache.
            "multi_modal_uuids": {"image": [image.key for image in images]},
        }

    async def _routed_experts(self, rid: str, output: Any, fed: int) -> str | None:
        """Returns the experts of the tokens that were fed to the model, in base64 of int32."""
        if self._captures_routing:
            return str((await self._rpc("take_routing", rid, fed))[0])
        return base64.b64encode(output.routed_experts[:fed].astype("int32").tobytes()).decode()

    async def _support(self, rid: str, num_tokens: int) -> Wire | None:
        """Returns the candidates of the tokens that were drawn, which the ranks of the last pipeline stage know."""
        return next(filter(None, await self._rpc("take_support", rid, num_tokens)), None)

    async def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        return list(await self._call_engine(self._engine.collective_rpc(method, args=arguments)))

    async def _call_engine(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except internals.dead_engine_error():
            _end()

    async def _watch(self) -> None:
        # Ends this process when vLLM's processes have ended, as the rank notices that.
        # Polls vLLM; ends with the process, or cancelled by `serve`.
        while not self._engine.errored:
            await asyncio.sleep(WATCH_SECONDS)
        _end()


def _likeliest(step: Mapping[int, Any], count: int) -> list[tuple[float, int]]:
    """Returns the likeliest tokens of a step, in which vLLM has the drawn one too."""
    ranked = sorted((entry.rank, entry.logprob, token) for token, entry in step.items())
    return [(logprob, token) for rank, logprob, token in ranked if rank <= count and logprob > -math.inf]


class VLLMPart:
    """Runs the workers of a further node; the engine on the first node sends them their work."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        executor.start_worker_monitor()
        executor.register_failure_callback(_end)

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener: EngineListener | None
    ) -> None:
        """Waits for the end of the stream of the rank, which sends nothing: a part ends with its rank."""
        await reader.read()

    def shutdown(self) -> None:
        """Ends the workers of this node."""
        self._executor.shutdown()


def _end() -> NoReturn:
    print("vLLM's processes have ended", file=sys.stderr, flush=True)
    os._exit(1)


def _begin_child(stream: int, nothing: int) -> None:
    """Begins a forked process of vLLM, which else would stay, with the stream to the rank open, when this one ends."""
    # The rank learns of the end of this process by the end of the stream, which an open copy would prevent.
    os.dup2(nothing, stream)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def create(arguments: dict[str, Any], options: EngineOptions, loop: asyncio.AbstractEventLoop) -> VLLMHost | VLLMPart:
    """Starts vLLM, or its part on a further node, and returns its host."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    internals.library().check()
    internals.inspect_models_here()
    internals.keep_config_tying()
    os.register_at_fork(after_in_child=partial(_begin_child, int(sys.argv[1]), os.open(os.devnull, os.O_RDWR)))
    # GPU: vLLM returns the experts of each token itself.
    # GPU-TEST: tests/engines/vllm/test_contract.py::
    # test_engine_arguments_on_gpus_place_the_engine_and_write_experts_in_place
    # GPU-RAN: not yet
    # On GPUs vLLM returns the experts; on the CPU engines that need them run without prefix caching, see `arguments`.
    captures_routing = current_platform.is_cpu() and not arguments["enable_prefix_caching"]
    engine_arguments, statistics = AsyncEngineArgs(**arguments), StepStatistics()
    if arguments.get("node_rank"):
        return VLLMPart(internals.workers_of_node(engine_arguments))

    async def start() -> Any:
        return AsyncLLM.from_engine_args(engine_arguments, stat_loggers=[statistics])

    processor = ImageProcessor.read(arguments["model"])
    return VLLMHost(options, loop.run_until_complete(start()), captures_routing, processor, statistics)


CACHE_UNITS = 1000  # units of the use of the cache, of which vLLM reports the share


class StepStatistics:
    """Sums what vLLM reports: each scheduler's logger, as vLLM's `StatLoggerBase`, and the factory of all of them."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> StepStatistics:
        """Returns the logger of a scheduler, this one."""
        return self

    def take(self) -> dict[str, int]:
        """Returns the counts since the last call."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Adds the statistics of a step."""
        if scheduler_stats is None:
            return
        used = round(scheduler_stats.kv_cache_usage * CACHE_UNITS)
        running, waiting = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
        if running or waiting:
            self._counts.update(observed_load(running, waiting, used, CACHE_UNITS))
        prefixes = scheduler_stats.prefix_cache_stats
        self._counts.update({PROMPT: prefixes.queries, CACHED: prefixes.hits})
        if (drafts := scheduler_stats.spec_decoding_stats) is not None:
            accepted, steps = drafts.num_accepted_tokens, drafts.num_drafts
            self._counts.update({DRAFTED: drafts.num_draft_tokens, ACCEPTED: accepted})
            self._counts.update({VERIFIED: steps, GENERATED: accepted + steps})  # and one token of the policy's own

    def log(self) -> None:
        """Does nothing: the counters are logged as metrics."""

    def log_engine_initialized(self) -> None:
        """Does nothing: there is nothing to announce."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Does nothing: sleep is not counted."""


if __name__ == "__main__":
    engine_host.main(create, "vllm.v1.engine.async_llm")
