"""The command line: `verl-mg train RECIPE --config FILE [a.b=c ...]`, view, plan, models, trace, ...

Each command imports its modules when it runs, so `--help` and errors of the arguments do not wait for torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from verl_mg import __version__
from verl_mg.errors import EXIT_CODE, UserError
from verl_mg.stores.url import require_local

if TYPE_CHECKING:
    from verl_mg.config import Config
    from verl_mg.job.recipe import Recipe

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Environment variables in which launchers give the rank."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See {self.prog} --help.")


def main(arguments: list[str] | None = None) -> None:
    """Runs a command. Invalid input ends in one line and exit code 2."""
    # On several ranks the libraries' progress bars overwrite each other; ours counts iterations.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        chosen, rest = _parser().parse_known_args(arguments)
        # argparse takes no positional arguments after an option, but overrides may follow --config.
        if unknown := [text for text in rest if text.startswith("-") or not hasattr(chosen, "overrides")]:
            option, _, _ = unknown[0].partition("=")
            raise UserError(f"{option}: unknown argument. See verl-mg --help.")
        if rest:
            chosen.overrides += rest
        chosen.run(chosen)
    except UserError as error:
        # Every rank meets the same error: one line is enough.
        if next((os.environ[name] for name in RANKS if name in os.environ), "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="verl-mg", description="Reinforcement learning of language models over Megatron.")
    parser.add_argument("--version", action="version", version=f"verl-mg {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], None], meaning: str) -> _Parser:
        added = commands.add_parser(name, help=meaning)
        added.set_defaults(run=run)
        return added

    _add_train(command("train", _train, "run a recipe; start it with torchrun or mpirun for more than one rank"))
    add = command("quickstart", _quickstart, "train a tiny model to add, in minutes, on any machine").add_argument
    add("--output", default="runs/quickstart", type=_local_output, help="folder of the run (default: %(default)s)")
    add(
        "overrides",
        nargs="*",
        metavar="a.b=c",
        help="values for GRPO; keys of model, actor and job are for both jobs, SFT and GRPO",
    )
    _add_eval(command("eval", _eval, "evaluate a model or a run on sets of prompts, or compare two evaluations"))
    add = command("status", _status, "progress of a run; exit code 0 if it has finished, else 3").add_argument
    add("folder", metavar="RUN", help="folder of the run, its job.output; also on an object store")
    meaning = "check installation, machines and network, and what a job computes with; under torchrun of all nodes"
    add = command("doctor", _doctor, meaning).add_argument
    add("recipe", nargs="?", help="recipe of the job; only with --job")
    add("overrides", nargs="*", metavar="a.b=c", help="only with --job: values that replace the file's")
    meaning = "build a job of this file, --config of train; print its kernels, engine, memory and, on GPUs, warnings"
    add("--job", metavar="CONFIG", help=meaning)
    add(
        "--output",
        default="runs",
        type=_local_output,
        help="folder of runs, which every rank must see (default: %(default)s)",
    )
    add = command("view", _view, "curves, timelines and samples of runs, in the browser").add_argument
    meaning = "folder of a run, also of one that is running; one on an object store is shown as it is now"
    add("folders", nargs="+", metavar="RUN", help=meaning)
    add("--port", type=int, default=0, metavar="N", help="port (default: a free one)")
    add("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    _add_plan(command("plan", _plan, "compute memory, weight sync and predicted seconds of layouts, without GPUs"))
    trace = command("trace", _trace, "record from an engine's loader which part of a model each of its ranks holds")
    add = trace.add_argument
    add("model", help="a Hugging Face model directory or name; config.json is enough")
    add("--rollout", metavar="LAYOUT", default="tp2", help="layout of the engine (default: %(default)s)")
    add("--engine", choices=("sglang", "vllm"), default="sglang", help="engine (default: %(default)s)")
    add("--python", metavar="PATH", help="Python that has the engine (default: this one)")
    add("--output", metavar="FILE", default="sharding_table.json", help="file to write (default: %(default)s)")
    meaning = "write a configuration of verl's PPO trainer as one of ours, and list what has no counterpart"
    add = command("from-verl", _from_verl, meaning).add_argument
    add(
        "config",
        metavar="CONFIG",
        type=Path,
        help="verl's YAML file, or the script .sh that starts verl.trainer.main_ppo",
    )
    add("overrides", nargs="*", metavar="a.b=c", help="verl's overrides")
    add("--output", metavar="FILE", type=Path, help="file to write (default: print it)")
    add = command("models", _models, "families of models and what works with each, or with one model").add_argument
    meaning = "a Hugging Face model directory or name, whose weights are not downloaded"
    add("model", nargs="?", type=Path, help=meaning)
    meaning = "ask transformers and megatron-core too: backend fsdp, tokenizer, adapters in engines; takes seconds"
    add("--full", action="store_true", help=meaning)
    return parser


def _local_output(text: str) -> Path:
    return require_local(text, "--output")


def _add_train(train: _Parser) -> None:
    meaning = "a Python file with iteration(job, cfg), or the name of one of recipes/, such as grpo"
    train.add_argument("recipe", help=meaning)
    train.add_argument("--config", help="a YAML file, or the name of one of recipes/configs/")
    train.add_argument("overrides", nargs="*", metavar="a.b=c", help="values that replace the file's")
    train.add_argument("--help-config", action="store_true", help="print all configuration keys of the recipe")
    mode = train.add_mutually_exclusive_group()
    mode.add_argument("--rollout-only", action="store_true", help="generate and score samples without training")
    mode.add_argument("--replay", metavar="RUN@ITERATION", help="train on the samples that a run recorded")


def _add_eval(parser: _Parser) -> None:
    add = parser.add_argument
    target = "a Hugging Face directory or name, or a run's folder"
    add("target", nargs="?", metavar="MODEL|RUN[@ITERATION]", help=target)
    add("overrides", nargs="*", metavar="a.b=c", help="values that replace the file's")
    sets = (
        "a set, short for data.test.NAME.path=PATH; NAME without a path is a set of the configuration (default: all of "
        "its sets)"
    )
    add("--set", action="append", default=[], dest="sets", metavar="NAME=PATH", help=sets)
    add("--config", help="a YAML file, or the name of one of recipes/evaluation/ (default: that of the run)")
    add("--output", type=_local_output, metavar="DIR", help="folder of the results (default: RUN/evaluation/ITERATION)")
    add(
        "--compare",
        nargs=2,
        type=partial(require_local, option="--compare"),
        metavar=("A", "B"),
        help="folders of two evaluations",
    )
    add("--json", action="store_true", help="print one JSON object")


def _add_plan(parser: _Parser) -> None:
    add = parser.add_argument
    add("recipe", nargs="?", help="a recipe; its --config gives what the options do not")
    add("--config", help="the YAML file of a job; options override it")
    add("overrides", nargs="*", metavar="a.b=c", help="values that replace the file's")
    add("--model", help="a Hugging Face model directory or name, or a config.json")
    add("--ranks", required=True, type=int, help="GPUs of the job")
    add("--train", metavar="LAYOUT", help="layout of the actor, such as tp4-pp4-ep8")
    add("--backend", choices=("megatron", "fsdp"), help="of the actor (default: the file's, or megatron)")
    add("--rollout", metavar="LAYOUT", help="layout of an SGLang engine, such as tp8-ep8")
    add("--reference", metavar="LAYOUT", help="layout of a reference on the same ranks")
    add("--critic", metavar="LAYOUT", help="layout of a critic on the same ranks")
    add("--search", action="store_true", help="rank layouts that fit, for --train and --rollout if not given")
    add("--json", action="store_true", help="print one JSON object")
    add("--top", type=int, default=5, metavar="N", help="layouts that a search prints (default: %(default)s)")
    numbers: dict[str, tuple[type, str]] = {
        "--node": (int, "ranks of a node (default: 8)"),
        "--memory": (float, "GiB of a device (default: that of --gpu)"),
        "--reserve": (float, "GiB of a device to keep free (default: 6)"),
        "--intra-node": (float, "GB/s of a rank to other ranks of its node (default: what jobs reach on --gpu)"),
        "--inter-node": (float, "GB/s of a rank to other nodes (default: the same)"),
        "--host": (float, "GB/s between a device and its host (default: the same)"),
        "--flops": (float, "TFLOP/s of large bf16 matrix products that a device reaches (default: the same)"),
        "--memory-bandwidth": (float, "GB/s at which a device reads its memory (default: the same)"),
        "--sequence": (int, "tokens of the longest sample, prompt and response (default: the file's, or 8192)"),
        "--prompt": (int, "tokens of a prompt (default: the file's longest, or 0)"),
        "--mean-sequence": (float, "mean tokens of a sample (default: all are as long as the longest)"),
        "--micro-batch": (int, "tokens of a micro-batch (default: the file's, or 8192)"),
        "--tokens-per-iteration": (int, f"tokens of an iteration over all ranks (default: the file's, or {4 * 2**20})"),
        "--minibatches": (int, "optimizer steps of an iteration (default: the file's, or 1)"),
        "--rollout-ranks": (int, "ranks only for engines (default: the file's, or 0)"),
        "--memory-fraction": (float, "fraction of free memory that engines take (default: the file's, or 1)"),
    }
    for name, (kind, meaning) in numbers.items():
        add(name, type=kind, metavar="N", help=meaning)
    add("--gpu", help="a100, h20, h100, h200, b200, gb200 or gb300 (default: h100)")
    add("--measured", metavar="FILE", help="JSON with measured figures; options override it")
    offload = "keep the actor in host memory while other roles compute (default: the file's, or yes)"
    add("--offload", action=argparse.BooleanOptionalAction, help=offload)
    recompute = "full, none, or modules of a layer such as mlp,layernorm (default: the file's, or full; a search tries)"
    add("--recompute", metavar="MODULES", help=recompute)


def _train(arguments: argparse.Namespace) -> None:
    if arguments.help_config:
        from verl_mg.config.reference import help_text
        from verl_mg.job.recipe import load_recipe

        print(help_text(load_recipe(arguments.recipe).config), end="")
        return
    from verl_mg.run.main import run_recipe

    # `_load` runs after the rendezvous, so that one rank reports an error of the configuration and all exit with it.
    run_recipe(partial(_load, arguments), learns=not arguments.rollout_only, replayed=arguments.replay)


def _load(arguments: argparse.Namespace) -> tuple[Recipe, Config]:
    from verl_mg.config import load_config
    from verl_mg.job.recipe import load_recipe

    recipe = load_recipe(arguments.recipe)
    return recipe, load_config(_config_file(arguments), arguments.overrides, recipe.config)


def _config_file(arguments: argparse.Namespace, folder: str = "configs") -> Path | None:
    from verl_mg.import_function import RECIPES
    from verl_mg.job.recipe import shipped_file

    return shipped_file(arguments.config, RECIPES / folder, ".yaml") if arguments.config else None


def _quickstart(arguments: argparse.Namespace) -> None:
    from verl_mg.quickstart import divided, quickstart

    of_sft, of_grpo = divided(arguments.overrides)
    quickstart(arguments.output, sft_overrides=of_sft, grpo_overrides=of_grpo)


def _eval(arguments: argparse.Namespace) -> None:
    if arguments.target:
        require_local(arguments.target, "eval")
    if arguments.compare:
        from verl_mg.evaluation.comparison import show_comparison

        first, second = arguments.compare
        show_comparison(first, second, arguments.json)
        return
    if arguments.target is None:
        raise UserError("eval: no model. Write verl-mg eval MODEL --set NAME=PATH, or --compare A B.")
    from verl_mg.evaluation.command import run_evaluation

    run_evaluation(
        arguments.target,
        lambda: _config_file(arguments, "evaluation"),
        arguments.sets,
        arguments.overrides,
        arguments.output,
        arguments.json,
    )


def _status(arguments: argparse.Namespace) -> None:
    from verl_mg.monitor.status import show_status
    from verl_mg.stores.records import run_folders

    with run_folders([arguments.folder]) as (folder,):
        sys.exit(show_status(folder))


def _doctor(arguments: argparse.Namespace) -> None:
    from verl_mg.doctor import check

    # argparse takes what follows an option for overrides, also a recipe.
    given = [text for text in (arguments.recipe, *arguments.overrides) if text]
    recipes = [text for text in given if "=" not in text]
    arguments.config, arguments.overrides = arguments.job, [text for text in given if "=" in text]
    if given and not arguments.job:
        raise UserError(f"doctor {given[0]}: --job is missing. Write verl-mg doctor RECIPE --job CONFIG [a.b=c ...].")
    if arguments.job and len(recipes) != 1:
        wrong = f"{' and '.join(recipes)} are several recipes" if recipes else "the recipe is missing"
        raise UserError(f"doctor --job: {wrong}. Write verl-mg doctor RECIPE --job CONFIG [a.b=c ...].")
    arguments.recipe = "".join(recipes)
    sys.exit(check(arguments.output, partial(_load, arguments) if arguments.job else None))


def _view(arguments: argparse.Namespace) -> None:
    from verl_mg.stores.records import run_folders
    from verl_mg.view.server import view

    with run_folders(arguments.folders) as folders:
        view(folders, arguments.host, arguments.port)


def _plan(arguments: argparse.Namespace) -> None:
    from verl_mg.models.named_models import CONFIG_FILES, local_model, with_local_models
    from verl_mg.planner.command import run

    if arguments.model:
        arguments.model = str(local_model(Path(arguments.model), "--model", CONFIG_FILES))
    if arguments.recipe is None:
        if arguments.overrides or arguments.config:
            unused = repr(arguments.overrides[0]) if arguments.overrides else "--config"
            raise UserError(f"{unused}: needs a recipe. Write verl-mg plan RECIPE --config FILE ...")
        run(arguments)
        return
    if arguments.config is None:
        raise UserError(f"{arguments.recipe}: no configuration. Add --config FILE.")
    from verl_mg.config import load_config
    from verl_mg.job.recipe import load_recipe, requested_roles
    from verl_mg.planner.from_config import plan_request

    recipe = load_recipe(arguments.recipe)
    config = load_config(_config_file(arguments), arguments.overrides, recipe.config)
    if not arguments.model:
        config = with_local_models(config, CONFIG_FILES)
    try:
        job = plan_request(config, requested_roles(recipe, config))
    except UserError as error:
        raise UserError(f"{arguments.config}: {error}") from None
    run(arguments, job)


def _from_verl(arguments: argparse.Namespace) -> None:
    from verl_mg.from_verl.translate import from_verl

    from_verl(arguments.config, arguments.overrides, arguments.output)


def _models(arguments: argparse.Namespace) -> None:
    from verl_mg.support import markdown, show_model

    if arguments.model:
        sys.exit(show_model(arguments.model, arguments.full))
    print(markdown(), end="")


def _trace(arguments: argparse.Namespace) -> None:
    from verl_mg.layout import EngineLayout
    from verl_mg.models.named_models import CONFIG_FILES, local_model
    from verl_mg.tracing.tracer import TracedEngine, write_trace

    engine = TracedEngine(arguments.engine, Path(arguments.python) if arguments.python else None)
    model = local_model(Path(arguments.model), "model", CONFIG_FILES)
    write_trace(str(model), arguments.output, EngineLayout.parse(arguments.rollout), engine)
    print(f"sharding table {arguments.output}")
