"""Properties of an SGLang server, the check that a job can use it, and the keys for it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_mg.engines.sglang.arguments import EXPERT_RUNNER, FP8_PRODUCTS, IN_ORDER, MXFP8_IN_ORDER, QUANTIZATIONS
from verl_mg.engines.sglang.host import size
from verl_mg.engines.sglang.shard_receiver import RECEIVER
from verl_mg.errors import UserError
from verl_mg.http_client import JsonSession, RefusedError, UnreachableError
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import HFConfig
from verl_mg.reshard.encoding import Wire

QUERY_SECONDS = 60.0
UNAUTHORIZED, FORBIDDEN = 401, 403
Role = Literal["null", "prefill", "decode"]  # values of SGLang's `--disaggregation-mode`
INVALID_TOKEN = 2**31 - 1  # token id outside of every vocabulary
# Paths that SGLang protects with its `--api-key`; others that we use with `--admin-api-key`, where there is one.
OPEN_TO_ALL = ("/generate", "/server_info", "/model_info", "/v1/")


@dataclass(frozen=True)
class ServerKeys:
    """Keys of all servers of a job, which are in no message and no file; empty ones are not sent."""

    api: str = field(default="", repr=False)  # key of SGLang's argument `--api-key`
    admin: str = field(default="", repr=False)  # key of SGLang's argument `--admin-api-key`

    @classmethod
    def from_environment(cls, api_variable: str | None, admin_variable: str | None) -> ServerKeys:
        """Reads the keys of a job from variables of its environment; None: servers without such a key."""
        return cls(read_key("rollout.api_key_env", api_variable), read_key("rollout.admin_key_env", admin_variable))

    def headers(self, path: str) -> dict[str, str]:
        """Returns the HTTP headers of a request to a path."""
        key = self.api if path.startswith(OPEN_TO_ALL) else self.admin or self.api
        return {"Authorization": f"Bearer {key}"} if key else {}


NO_KEYS = ServerKeys()


def read_key(key: str, variable: str | None) -> str:
    """Returns the key in an environment variable, "" for None; UserError where it is not set or not printable."""
    if variable is None:
        return ""
    value = os.environ.get(variable, "").strip()
    if not value:
        raise UserError(f"{key}={variable}: this environment variable is not set. Set it on every rank.")
    if not (value.isascii() and value.isprintable()):
        raise UserError(f"{key}={variable}: the value of this environment variable is not printable ASCII. Correct it.")
    return value


@dataclass(frozen=True)
class ServerInfo:
    """Properties of a running server."""

    start: str  # id of its start; it differs after a restart
    version: str
    device: str
    model: str
    architecture: str  # type of its model, as in config.json
    vocab: int | None  # size of the vocabulary, where known
    context: int  # largest number of tokens of a prompt with its response
    tp: int
    dp: int
    pp: int
    max_running: int  # largest number of requests at the same time
    cache_tokens: int  # size of its key-value cache
    seeded: bool  # whether samples depend only on their seeds
    routed: bool  # whether samples contain the experts of each token
    disaggregation: str  # its part in a pair of servers for prefill and decoding; "null" for a server that does both
    layout: str  # parallel sizes of one replica, as `EngineLayout` parses them
    nodes: int  # number of machines that it spans
    shard_obstacle: str  # reason why its ranks cannot receive their shards; empty where they can
    reads_text: bool = True  # whether it has a tokenizer
    bootstrap_port: int = 0  # port at which decode servers find this one, if it does prefill
    expert_runner: str = "auto"  # its runner of experts; "auto": the layers choose one that reads them in order
    max_candidates: int = 0  # largest number of candidates of a token that it reports
    draft: str | None = None  # its way of speculative decoding


@dataclass(frozen=True)
class ServerRequirements:
    """Properties of a server that a job needs."""

    model: HFConfig
    max_tokens: int  # number of tokens of the longest prompt with its response
    routed: tuple[int, int] | None = None  # (layers, experts per token) that samples must contain
    group_device: str | None = None  # device type of the job, where the server's ranks join a process group with it
    seeded: bool = False  # whether samples must depend only on their seeds
    shards: bool = False  # whether its ranks must be able to receive their shards
    wire: Wire = "cast"  # form in which the job sends weights
    role: Role = "null"  # its part in a pair of servers; null: it does prefill and decoding
    in_flight: bool = False  # whether weights must reach it with requests in flight
    candidates: int = 0  # number of candidates that a token may have, all of which samples must contain; 0: of none


def probe_server(url: str, requirements: ServerRequirements, keys: ServerKeys) -> ServerInfo:
    """Queries a server and checks it; UserError where it does not respond or does not meet the requirements."""
    client = JsonSession(url, keys.headers)
    try:
        info = client.start(describe(client, wire=requirements.wire)).result()
    except UnreachableError as error:
        raise UserError(f"{client.url}: no server responds ({error}). Start it, or correct rollout.urls.") from None
    finally:
        client.close()
    check(client.url, info, requirements)
    return info


async def describe(client: JsonSession, known: ServerInfo | None = None, wire: Wire = "cast") -> ServerInfo:
    """Queries the properties of a server; UserError for another kind of server, UnreachableError while it starts.

    With its earlier properties (`known`) no generation is involved unless it was restarted: it may be paused.
    """
    try:
        server = await client.get("/server_info", QUERY_SECONDS)
        model = await client.get("/model_info", QUERY_SECONDS)
        models = await client.get("/v1/models", QUERY_SECONDS)
        # SGLang has no id of a start: these are the seconds that its parts took, and a seed that it draws by default.
        start = json.dumps([server["startup_time"], server["random_seed"]])
        return ServerInfo(
            start=start,
            version=server["version"],
            device=server["device"],
            model=model["model_path"],
            architecture=model["model_type"] or "model without a type",
            vocab=known.vocab if known and known.start == start else await _vocabulary(client),
            context=models["data"][0]["max_model_len"],
            tp=server["tp_size"],
            dp=server["dp_size"],
            pp=server["pp_size"],
            **size(server["internal_states"]),
            seeded=bool(server["enable_deterministic_inference"]),
            routed=bool(server["enable_return_routed_experts"]),
            disaggregation=server["disaggregation_mode"],
            layout=str(_layout(server)),
            nodes=server["nnodes"],
            shard_obstacle=_shard_obstacle(server, wire),
            reads_text=not server["skip_tokenizer_init"],
            bootstrap_port=server["disaggregation_bootstrap_port"],
            expert_runner=server["moe_runner_backend"],
            max_candidates=server["sampling_mask_max_tokens"],
            draft=server["speculative_algorithm"],
        )
    except RefusedError as error:
        if error.status >= 500:  # it is starting
            raise UnreachableError(str(error)) from None
        if error.status in (UNAUTHORIZED, FORBIDDEN):
            raise UserError(
                f"{client.url}: refuses the job's key ({error}). Write the name of an environment variable with the "
                "server's --api-key as rollout.api_key_env."
            ) from None
        raise UserError(f"{client.url}: not an SGLang server ({error}). Correct rollout.urls.") from None
    except (KeyError, IndexError, TypeError) as error:
        raise UserError(
            f"{client.url}: not a server of SGLang 0.5.23 or newer ({error} is missing). Start one."
        ) from None


def check(url: str, info: ServerInfo, requirements: ServerRequirements) -> None:
    """Checks that a server meets the requirements; UserError for the first one that it does not meet."""
    for problem in _problems(info, requirements):
        raise UserError(f"{url}: {problem}")


def _problems(info: ServerInfo, needs: ServerRequirements) -> Iterator[str]:
    model, same = needs.model, "Start the server with --model-path of the same model."
    if info.architecture != model.architecture:
        yield f"serves {info.model}, a {info.architecture} instead of a {model.architecture}. {same}"
    if info.vocab not in (None, model.vocab):
        yield f"serves {info.model} with a vocabulary of {info.vocab} instead of {model.vocab}. {same}"
    if info.disaggregation != needs.role:
        fix = "Name a pair as PREFILL_URL+DECODE_URL in rollout.urls, and any other by its URL."
        yield f"--disaggregation-mode is {info.disaggregation} instead of {needs.role}. {fix}"
    if needs.role != "null" and (needs.routed or needs.in_flight):
        key = "rollout.replay_routing=true" if needs.routed else "rollout.mode=async"
        yield f"pairs of servers for prefill and decoding do not support {key}. Leave it out."
    if needs.candidates and (needs.role != "null" or info.draft):
        what = f"--speculative-algorithm {info.draft}" if info.draft else "pairs of servers for prefill and decoding"
        yield f"the candidates of draws are not known with {what}. Set algorithm.support=full."
    if needs.candidates > info.max_candidates:
        wrong = f"reports {info.max_candidates} candidates of a token at most, and {needs.candidates} are possible"
        fix = f"--sampling-mask-max-tokens {needs.candidates}, or lower rollout.top_k, or set algorithm.support=full."
        yield f"{wrong}. Start the server with {fix}"
    length = min(needs.max_tokens, model.max_positions)
    if info.context < length:
        fix = f"--context-length {length}, or lower data.max_prompt_tokens or rollout.max_new_tokens."
        wrong = f"the context length is {info.context}, but a prompt with its response can have {length} tokens"
        yield f"{wrong}. Start the server with {fix}"
    if needs.routed and not info.routed:
        yield "rollout.replay_routing is not supported. Start the server with --enable-return-routed-experts."
    if model.experts and (needs.routed or needs.shards) and info.expert_runner not in ("auto", *IN_ORDER):
        wrong = (
            f"--moe-runner-backend is {info.expert_runner}, which does not read experts in the order in which they are"
        )
        yield f"{wrong} sent, or does not report them. Start the server with --moe-runner-backend {EXPERT_RUNNER}."
    if needs.seeded and not info.seeded:
        yield "job.deterministic is not supported. Start the server with --enable-deterministic-inference."
    if needs.shards and info.shard_obstacle:
        fix = f"Start the server with --custom-weight-loader {RECEIVER}, or set rollout.weight_transfer=broadcast."
        yield f"its ranks cannot receive their shards: {info.shard_obstacle}. {fix}"
    if needs.group_device is None:
        return
    if info.device != needs.group_device:
        both = f"runs on {info.device}, the job on {needs.group_device}: no process group can contain both"
        yield f"{both}. Set rollout.weight_transfer=disk."
    if max(info.dp, info.pp) > 1:
        # SGLang gives the ranks of all replicas and stages the same rank in the group.
        wrong = f"has dp_size {info.dp} and pp_size {info.pp}, rollout.weight_transfer=process_group supports only tp"
        yield f"{wrong}. Start it with only --tp-size, or set rollout.weight_transfer=disk."


def _layout(server: dict[str, Any]) -> EngineLayout:
    return EngineLayout(
        tp=server["tp_size"], pp=server["pp_size"], ep=server["ep_size"], adp=server.get("attn_dp_size", 1)
    )


def _shard_obstacle(server: dict[str, Any], wire: Wire) -> str:
    """Returns the first argument of a server that keeps its ranks from receiving their shards."""
    if RECEIVER not in (server["custom_weight_loader"] or ()):
        return f"it was started without --custom-weight-loader {RECEIVER}"
    if server["pp_size"] > 1:
        return "it has pipeline stages, which SGLang calls one after the other"
    given = json.loads(server["json_model_override_args"] or "{}").get("quantization_config")
    if server["quantization"] is not None or given != QUANTIZATIONS[wire]:
        form = json.dumps({"quantization_config": QUANTIZATIONS[wire]})
        return (
            f"its weights are quantized in another way (--quantization {server['quantization']}, quantization_config "
            f"{json.dumps(given)}) than the job sends them, --json-model-override-args '{form}'"
        )
    if wire == "mxfp8" and server[FP8_PRODUCTS] not in MXFP8_IN_ORDER:
        return f"its --fp8-gemm-backend {server[FP8_PRODUCTS]} reads weights in another order than they are sent in"
    if server["enable_eplb"] or server["ep_num_redundant_experts"] or server["init_expert_location"] != "trivial":
        return "its experts are not in the order of the checkpoint (--enable-eplb and the like)"
    return ""


async def _vocabulary(client: JsonSession) -> int | None:
    """Returns the size of the vocabulary, which SGLang reports only when it rejects an unknown token."""
    query = {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [INVALID_TOKEN],
    }
    try:
        await client.post("/generate", query, QUERY_SECONDS)
    except RefusedError as error:
        if match := re.search(r"valid range is \[0, (\d+)\)", str(error)):
            return int(match.group(1))
    return None
