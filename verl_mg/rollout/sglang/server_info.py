"""What an SGLang server tells of itself, and whether a job can use it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from verl_mg.errors import UserError
from verl_mg.http_client import JsonSession, RefusedError, UnreachableError
from verl_mg.models.hf_config import HFConfig

ASK_SECONDS = 60.0
"""How long a question may take."""
NO_TOKEN = 2**31 - 1


@dataclass(frozen=True)
class ServerInfo:
    """What a server is. `start` differs whenever it was started anew."""

    start: str
    version: str
    device: str
    model: str
    architecture: str
    vocab: int | None
    context: int
    tp: int
    dp: int
    pp: int
    max_running: int
    seeded: bool
    routed: bool


@dataclass(frozen=True)
class ServerRequirements:
    """What a job asks of a server: the same model, room for `max_tokens` of a prompt with its answer.

    routed: (layers, experts of a token), where it must tell which experts tokens went to. group_device: what the
    job computes on, where the server's ranks join it in a process group. seeded: samples depend on their seeds alone.
    """

    model: HFConfig
    max_tokens: int
    routed: tuple[int, int] | None = None
    group_device: str | None = None
    seeded: bool = False


def probe_server(url: str, demand: ServerRequirements) -> ServerInfo:
    """What the server at `url` is. UserError naming the URL and the remedy where none answers, or not the right one."""
    client = JsonSession(url)
    try:
        info = client.start(describe(client)).result()
    except UnreachableError as error:
        raise UserError(f"{client.url}: no server answers ({error}); start it, or correct rollout.urls") from None
    finally:
        client.close()
    check(client.url, info, demand)
    return info


async def describe(client: JsonSession) -> ServerInfo:
    """Ask a server what it is. UserError where it is no SGLang server; UnreachableError, while it starts too."""
    try:
        told = await client.get("/server_info", ASK_SECONDS)
        model = await client.get("/model_info", ASK_SECONDS)
        models = await client.get("/v1/models", ASK_SECONDS)
        return ServerInfo(
            start=json.dumps([told["startup_time"], told["random_seed"]]),
            version=told["version"],
            device=told["device"],
            model=model["model_path"],
            architecture=model["model_type"] or "model without a type",
            vocab=await _vocabulary(client),
            context=models["data"][0]["max_model_len"],
            tp=told["tp_size"],
            dp=told["dp_size"],
            pp=told["pp_size"],
            max_running=told["internal_states"][0]["effective_max_running_requests_per_dp"] * told["dp_size"],
            seeded=bool(told["enable_deterministic_inference"]),
            routed=bool(told["enable_return_routed_experts"]),
        )
    except RefusedError as error:
        if error.status >= 500:
            raise UnreachableError(str(error)) from None
        raise UserError(f"{client.url}: not an SGLang server ({error}); correct rollout.urls") from None
    except (KeyError, IndexError, TypeError) as error:
        raise UserError(f"{client.url}: not a server of SGLang 0.5.23 or newer (no {error}); start one") from None


def check(url: str, info: ServerInfo, demand: ServerRequirements) -> None:
    """UserError naming the URL and the remedy where the server is not what is asked for."""
    model, same = demand.model, "start the server with --model-path of the same model"
    if info.architecture != model.architecture:
        raise UserError(f"{url}: serves {info.model}, a {info.architecture}, not a {model.architecture}: {same}")
    if info.vocab not in (None, model.vocab):
        raise UserError(f"{url}: serves {info.model} with a vocabulary of {info.vocab}, not of {model.vocab}: {same}")
    needed = min(demand.max_tokens, model.max_positions)
    if info.context < needed:
        raise UserError(
            f"{url}: takes {info.context} tokens, a prompt with its answer may have {needed}: start the server with "
            f"--context-length {needed}, or lower data.max_prompt_tokens or rollout.max_new_tokens"
        )
    if demand.routed and not info.routed:
        raise UserError(f"{url}: rollout.replay_routing needs a server with --enable-return-routed-experts")
    if demand.seeded and not info.seeded:
        raise UserError(f"{url}: job.deterministic needs a server with --enable-deterministic-inference")
    if demand.group_device is None:
        return
    if info.device != demand.group_device:
        raise UserError(
            f"{url}: computes on {info.device}, the job on {demand.group_device}, so no group can hold both: write "
            "rollout.weight_transfer=disk"
        )
    if max(info.dp, info.pp) > 1:
        # Their ranks would all have the numbers of the first stage's.
        raise UserError(
            f"{url}: has dp_size {info.dp} and pp_size {info.pp}, rollout.weight_transfer=process_group takes "
            "only tp; start it with "
            "--tp-size alone, or write rollout.weight_transfer=disk"
        )


async def _vocabulary(client: JsonSession) -> int | None:
    """The size of the vocabulary, which SGLang tells only when it refuses a token that is not in it."""
    question = {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [NO_TOKEN],
    }
    try:
        await client.post("/generate", question, ASK_SECONDS)
    except RefusedError as error:
        if found := re.search(r"valid range is \[0, (\d+)\)", str(error)):
            return int(found.group(1))
    return None
