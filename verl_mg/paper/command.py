"""`verl-mg plan`: from the options to the printed report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, Layout
from verl_mg.paper.memory import problem
from verl_mg.paper.report import Numbers, pair_numbers, search_numbers, show
from verl_mg.paper.search import (
    AnyLayout,
    Pair,
    check_rollout,
    check_train,
    nearest_rollout,
    nearest_train,
    rollout_side,
    search,
    train_side,
)
from verl_mg.paper.setting import Setting
from verl_mg.paper.sync import weight_sync
from verl_mg.weights import read_config, table


def run(options: argparse.Namespace) -> None:
    """Print the report. UserError for what cannot be planned, and, after the report, for what does not fit."""
    setting = Setting(
        table(read_config(Path(options.model))),
        ranks=options.ranks,
        node=options.node,
        memory=options.memory,
        reserve=options.reserve,
        intra_node=options.intra_node,
        inter_node=options.inter_node,
        sequence=options.sequence,
        micro_batch=options.micro_batch,
        batch=options.batch,
        recompute=options.recompute == "full",
    )
    train = Layout.parse(options.train) if options.train else None
    rollout = EngineLayout.parse(options.rollout) if options.rollout else None
    train = train and _checked(setting, train, check_train, nearest_train)
    rollout = rollout and _checked(setting, rollout, check_rollout, nearest_rollout)
    if options.search:
        if options.top < 1:
            raise UserError(f"--top is {options.top}; write 1 or more")
        _print(search_numbers(setting, search(setting, train, rollout, options.top)), options.json)
        return
    if train is None or rollout is None:
        raise UserError("verl-mg plan takes both --train and --rollout, or --search to find what is left out")
    one, other = train_side(setting, train), rollout_side(setting, rollout)
    pair = Pair(one, other, weight_sync(setting, train, rollout))
    _print(pair_numbers(setting, pair), options.json)
    if too_large := problem(setting, one.memory, other.memory):
        raise UserError(too_large + _instead(setting, pair))


def _checked(
    setting: Setting,
    layout: AnyLayout,
    check: Callable[[Setting, AnyLayout], AnyLayout],
    nearest: Callable[[Setting, AnyLayout], list[str]],
) -> AnyLayout:
    try:
        return check(setting, layout)
    except UserError as error:
        raise UserError(f"{error}{_that_hold(nearest(setting, layout))}") from None


def _instead(setting: Setting, pair: Pair) -> str:
    """The nearest layouts of the side that is too large, or of training where only the sync is."""
    if problem(setting, None, pair.rollout.memory):
        return _that_hold(nearest_rollout(setting, pair.rollout.layout))
    return _that_hold(nearest_train(setting, pair.train.layout, pair.rollout.memory))


def _that_hold(layouts: list[str]) -> str:
    return f"; nearest layouts that hold: {', '.join(layouts)}" if layouts else "; no other layout holds either"


def _print(numbers: Numbers, as_json: bool) -> None:
    if as_json:
        print(json.dumps(numbers, indent=2))
    else:
        show(numbers)
