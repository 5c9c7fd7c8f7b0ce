"""The command line: `verl-mg train RECIPE --config FILE [a.b=c ...]`, status, view, plan, trace, quickstart."""

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
"""What launchers call the number of a rank."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def main(arguments: list[str] | None = None) -> None:
    """Run a command; a user's mistake ends in one line and exit code 2."""
    # Libraries draw bars over each other's lines on every rank; ours is the one that counts iterations.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        chosen, rest = _parser().parse_known_args(arguments)
        # argparse takes no positional arguments after an option: overrides may stand on both sides of --config.
        if unknown := [text for text in rest if text.startswith("-") or not hasattr(chosen, "overrides")]:
            raise UserError(f"unknown argument {unknown[0]!r}; see verl-mg --help")
        if rest:
            chosen.overrides += rest
        chosen.run(chosen)
    except UserError as error:
        # Every rank makes this mistake alike: one line is enough.
        if next((os.environ[name] for name in RANKS if name in os.environ), "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="verl-mg", description="Reinforcement learning of language models over Megatron.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="run a recipe; start it with torchrun or mpirun for more than one rank")
    train.add_argument("recipe", help="a Python file with iteration(job, cfg), such as recipes/grpo.py")
    train.add_argument("--config", help="a YAML file")
    train.add_argument("overrides", nargs="*", metavar="a.b=c", help="values that replace those of the file")
    half = train.add_mutually_exclusive_group()
    half.add_argument("--rollout-only", action="store_true", help="draw and score samples; nothing learns")
    half.add_argument("--replay", metavar="RUN@ITERATION", help="train alone, on what a run drew up to an iteration")
    train.set_defaults(run=_train)
    quickstart = commands.add_parser("quickstart", help="teach a tiny model to add, in minutes, on any machine")
    quickstart.add_argument("--output", default="runs/quickstart", help="where the run goes (default: %(default)s)")
    quickstart.set_defaults(run=_quickstart)
    status = commands.add_parser("status", help="how far a run is; exit code 0 when it has finished, else 3")
    status.add_argument("folder", metavar="RUN", type=Path, help="what job.output named")
    status.set_defaults(run=_status)
    _add_view(commands)
    _add_plan(commands)
    _add_trace(commands)
    return parser


def _add_view(commands: argparse._SubParsersAction[_Parser]) -> None:
    view = commands.add_parser("view", help="curves, time lines and samples of a run, in the browser")
    view.add_argument("folder", metavar="RUN", type=Path, help="what job.output named; a run may still be going on")
    view.add_argument("other", nargs="?", metavar="OTHER", type=Path, help="another one, to compare with")
    view.add_argument("--port", type=int, default=0, metavar="N", help="(default: a free one)")
    view.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: %(default)s)")
    view.set_defaults(run=_view)


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    plan = commands.add_parser("plan", help="memory, weight sync and predicted seconds of a job's layouts, on paper")
    plan.add_argument("recipe", nargs="?", help="a recipe, whose --config says what the options do not")
    plan.add_argument("--config", help="the YAML file of a job; options win over it")
    plan.add_argument("overrides", nargs="*", metavar="a.b=c", help="values that replace those of the file")
    plan.add_argument("--model", help="a Hugging Face model directory, or a config.json")
    plan.add_argument("--ranks", required=True, type=int, help="how many GPUs the job has")
    plan.add_argument("--train", metavar="LAYOUT", help="Megatron's layout, such as tp4-pp4-ep8")
    plan.add_argument("--rollout", metavar="LAYOUT", help="the layout of an SGLang engine, such as tp8-ep8")
    plan.add_argument("--reference", metavar="LAYOUT", help="of a reference on the same ranks")
    plan.add_argument("--critic", metavar="LAYOUT", help="of a critic on the same ranks")
    plan.add_argument("--search", action="store_true", help="rank the layouts that fit, of the sides not typed")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.add_argument("--top", type=int, default=5, metavar="N", help="how many a search shows (default: %(default)s)")
    numbers: dict[str, tuple[type, str]] = {
        "--node": (int, "ranks of a node (default: 8)"),
        "--memory": (float, "GiB of a device (default: 80)"),
        "--reserve": (float, "GiB of a device that are kept free (default: 6)"),
        "--intra-node": (float, "GB/s of a rank to others of its node (default: 400)"),
        "--inter-node": (float, "GB/s of a rank to other nodes (default: 50)"),
        "--host": (float, "GB/s between a device and its host (default: 50)"),
        "--flops": (float, "TFLOP/s of bf16 matrix products that a device reaches (default: 400)"),
        "--memory-bandwidth": (float, "GB/s at which a device reads its memory (default: 2400)"),
        "--sequence": (int, "tokens of a sample, prompt and response (default: the file's, or 8192)"),
        "--micro-batch": (int, "tokens of a micro-batch (default: the file's, or 8192)"),
        "--batch": (int, f"tokens of an iteration, over all ranks (default: the file's, or {4 * 2**20})"),
        "--minibatches": (int, "optimizer steps of an iteration (default: the file's, or 1)"),
        "--rollout-ranks": (int, "how many of the ranks hold engines alone (default: the file's, or 0)"),
        "--memory-fraction": (float, "what engines take of what is free (default: the file's, or all of it)"),
    }
    for name, (kind, meaning) in numbers.items():
        plan.add_argument(name, type=kind, metavar="N", help=meaning)
    plan.add_argument("--measured", metavar="FILE", help="JSON with such figures; options win over it")
    offload = "the actor waits on the host while others compute (default: the file's, or yes)"
    plan.add_argument("--offload", action=argparse.BooleanOptionalAction, help=offload)
    recompute = "layers keep their inputs alone, or all but attention's matrix (default: the file's, or full)"
    plan.add_argument("--recompute", choices=("full", "selective"), help=recompute)
    plan.set_defaults(run=_plan)


def _add_trace(commands: argparse._SubParsersAction[_Parser]) -> None:
    trace = commands.add_parser("trace", help="read off SGLang's own loader what each of its ranks holds of a model")
    trace.add_argument("model", help="a Hugging Face model directory; config.json is enough")
    trace.add_argument("--rollout", metavar="LAYOUT", default="tp2", help="of the engine (default: %(default)s)")
    trace.add_argument("--output", metavar="FILE", default="sharding_table.json", help="(default: %(default)s)")
    trace.set_defaults(run=_trace)


def _train(arguments: argparse.Namespace) -> None:
    from verl_mg.run.main import run_recipe

    def described() -> tuple[Recipe, Config]:
        from verl_mg.config import load_config
        from verl_mg.job.recipe import load_recipe

        recipe = load_recipe(arguments.recipe)
        return recipe, load_config(arguments.config, arguments.overrides, recipe.config)

    run_recipe(described, learns=not arguments.rollout_only, replayed=arguments.replay)


def _quickstart(arguments: argparse.Namespace) -> None:
    from verl_mg.quickstart import quickstart

    quickstart(arguments.output)


def _status(arguments: argparse.Namespace) -> None:
    from verl_mg.monitor.status import show_status

    sys.exit(show_status(arguments.folder))


def _view(arguments: argparse.Namespace) -> None:
    from verl_mg.view.server import view

    view([folder for folder in (arguments.folder, arguments.other) if folder], arguments.host, arguments.port)


def _plan(arguments: argparse.Namespace) -> None:
    from verl_mg.planner.command import run

    if arguments.recipe is None:
        if arguments.overrides or arguments.config:
            lost = repr(arguments.overrides[0]) if arguments.overrides else "--config"
            raise UserError(f"{lost} is for the job of a recipe; write verl-mg plan RECIPE --config FILE ...")
        run(arguments)
        return
    if arguments.config is None:
        raise UserError(f"{arguments.recipe}: a recipe is planned with its configuration; add --config FILE")
    from verl_mg.config import load_config
    from verl_mg.job.recipe import load_recipe, requested_roles
    from verl_mg.planner.from_config import plan_request

    recipe = load_recipe(arguments.recipe)
    config = load_config(arguments.config, arguments.overrides, recipe.config)
    try:
        job = plan_request(config, requested_roles(recipe, config.algorithm))
    except UserError as error:
        raise UserError(f"{arguments.config}: {error}") from None
    run(arguments, job)


def _trace(arguments: argparse.Namespace) -> None:
    from verl_mg.layout import EngineLayout
    from verl_mg.rollout.sglang.tracing.tracer import write_trace

    write_trace(arguments.model, arguments.output, EngineLayout.parse(arguments.rollout))
    print(f"sharding table {arguments.output}")
