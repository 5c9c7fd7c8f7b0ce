"""The command line: `verl-mg train RECIPE --config FILE [a.b=c ...]`, view, plan, models, trace, ...

Each command imports its modules when it runs, so `--help` and errors of the arguments do not wait for torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from verl_mg.errors import EXIT_CODE, UserError

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
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="run a recipe; start it with torchrun or mpirun for more than one rank")
    train.add_argument(
        "recipe", help="a Python file with iteration(job, cfg), or the name of one of recipes/, such as grpo"
    )
    train.add_argument("--config", help="a YAML file, or the name of one of recipes/configs/")
    train.add_argument("overrides", nargs="*", metavar="a.b=c", help="values that replace the file's")
    train.add_argument("--help-config", action="store_true", help="print all configuration keys of the recipe")
    mode = train.add_mutually_exclusive_group()
    mode.add_argument("--rollout-only", action="store_true", help="generate and score samples without training")
    mode.add_argument("--replay", metavar="RUN@ITERATION", help="train on the samples that a run recorded")
    train.set_defaults(run=_train)
    quickstart = commands.add_parser("quickstart", help="train a tiny model to add, in minutes, on any machine")
    quickstart.add_argument("--output", default="runs/quickstart", help="folder of the run (default: %(default)s)")
    quickstart.set_defaults(run=_quickstart)
    _add_eval(commands)
    status = commands.add_parser("status", help="progress of a run; exit code 0 if it has finished, else 3")
    status.add_argument("folder", metavar="RUN", type=Path, help="folder of the run, its job.output")
    status.set_defaults(run=_status)
    doctor = commands.add_parser("doctor", help="check installation, machines and network; under torchrun of all nodes")
    doctor.add_argument(
        "--output", default="runs", type=Path, help="folder of runs, to be shared (default: %(default)s)"
    )
    doctor.set_defaults(run=_doctor)
    _add_view(commands)
    _add_plan(commands)
    _add_trace(commands)
    _add_models(commands)
    return parser


def _add_eval(commands: argparse._SubParsersAction[_Parser]) -> None:
    evaluation = commands.add_parser(
        "eval", help="evaluate a model or a run on sets of prompts, or compare two evaluations"
    )
    evaluation.add_argument(
        "target", nargs="?", metavar="MODEL|RUN[@ITERATION]", help="a Hugging Face directory or name, or a run's folder"
    )
    evaluation.add_argument("overrides", nargs="*", metavar="a.b=c", help="values that replace the file's")
    evaluation.add_argument(
        "--set",
        action="append",
        default=[],
        dest="sets",
        metavar="NAME=PATH",
        help="a set, short for data.test.NAME.path=PATH; NAME without a path is a set of the configuration (default: "
        "all of its sets)",
    )
    evaluation.add_argument(
        "--config", help="a YAML file, or the name of one of recipes/evaluation/ (default: that of the run)"
    )
    evaluation.add_argument(
        "--output", type=Path, metavar="DIR", help="folder of the results (default: RUN/evaluation/ITERATION)"
    )
    evaluation.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="folders of two evaluations")
    evaluation.add_argument("--json", action="store_true", help="print one JSON object")
    evaluation.set_defaults(run=_eval)


def _add_view(commands: argparse._SubParsersAction[_Parser]) -> None:
    view = commands.add_parser("view", help="curves, timelines and samples of runs, in the browser")
    view.add_argument(
        "folders", nargs="+", metavar="RUN", type=Path, help="folder of a run, also of one that is running"
    )
    view.add_argument("--port", type=int, default=0, metavar="N", help="port (default: a free one)")
    view.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    view.set_defaults(run=_view)


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    plan = commands.add_parser(
        "plan", help="compute memory, weight sync and predicted seconds of layouts, without GPUs"
    )
    plan.add_argument("recipe", nargs="?", help="a recipe; its --config gives what the options do not")
    plan.add_argument("--config", help="the YAML file of a job; options override it")
    plan.add_argument("overrides", nargs="*", metavar="a.b=c", help="values that replace the file's")
    plan.add_argument("--model", help="a Hugging Face model directory or name, or a config.json")
    plan.add_argument("--ranks", required=True, type=int, help="GPUs of the job")
    plan.add_argument("--train", metavar="LAYOUT", help="layout of the actor, such as tp4-pp4-ep8")
    plan.add_argument("--backend", choices=("megatron", "fsdp"), help="of the actor (default: the file's, or megatron)")
    plan.add_argument("--rollout", metavar="LAYOUT", help="layout of an SGLang engine, such as tp8-ep8")
    plan.add_argument("--reference", metavar="LAYOUT", help="layout of a reference on the same ranks")
    plan.add_argument("--critic", metavar="LAYOUT", help="layout of a critic on the same ranks")
    plan.add_argument(
        "--search", action="store_true", help="rank layouts that fit, for --train and --rollout if not given"
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.add_argument(
        "--top", type=int, default=5, metavar="N", help="layouts that a search prints (default: %(default)s)"
    )
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
        plan.add_argument(name, type=kind, metavar="N", help=meaning)
    plan.add_argument("--gpu", help="a100, h20, h100, h200, b200, gb200 or gb300 (default: h100)")
    plan.add_argument("--measured", metavar="FILE", help="JSON with measured figures; options override it")
    offload = "keep the actor in host memory while other roles compute (default: the file's, or yes)"
    plan.add_argument("--offload", action=argparse.BooleanOptionalAction, help=offload)
    recompute = "full, none, or modules of a layer such as mlp,layernorm (default: the file's, or full; a search tries)"
    plan.add_argument("--recompute", metavar="MODULES", help=recompute)
    plan.set_defaults(run=_plan)


def _add_trace(commands: argparse._SubParsersAction[_Parser]) -> None:
    trace = commands.add_parser(
        "trace", help="record from an engine's loader which part of a model each of its ranks holds"
    )
    trace.add_argument("model", help="a Hugging Face model directory or name; config.json is enough")
    trace.add_argument("--rollout", metavar="LAYOUT", default="tp2", help="layout of the engine (default: %(default)s)")
    trace.add_argument("--engine", choices=("sglang", "vllm"), default="sglang", help="engine (default: %(default)s)")
    trace.add_argument("--python", metavar="PATH", help="Python that has the engine (default: this one)")
    trace.add_argument(
        "--output", metavar="FILE", default="sharding_table.json", help="file to write (default: %(default)s)"
    )
    trace.set_defaults(run=_trace)


def _add_models(commands: argparse._SubParsersAction[_Parser]) -> None:
    models = commands.add_parser("models", help="families of models and what works with each, or with one model")
    models.add_argument(
        "model", nargs="?", type=Path, help="a Hugging Face model directory or name, whose weights are not downloaded"
    )
    models.set_defaults(run=_models)


def _train(arguments: argparse.Namespace) -> None:
    if arguments.help_config:
        from verl_mg.config.reference import help_text
        from verl_mg.job.recipe import load_recipe

        print(help_text(load_recipe(arguments.recipe).config), end="")
        return
    from verl_mg.run.main import run_recipe

    def load() -> tuple[Recipe, Config]:
        from verl_mg.config import load_config
        from verl_mg.job.recipe import load_recipe

        recipe = load_recipe(arguments.recipe)
        return recipe, load_config(_config_file(arguments), arguments.overrides, recipe.config)

    # `load` runs after the rendezvous, so that one rank reports an error of the configuration and all exit with it.
    run_recipe(load, learns=not arguments.rollout_only, replayed=arguments.replay)


def _config_file(arguments: argparse.Namespace, folder: str = "configs") -> Path | None:
    from verl_mg.import_function import RECIPES
    from verl_mg.job.recipe import shipped_file

    return shipped_file(arguments.config, RECIPES / folder, ".yaml") if arguments.config else None


def _quickstart(arguments: argparse.Namespace) -> None:
    from verl_mg.quickstart import quickstart

    quickstart(arguments.output)


def _eval(arguments: argparse.Namespace) -> None:
    from verl_mg.evaluation.command import run_evaluation, show_comparison

    if arguments.compare:
        first, second = arguments.compare
        show_comparison(first, second, arguments.json)
        return
    if arguments.target is None:
        raise UserError("eval: no model. Write verl-mg eval MODEL --set NAME=PATH, or --compare A B.")
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

    sys.exit(show_status(arguments.folder))


def _doctor(arguments: argparse.Namespace) -> None:
    from verl_mg.doctor import check

    sys.exit(check(arguments.output))


def _view(arguments: argparse.Namespace) -> None:
    from verl_mg.view.server import view

    view(arguments.folders, arguments.host, arguments.port)


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


def _models(arguments: argparse.Namespace) -> None:
    from verl_mg.support import show_families, show_model

    sys.exit(show_model(arguments.model) if arguments.model else show_families())


def _trace(arguments: argparse.Namespace) -> None:
    from verl_mg.engines.tracing.tracer import TracedEngine, write_trace
    from verl_mg.layout import EngineLayout
    from verl_mg.models.named_models import CONFIG_FILES, local_model

    engine = TracedEngine(arguments.engine, Path(arguments.python) if arguments.python else None)
    model = local_model(Path(arguments.model), "model", CONFIG_FILES)
    write_trace(str(model), arguments.output, EngineLayout.parse(arguments.rollout), engine)
    print(f"sharding table {arguments.output}")
