"""Requests per second of SGLang or vLLM by its Python API, run by the engine's interpreter, see `bench_requests`.

Reads a line of JSON with the engine, its arguments and the prompts, and says that it is ready; for each further line
generates all requests once and prints the seconds and the CPU seconds of its processes.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

import psutil


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Returns the CPU seconds of a process, and of all processes that it has started."""
    process = psutil.Process(pid)
    of_each = [sum(part.cpu_times()[:2]) for part in (process, *process.children(recursive=True))]
    return of_each[0], sum(of_each[1:])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print lines too
    task = json.loads(sys.stdin.readline())
    generate = {"sglang": _sglang, "vllm": _vllm}[task["engine"]](task)
    print(json.dumps("ready"), file=answers, flush=True)
    for _ in sys.stdin:
        before, started = cpu_seconds(os.getpid()), time.perf_counter()
        generated = generate()
        seconds, after = time.perf_counter() - started, cpu_seconds(os.getpid())
        assert generated == [task["tokens"]] * len(task["prompts"])
        print(
            json.dumps([seconds, *(end - begin for begin, end in zip(before, after, strict=True))]),
            file=answers,
            flush=True,
        )
    os._exit(0)  # the engine's processes end with this one


def _sglang(task: dict[str, Any]) -> Any:
    from sglang import Engine

    engine = Engine(**task["arguments"])
    sampling = {"max_new_tokens": task["tokens"], "temperature": 1.0, "ignore_eos": True}

    def generate() -> list[int]:
        done = engine.generate(input_ids=task["prompts"], sampling_params=sampling, return_logprob=True)
        return [len(sample["output_ids"]) for sample in done]

    return generate


def _vllm(task: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    async def start() -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**task["arguments"]))

    loop = asyncio.new_event_loop()
    engine = loop.run_until_complete(start())
    sampling = SamplingParams(
        max_tokens=task["tokens"],
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def num_tokens(number: int, prompt: list[int]) -> int:
        stream = engine.generate({"prompt_token_ids": prompt}, sampling, str(number))
        return [len(done.outputs[0].token_ids) async for done in stream][-1]

    async def every() -> list[int]:
        return await asyncio.gather(*(num_tokens(number, prompt) for number, prompt in enumerate(task["prompts"])))

    return lambda: loop.run_until_complete(every())


if __name__ == "__main__":
    main()
