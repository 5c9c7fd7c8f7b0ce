"""Checks of one family of `transformers` on a tiny model of it, each in a process that the sweep can end.

rows      log-probs of the backend fsdp, packed or row by row, against the family's module by itself
tp2       the same on two ranks of tensor parallelism
train     GRPO for two iterations with the engine hf, export and reload
sglang    one iteration of GRPO on an engine, whose log-probs must be the trainer's; sglang2: on two ranks
vllm      the same
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.errors import EXIT_CODE, UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

TOLERANCE, MISMATCH = 1e-5, 1e-4  # of the largest log-prob of a token; nats between engine and trainer
ROWS = (17, 64, 5, 64, 2)  # tokens of the rows that are compared
LONGEST_ROW = 4096  # of the job that a tiny model stands for: beyond the windows of most families
STD = 0.2  # of the weights: so large that every part of the network shows in its outputs
SMALLER_STDS = (0.1, 0.05, 0.02)  # where the output is certain at the usual one, as of a wide tied embedding
LEAST_ENTROPY, CERTAIN = 0.5, 0.05  # nats: of a model that is made, and of one whose equal log-probs say nothing
# Twelve passes through the same layers: at 0.2 the family's float32 is 7e-3 nats from its float64.
STDS = {"hrm_text": 0.05}
SEED = 7
PYTHON = "{}_PYTHON".format  # variable of the environment with the interpreter of an engine's processes
# What kernels of engines need on the CPU: widths of heads, a divisor of other widths, and the sizes of latents.
HEADS, MULTIPLE = (32, 64, 128), 64
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_head_dim": 96, "head_dim": 64}
WITH_LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")
MEDIA = {
    f"{name}_token": f"<{name}>" for name in ("image", "boi", "eoi", "video", "audio", "vision_start", "vision_end")
}
"""Tokens of images and sounds by the names with which processors ask a tokenizer for them."""
QWEN4 = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
COMPASS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [22, 22, 20]}
ALWAYS_NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **{"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3},
        "topk_method": "group_limited_greedy",  # with groups, which engines read, the default would ignore them
    },
    # As of the published model: vLLM reads both, where `transformers` has them in its code.
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 4},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "gemma3": {"mm_tokens_per_image": 49},  # of 14 * 14 patches of its tower's default
    "cohere_compass_text": {"rope_parameters": {"full_attention": COMPASS}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "reformer": {"is_decoder": True},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}
"""Fields without which the configuration of a family builds no module that runs."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a check: works, packed, unpacked, refused, different, crashed or unbuildable, and a line about it."""

    outcome: str
    detail: str = ""


def make_model(family: str, folder: Path) -> Outcome:
    """Writes a tiny model of a family, the shrunk copy of its default configuration, with a tokenizer."""
    from transformers import CONFIG_MAPPING

    from verl_mg.models.shrunk_config import Widths, shrink
    from verl_mg.models.tiny_model import character_tokenizer, perturb_vectors
    from verl_mg.models.transformers_module import module_class

    try:
        config = CONFIG_MAPPING[family](**ALWAYS_NEEDED.get(family, {}))
        with torch.device("meta"):
            module_class(config).from_config(config)
    except Exception as error:
        return Outcome("unbuildable", f"from its defaults: {type(error).__name__}: {' '.join(str(error).split())}")
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or LONGEST_ROW
    copy, failure = None, ""
    for widths in (Widths(HEADS, MULTIPLE), Widths()):
        try:
            copy = copy or shrink(config, min(LONGEST_ROW, positions), widths=widths).config
        except UserError as error:
            failure = str(error)
    if copy is None:
        return Outcome("unbuildable", failure)
    if family in WITH_LATENT:
        copy = type(copy).from_dict(copy.to_dict() | LATENT)
    tokenizer = character_tokenizer("0123456789+-*/= abcdefgh", MEDIA.values(), named=MEDIA)
    parts = (copy, copy.get_text_config(decoder=True))
    for part in parts:
        part.pad_token_id, part.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
        for name, word in MEDIA.items():
            for field in {f"{name}_id", f"{name}_index"} & vars(part).keys():
                setattr(part, field, tokenizer.convert_tokens_to_ids(word))
    for std in (STDS.get(family, STD), *SMALLER_STDS):
        for part in parts:
            if hasattr(part, "initializer_range"):
                part.initializer_range = std
        torch.manual_seed(SEED)
        module = module_class(copy).from_config(copy, dtype=torch.float32)
        perturb_vectors(module)
        if not _is_certain(module):
            break
    module.save_pretrained(folder)
    copy.save_pretrained(folder)  # the module's may be of a part
    _processor(copy, tokenizer).save_pretrained(folder)
    size = sum(parameter.numel() for parameter in module.parameters())
    return Outcome("works", f"{copy.get_text_config(decoder=True).num_hidden_layers} layers, {size:,} weights")


@torch.no_grad()
def _is_certain(module: Any) -> bool:
    """Whether a module gives nearly all of the probability to one token, so that equal log-probs say nothing."""
    row = torch.randint(6, 30, (1, max(ROWS)), generator=torch.Generator().manual_seed(SEED))
    with suppress(Exception):  # of any kind: the checks say why a family does not run
        logprobs = module.eval()(input_ids=row, use_cache=False).logits[0].float().log_softmax(-1)
        return float(-(logprobs.exp() * logprobs).sum(-1).mean()) < LEAST_ENTROPY
    return False


def _processor(config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Returns the processor of a family that reads images, for the pixels that its tower has; else the tokenizer."""
    from transformers import FEATURE_EXTRACTOR_MAPPING, IMAGE_PROCESSOR_MAPPING, PROCESSOR_MAPPING
    from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING

    from verl_mg.models.transformers_module import has_images

    family: Any = type(config)
    kind: Any = PROCESSOR_MAPPING.get(family, None)
    if not (has_images(config) and kind):
        return tokenizer

    def images() -> Any:
        parts, tower = IMAGE_PROCESSOR_MAPPING[family]["torchvision"], config.vision_config.to_dict()
        usual, side = parts(), tower.get("image_size")
        options = {"patch_size": tower["patch_size"]} if hasattr(usual, "patch_size") else {}
        if isinstance(side, int) and set(usual.size or ()) == {"height", "width"}:
            options["size"] = {"height": side, "width": side}
        return parts(**options)

    parts = {
        "tokenizer": lambda: tokenizer,
        "image_processor": images,
        "video_processor": lambda: VIDEO_PROCESSOR_MAPPING[family]["torchvision"](),
    }
    others = {name: lambda: FEATURE_EXTRACTOR_MAPPING[family]() for name in kind.get_attributes()}
    return kind(**{name: make() for name, make in (others | parts).items() if name in others})


def compare_rows(model: Path) -> Outcome:
    """Compares log-probs of the backend fsdp with what the family's module computes by itself, row by row."""
    from verl_mg.distributed.world import World

    if not dist.is_initialized():
        World.join()
    rank, size = dist.get_rank(), dist.get_world_size()
    form, reason, computed = backend_logprobs(model, size)
    if rank:
        return Outcome(form)
    expected = module_logprobs(model)
    worst, row = max((float((a - b).abs().max()), n) for n, (a, b) in enumerate(zip(computed, expected, strict=True)))
    bound = TOLERANCE * max(1.0, *(float(of_row.abs().max()) for of_row in expected))
    detail = f"{worst:.1e} nats in row {row} of {ROWS[row]} tokens{f'; packed: {reason}' if reason else ''}"
    return Outcome(form if worst <= bound else "different", detail)


def rows_of(model: Path) -> list[Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randint(6, 30, (length,), generator=generator) for length in ROWS]


@torch.no_grad()
def module_logprobs(model: Path) -> list[Tensor]:
    """Log-probs of each token given those before it, by the module as `transformers` runs it."""
    from verl_mg.models.transformers_module import module_class, read_module_config

    config = read_module_config(model)
    kind = module_class(config)
    module = kind.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    result = []
    for row in rows_of(model):
        logprobs = module(input_ids=row[None], use_cache=False).logits[0].float().log_softmax(-1)
        result.append(logprobs[:-1].gather(1, row[1:, None]).squeeze(1))
    return result


def backend_logprobs(model: Path, tp: int) -> tuple[str, str, list[Tensor]]:
    """Form of the rows, and the same log-probs, by the backend fsdp."""
    from verl_mg.batch import Batch
    from verl_mg.fsdp.mesh import MeshGroups
    from verl_mg.fsdp.model_runner import FsdpRunner
    from verl_mg.layout import Layout, Placement
    from verl_mg.training.model_spec import ModelSpec

    layout = Placement.on(Layout.parse(f"tp{tp}"), tp)
    runner = FsdpRunner(ModelSpec(model, torch.float32, longest_row=max(ROWS)), MeshGroups(layout))
    rows = rows_of(model)
    batch = Batch(torch.tensor(ROWS), {"tokens": torch.cat(rows)})
    batch["loss_mask"] = batch.positions >= 1
    form = "packed" if runner.form.is_packed else "unpacked"

    def report(_: Any, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return output.sum(), {"output": output.detach().clone()}

    with torch.no_grad():
        reports = runner.run([batch], 1.0, report, forward_only=True)
    outputs = torch.cat([each["output"] for each in reports], dim=1)[0]
    return form, runner.form.reason, list(outputs.split([length - 1 for length in ROWS]))


def train(model: Path) -> Outcome:
    """Trains a model for two iterations, and loads what was exported."""
    from verl_mg.models.transformers_module import module_class, read_module_config

    folder = model.parent / "run"
    metrics = _job(model, folder, 2)
    (exported,) = folder.glob("**/config.json")
    module = module_class(read_module_config(exported.parent)).from_pretrained(exported.parent)
    if infinite := [name for name, tensor in module.state_dict().items() if not torch.isfinite(tensor).all()]:
        return Outcome("different", f"{infinite[0]} is not finite")
    return _compared(metrics)


def resume(model: Path) -> Outcome:
    """Continues from the checkpoint of `train` for one iteration."""
    folder = model.parent / "run"
    before = _metrics(folder)
    metrics = _job(model, folder, 3)
    # The lines have times: they are equal only where the iterations were not repeated.
    return _compared(metrics) if metrics[:-1] == before else Outcome("different", "iterations were repeated")


def engine(model: Path, name: str, tp: int = 1) -> Outcome:
    """Trains a model for one iteration on an engine of another program."""
    folder = model.parent / f"run-{name}{tp}"
    python = os.environ[PYTHON(name)]
    settings = (f"rollout.engine={name}", f"rollout.layout=tp{tp}", f"rollout.python={python}")
    metrics = _job(model, folder, 1, *settings)
    received, needed = (metrics[-1][f"weight_sync/bytes_{kind}"] for kind in ("received", "lower_bound"))
    return _compared(metrics) if received == needed else Outcome("different", f"{received} bytes of {needed}")


def _compared(metrics: list[dict[str, float]]) -> Outcome:
    errors = [line["mismatch/max_abs"] for line in metrics]
    if min(entropies := [line["actor/entropy"] for line in metrics]) < CERTAIN:
        return Outcome(
            "different", f"tokens have an entropy of {min(entropies):.1e} nats, with which nothing is compared"
        )
    is_right = all(error <= MISMATCH for error in errors)  # NaN is an error too
    return Outcome("works" if is_right else "different", f"engine and trainer differ by {max(errors):.1e} nats")


def _job(model: Path, output: Path, iterations: int, *overrides: str) -> list[dict[str, float]]:
    """Runs a job and returns its metrics."""
    from verl_mg.cli import main

    data = model.parent / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}{'+1' * n}=", "answer": str(n)}) + "\n" for n in range(8)))
    settings = [
        f"model.path={model}",
        "actor.backend=fsdp",
        "actor.dtype=float32",
        f"data.train={data}",
        "reward.function=verl_mg.rewards.exact:score",
        "data.max_prompt_tokens=40",
        "rollout.max_new_tokens=6",
        "algorithm.prompts_per_iteration=4",
        "algorithm.group_size=2",
        f"job.output={output}",
        f"job.iterations={iterations}",
    ]
    main(["train", "grpo", *settings, *overrides])
    return _metrics(output)


def _metrics(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


CHECKS: dict[str, Callable[[Path], Outcome]] = {
    "rows": compare_rows,
    "tp2": compare_rows,
    "train": train,
    "resume": resume,
    "sglang": partial(engine, name="sglang"),
    "sglang2": partial(engine, name="sglang", tp=2),
    "vllm": partial(engine, name="vllm"),
    "vllm2": partial(engine, name="vllm", tp=2),
}
"""Checks of a model that is built, by their names."""


def run_check(family: str, check: str, folder: str, environment: dict[str, str]) -> None:
    """Runs a check in this process, and writes its outcome and all that it printed into the folder."""
    path, log = Path(folder), os.open(f"{folder}/{check}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # One thread for each rank: `World` divides the cores by the ranks.
    os.environ.update({"LOCAL_WORLD_SIZE": str(os.cpu_count())} | environment)
    torch.set_num_threads(1)
    try:
        outcome = make_model(family, path / "model") if check == "build" else CHECKS[check](path / "model")
    except UserError as error:
        outcome = Outcome("refused", str(error))
    except SystemExit as end:
        lines = [line for line in Path(f"{folder}/{check}.log").read_text().splitlines() if line.startswith("error: ")]
        refused = end.code == EXIT_CODE and lines
        outcome = Outcome("refused" if refused else "crashed", lines[-1].removeprefix("error: ") if lines else str(end))
    except BaseException as error:
        import traceback

        traceback.print_exc()
        outcome = Outcome("crashed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    if environment.get("RANK", "0") == "0":
        (path / f"{check}.json").write_text(json.dumps({"outcome": outcome.outcome, "detail": outcome.detail}))
    sys.stdout.flush()
    with suppress(Exception):
        dist.destroy_process_group()
    os._exit(0)
