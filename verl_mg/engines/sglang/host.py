"""Host of an `sglang.Engine`: `python -m verl_mg.engines.sglang.host SOCKET`.

SGLang's servers take the same fields of requests, and return the same responses (`servers.remote_engine`).
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from typing import Any

import torch

from verl_mg.data.image_processor import ImageProcessor
from verl_mg.engines import engine_host
from verl_mg.engines.engine import ACCEPTED, CACHED, DRAFTED, GENERATED, PROMPT, VERIFIED, observed_load
from verl_mg.engines.engine_attachment import EngineListener
from verl_mg.engines.engine_host import EngineHost, Result
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.payloads import named_views, open_payload
from verl_mg.engines.sampled_support import support_to_wire, top_to_wire
from verl_mg.engines.sglang import internals
from verl_mg.engines.sglang.arguments import LOADER, choices, has_multi_token_draft
from verl_mg.engines.sglang.weight_loader import merge_stages, pickled_by_value
from verl_mg.images import Image

# Models of SGLang that an update fills: the policy, and a draft model where it is a layer of the same checkpoint.
TARGET, DRAFT = "target", "draft"
ALL = "all"  # both of them
CHECK_SECONDS = 1.0  # interval at which a part of an engine on a further node looks after its schedulers
LOAD_SECONDS = 0.1  # interval between two observations of the load
IDLE_RETRY_SECONDS = 0.01  # pause between two attempts to find the schedulers idle, a step after their last request
EXCLUDED = -1e4  # bias on the logits of tokens that are never drawn


class SGLangHost(EngineHost):
    """Runs SGLang's engine and its tokenizer manager."""

    def __init__(
        self, options: EngineOptions, engine: Any, processor: ImageProcessor | None, updates_draft: bool
    ) -> None:
        super().__init__(options)
        self._processor, self._models = processor, (TARGET, DRAFT) if updates_draft else (TARGET,)
        self._engine, self._manager = engine, engine.tokenizer_manager
        self._tp: int = engine.server_args.tp_size
        self._adapters: str | None = None  # SGLang's name of the adapters that requests use
        self._num_loads = 0
        self._loads: Counter[str] = Counter()  # counts of the load that no sample has brought to the rank
        self._in_session, self._beginning = False, asyncio.Lock()

    async def generate(self, requests: Mapping[str, dict[str, Any]]) -> Mapping[str, Awaitable[Result]]:
        """Implements `EngineHost.generate`, by one request of SGLang's for all of them."""
        of_each = [request_fields(request) for request in requests.values()]
        lists = {name: [fields[name] for fields in of_each] for name in ("input_ids", "sampling_params")}
        fields = of_each[0] | lists | {"rid": list(requests), "lora_path": self._adapters}  # the rest is shared
        if self._processor and any(request["images"] for request in requests.values()):
            fields["image_data"] = [self._images(self._processor, request["images"]) for request in requests.values()]
        # Not by the engine's method, which does not take all fields of a request.
        batch = self._manager.generate_request(internals.request("GenerateReqInput", **fields), None)
        try:
            responses = await anext(batch)
        except Exception:
            if len(requests) == 1:
                raise
            # SGLang refuses a list for one of its requests: the others are generated.
            return {rid: self._alone(rid, request) for rid, request in requests.items()}
        waiting = set(requests)
        pairs = zip(requests.items(), responses, strict=True)
        return {rid: self._sample(rid, request, response, batch, waiting) for (rid, request), response in pairs}

    async def _alone(self, rid: str, request: dict[str, Any]) -> Result:
        return await (await self.generate({rid: request}))[rid]

    async def _sample(
        self,
        rid: str,
        request: dict[str, Any],
        response: AsyncGenerator[dict[str, Any]],
        batch: AsyncGenerator[object],
        waiting: set[str],
    ) -> Result:
        """Returns the sample of a request, and ends its batch when no other request of it is `waiting`."""
        try:
            sample = parse_response(await anext(response), request["top_logprobs"])
        finally:
            waiting.discard(rid)
            if not waiting:
                await anext(batch, None)
        loads, self._loads = self._loads, Counter()
        return sample | {"counts": sample["counts"] | loads}

    def _images(self, processor: ImageProcessor, encoded: Sequence[str]) -> list[dict[str, Any]]:
        # In this form SGLang takes the token ids as they are; from files it would make text of them and new ids.
        images = tuple(Image(base64.b64decode(text)) for text in encoded)
        return [{"format": "processor_output", **processor.model_inputs([images])}] if images else []

    def abort(self, rid: str | None) -> None:
        """Implements `EngineHost.abort`."""
        self._manager.abort_request(rid=rid or "", abort_all=rid is None)

    async def begin_load(self) -> None:
        """Opens SGLang's session of an update, unless one is open."""
        # `load` waits for it: schedulers drop complete requests in the step after, and refuse to flush a cache that has
        # any.
        async with self._beginning:
            if not self._in_session:
                selector = ALL if len(self._models) > 1 else TARGET
                await self._request("begin_weight_update", "BeginWeightUpdateReqInput", selector=selector)
                self._in_session = True

    async def load(self, payloads: Sequence[str], version: int | None, flush: bool) -> None:
        """Implements `EngineHost.load` by our weight loader."""
        is_last = version is not None
        await self._call_loader(payloads, is_last, flush_cache=flush, weight_version=str(version) if is_last else None)

    async def read(self, payloads: Sequence[str], is_last: bool) -> None:
        """Implements `EngineHost.read` by the same loader."""
        await self._call_loader(payloads, is_last, reads=True, flush_cache=False)

    async def _call_loader(self, payloads: Sequence[str], is_last: bool, reads: bool = False, **fields: Any) -> None:
        """Calls our weight loader in all schedulers, in a session of SGLang from the first payloads to the last."""
        await self.begin_load()
        # Not by the manager's methods, which wait for a response before they send the next request.
        sent = []
        for model in self._models:
            # Payloads are in the order of pp_rank * tp + tp_rank: every tp-th one is of the same tensor-parallel rank.
            by_rank = [payloads[rank :: self._tp] for rank in range(self._tp)]
            load = internals.request(
                "UpdateWeightsFromTensorReqInput",
                serialized_named_tensors=[merge_stages(stages, is_last, model == DRAFT, reads) for stages in by_rank],
                load_format=LOADER,
                selector=model,
                **fields,
            )
            sent.append(self._manager.update_weights_from_tensor_communicator(load))
        if is_last:
            sent.append(self._manager.end_weight_update_communicator(internals.request("EndWeightUpdateReqInput")))
            self._in_session = False
        for response in await asyncio.gather(*sent):
            _check(internals.merged(response))

    async def load_adapters(self, payloads: Sequence[str], version: int, config: dict[str, Any]) -> None:
        """Loads adapters under a new name, of which SGLang caches no keys and values yet, and unloads the others."""
        serialized = _by_value(*payloads)
        self._num_loads += 1
        name = f"policy-{version}-{self._num_loads}"
        await self._change_adapters(
            "load_lora_adapter_from_tensors",
            "LoadLoRAAdapterFromTensorsReqInput",
            lora_name=name,
            config_dict=config,
            serialized_named_tensors=[serialized] * self._tp,
        )
        previous, self._adapters = self._adapters, name
        # Only now: until the new name was set, requests used the previous one.
        if previous:
            await self._change_adapters("unload_lora_adapter", "UnloadLoRAAdapterReqInput", lora_name=previous)
        # What is cached for the old name is never read again.
        await self._manager.flush_cache()
        await self._manager.update_weight_version(
            internals.request("UpdateWeightVersionReqInput", new_version=str(version), abort_all_requests=False)
        )

    async def _change_adapters(self, method: str, kind: str, **fields: Any) -> None:
        result = await getattr(self._manager, method)(internals.request(kind, **fields), None)
        if not result.success:
            raise RuntimeError(result.error_message)

    async def sleep(self, weights: bool, kv: bool, timeout_s: float) -> None:
        """Waits until SGLang is idle, else its schedulers end when they release memory; then releases it."""
        try:
            await asyncio.wait_for(self._become_idle(), timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"{len(self.open_requests)} requests are not complete {timeout_s:.0f} s after they were aborted"
            ) from None
        await self._request("release_memory_occupation", "ReleaseMemoryOccupationReqInput", tags=_tags(weights, kv))

    async def wake(self, weights: bool, kv: bool) -> None:
        """Implements `EngineHost.wake`."""
        await self._request("resume_memory_occupation", "ResumeMemoryOccupationReqInput", tags=_tags(weights, kv))

    async def pause(self) -> None:
        """Pauses the schedulers, and puts running requests back into their queue unless the cache is kept."""
        # After "retract" keys and values are computed again: log-probs of later tokens are exactly of the new weights.
        mode = "in_place" if self.options.keep_cache else "retract"
        await self._manager.pause_generation(internals.request("PauseGenerationReqInput", mode=mode))

    async def unpause(self) -> None:
        """Continues generation in the schedulers."""
        # Its way to free memory asks CUDA for figures, also on a machine without.
        await self._manager.continue_generation(
            internals.request("ContinueGenerationReqInput", torch_empty_cache=False)
        )

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener: EngineListener | None
    ) -> None:
        """Serves the messages of ranks; a part on a further node ends with its first scheduler."""
        if self._manager is None:  # on node 0 SGLang itself looks after the schedulers
            self._start(self._end_with_schedulers())
        else:
            await self._manager.freeze_gc()  # of its schedulers, as `engine_host.main` does here
            self._start(self._observe_load())
        await super().serve(reader, writer, listener)

    async def _observe_load(self) -> None:
        # Reads the load while requests run, from memory that the schedulers share anyway: they are not asked.
        reader = self._manager.load_snapshot_reader
        # Wakes every LOAD_SECONDS and ends with the event loop.
        while True:
            await asyncio.sleep(LOAD_SECONDS)
            if self.open_requests:
                self._loads.update(load_counts([load.to_dict({"core"}) for load in reader.read_all()]))

    async def _end_with_schedulers(self) -> None:
        import psutil

        # Polls the schedulers; ends this process with the first one, by which the leading rank restarts the engine.
        schedulers = [psutil.Process(pid) for pid in self._engine.get_all_child_pids()]
        while all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in schedulers):
            await asyncio.sleep(CHECK_SECONDS)
        print("a scheduler of this node has ended", file=sys.stderr, flush=True)
        self.shutdown()
        os._exit(1)

    async def chosen(self) -> dict[str, str]:
        """Returns what the schedulers have made of the arguments; nothing on a further node of an engine."""
        return choices((await self._manager.get_internal_state())[0]) if self._manager else {}

    async def size(self) -> dict[str, int]:
        """Returns the size of all data-parallel schedulers; nothing on a further node of an engine."""
        return size(await self._manager.get_internal_state()) if self._manager else {}

    def shutdown(self) -> None:
        """Ends all processes of SGLang."""
        self._engine.shutdown()

    async def _become_idle(self) -> None:
        """Aborts all requests and waits until the schedulers have nothing left to do."""
        await self.abort_until_sent(None)
        # Polls by messages: each wakes a scheduler that sleeps while it is idle; a flush that waits inside SGLang would
        # take as long as its sleep.
        while not (await self._manager.flush_cache()).success:
            await asyncio.sleep(IDLE_RETRY_SECONDS)

    async def _request(self, method: str, kind: str, **fields: Any) -> None:
        result = await getattr(self._manager, method)(internals.request(kind, **fields), None)
        if result is not None:  # some manager calls return None on success
            _check(result)


def _check(result: tuple[bool, str]) -> None:
    success, message = result
    if not success:
        raise RuntimeError(str(message))


def _by_value(payload: str) -> str:
    """Returns the tensors of a payload as SGLang reads them."""
    tensors = dict(named_views(*open_payload(payload, torch.device("cpu"))))
    # A handle can be opened once, and all tensor-parallel ranks read these tensors; adapters are small.
    return pickled_by_value({name: view.clone() for name, view in tensors.items()})


def _tags(weights: bool, kv: bool) -> list[str]:
    """Returns SGLang's names of the selected parts; its graphs are only needed together with the cache."""
    return [tag for tag, selected in (("cuda_graph", kv), ("kv_cache", kv), ("weights", weights)) if selected]


def request_fields(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of SGLang's `generate` for a request."""
    parameters: dict[str, Any] = {
        "max_new_tokens": request["max_new_tokens"],
        "temperature": request["temperature"],
        "top_p": request["top_p"],
        "top_k": request["top_k"] or -1,  # SGLang's number for no limit
        "min_p": request["min_p"],
        "stop_token_ids": request["stop_token_ids"],
        # SGLang also stops at the model's end of sequence, unless it is to ignore all stop tokens.
        "ignore_eos": not request["stop_token_ids"],
        "skip_special_tokens": False,
    }
    if request["stop"]:
        # The tokens of the string are part of the response, which is trained.
        parameters |= {"stop": request["stop"], "no_stop_trim": True}
    if request["excluded_token_ids"]:
        parameters["logit_bias"] = {str(token): EXCLUDED for token in request["excluded_token_ids"]}
    if request["seed"] is not None:
        parameters["sampling_seed"] = request["seed"]
    fields: dict[str, Any] = {"input_ids": request["tokens"], "sampling_params": parameters, "return_logprob": True}
    if request["routed_experts"]:
        fields["return_routed_experts"] = True
    if request["selected_keys"]:
        fields["return_indexer_topk"] = True
    if request["returns_support"]:
        fields["return_sampling_mask"] = True
        # SGLang refuses to report the candidates without a limit of their number.
        parameters["top_k"] = min(request["top_k"] or request["vocab"], request["vocab"])
    if request["top_logprobs"]:
        fields["top_logprobs_num"] = request["top_logprobs"]
    return fields


def image_fields(request: dict[str, Any], processor: ImageProcessor) -> dict[str, Any]:
    """Returns the arguments of a server's `generate` for the images of a request."""
    images = tuple(Image(base64.b64decode(text)) for text in request["images"])
    return {
        # SGLang expands the placeholders again, and leaves all other tokens as they are. JSON has no tensors: a server
        # gets files, an engine pixels.
        "input_ids": processor.unexpanded(request["tokens"], images),
        "image_data": [image.data_url for image in images],
    }


def parse_response(response: dict[str, Any], top_logprobs: int) -> dict[str, Any]:
    """Extracts the fields of a sample from SGLang's response to a request; see `EngineHost.generate`."""
    meta = response["meta_info"]
    logprobs = full = [entry[0] for entry in meta["output_token_logprobs"]]
    likeliest = [_pairs(entries) for entries in meta.get("output_top_logprobs") or ()] if top_logprobs else []
    if (candidates := meta.get("output_token_sampling_mask")) is not None:
        logprobs = meta["output_token_sampling_logprobs"]
        # Those are under the full distribution, these under that of the candidates, which are its likeliest tokens.
        parts = zip(likeliest, candidates, full, logprobs, strict=True) if likeliest else ()
        likeliest = [_under_support(*part) for part in parts]
    return {
        "tokens": response["output_ids"],
        "logprobs": logprobs,
        "support": candidates and support_to_wire(candidates),
        "top": top_to_wire(likeliest, top_logprobs) if likeliest else None,
        "finish": meta["finish_reason"]["type"],
        "spans": meta.get("weight_versions") or [],
        "routed_experts": meta.get("routed_experts"),
        "selected_keys": meta.get("indexer_topk"),
        "counts": _counts(meta),
    }


def _pairs(entries: Sequence[Sequence[Any]]) -> list[tuple[float, int]]:
    # JSON has no infinity, the log-prob of a token whose probability is rounded to 0.
    return [(logprob, token) for logprob, token, *_ in entries if logprob is not None]


def _under_support(
    entries: list[tuple[float, int]], candidates: Sequence[int], full: float, inside: float
) -> list[tuple[float, int]]:
    """Returns the candidates among the likeliest tokens, by the log-probs of the drawn token in both distributions."""
    kept = set(candidates)
    return [(logprob - full + inside, token) for logprob, token in entries if token in kept]


def size(states: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns the fields of `EngineHost.size`, from the state of each data-parallel scheduler."""
    return {
        "max_running": sum(state["effective_max_running_requests_per_dp"] for state in states),
        "cache_tokens": sum(state["memory_usage"]["token_capacity"] for state in states),
    }


def load_counts(loads: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns the counts of an observation, from the load of each data-parallel scheduler; {} without any."""
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens")
    return observed_load(*(sum(load[name] for load in loads) for name in names)) if loads else {}


def _counts(meta: dict[str, Any]) -> dict[str, int]:
    # A request that was aborted before it started has neither.
    counts = {PROMPT: meta.get("prompt_tokens", 0), CACHED: meta.get("cached_tokens", 0)}
    if "spec_verify_ct" in meta:  # with speculative decoding
        counts[DRAFTED], counts[ACCEPTED] = meta["spec_num_proposed_drafts"], meta["spec_num_correct_drafts"]
        counts[VERIFIED], counts[GENERATED] = meta["spec_verify_ct"], meta["completion_tokens"]
    return counts


def create(arguments: dict[str, Any], options: EngineOptions, loop: asyncio.AbstractEventLoop) -> SGLangHost:
    """Starts SGLang and returns its host."""
    processor = ImageProcessor.read(arguments["model_path"])
    return SGLangHost(options, internals.start_engine(arguments), processor, has_multi_token_draft(arguments))


if __name__ == "__main__":
    engine_host.main(create, "sglang.srt.entrypoints.engine")
