"""Serves an environment of verifiers (verifiers 0.4) over HTTP; runs in its Python environment, without this project.

    pip install verifiers MY_TASKSET
    python serve_verifiers.py --env '{"taskset": {"id": "MY_TASKSET"}, "agent": {"runtime": {"type": "subprocess"}}}'
    python serve_verifiers.py --env ... --write-tasks train.jsonl

`--env` is the block [env] of `vf-eval` as JSON, or the path of a TOML file with it. `--write-tasks` writes the data for
`data.train` instead of serving: a line with `prompt` and `task` for each task.

POST /run {"base_url", "api_key", "model", "task", "max_tokens"} -> {"reward", "metrics", "errors"}: plays an episode of
the task with the endpoint as the model of the agents without one. An ended connection ends its episode.
"""

import argparse
import json
import os
import socket
import tomllib
import uuid
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from aiohttp import web
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.env import Env
from verifiers.v1.episode import Episode
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


def main() -> None:
    """Reads the arguments and serves until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", required=True, help="JSON, or a TOML file with a block [env]")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one, which the first line of output names")
    parser.add_argument("--write-tasks", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    is_file = arguments.env.endswith(".toml")
    content = tomllib.loads(Path(arguments.env).read_text())["env"] if is_file else json.loads(arguments.env)
    env = load_environment(resolve_env_config(content))
    if arguments.write_tasks:
        arguments.write_tasks.write_text("".join(json.dumps(line) + "\n" for line in _lines(env)))
        return
    with socket.create_server((arguments.host, arguments.port), backlog=1024) as listener:
        print(f"http://{arguments.host}:{listener.getsockname()[1]}", flush=True)
        web.run_app(_app(env), sock=listener, print=None, handler_cancellation=True)


def _lines(env: Env) -> Iterable[dict[str, Any]]:
    if not env.taskset.bounded:
        raise SystemExit("error: the taskset is infinite, so its tasks cannot be written")
    for task in env.taskset:
        data = task.data.model_dump(mode="json")
        prompt = data["prompt"]
        prompt = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt or ""}]
        system = [{"role": "system", "content": data["system_prompt"]}] if data["system_prompt"] else []
        yield {"prompt": [*system, *prompt], "task": data}


def _app(env: Env) -> web.Application:
    task_class = type(env.taskset).task_type()

    async def run(request: web.Request) -> web.Response:
        body = await request.json()
        task = task_class(task_class.data_type().model_validate(body["task"]), env.config.taskset.task)
        # verifiers takes keys from variables only, and hides those with API_KEY in their names from programs.
        variable = f"API_KEY_{uuid.uuid4().hex}"
        os.environ[variable] = body["api_key"]
        try:
            client = EvalClientConfig(base_url=body["base_url"], api_key_var=variable)
            sampling = SamplingConfig(max_tokens=body.get("max_tokens"))
            context = ModelContext(model=body["model"], client=client, sampling=sampling)
            (slot,) = env.slots(task)
            return web.json_response(_result(await env.run_slot(slot, context)))
        finally:
            del os.environ[variable]

    async def serving(app: web.Application) -> AsyncIterator[None]:
        async with env.serving():
            yield

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/run", run)
    app.cleanup_ctx.append(serving)
    return app


def _result(episode: Episode) -> dict[str, Any]:
    """The mean reward of the traces of the model that is trained, and their metrics."""
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    errors = [f"{error.type}: {error.message}" for source in (episode, *episode.traces) for error in source.errors]
    if not traces:
        return {"reward": None, "metrics": {}, "errors": errors or ["no trace of a trainable agent"]}
    metrics: dict[str, list[float]] = {}
    for trace in traces:
        for name, value in trace.metrics.items():
            metrics.setdefault(name, []).extend([] if value is None else [value])
    return {
        "reward": sum(trace.reward for trace in traces) / len(traces),
        "metrics": {name: sum(values) / len(values) for name, values in metrics.items() if values},
        "errors": errors,
    }


if __name__ == "__main__":
    main()
