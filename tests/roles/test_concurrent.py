"""What roles were asked for is done at the first look, in the order of asking."""

import pickle

import pytest
import torch
import torch.distributed as dist

from verl_mg.batch import Batch, ColumnKind
from verl_mg.roles.concurrent import RoleExecutor


def asked(agenda, log, name, values):
    def work():
        log.append(f"work {name}")
        return values

    def deliver(result):
        log.append(f"deliver {name}")
        return torch.tensor(result)

    return agenda.column(len(values), work, deliver)


def test_nothing_is_done_before_the_first_look_and_then_all_of_it():
    agenda, log = RoleExecutor(), []
    first, second = asked(agenda, log, "a", [1.0, 2.0]), asked(agenda, log, "b", [3.0, 4.0])
    metrics = agenda.metrics(lambda: log.append("work m"), lambda _: {"loss": 1.5})
    batch = Batch([1, 1])
    batch["values"] = first
    batch.put("reward", second, ColumnKind.SEQUENCE)
    assert log == [] and first.shape == (2,) and first.dtype is torch.float32
    assert (batch["values"] * 2).tolist() == [2.0, 4.0]
    assert log == ["work a", "work b", "work m", "deliver a", "deliver b"]
    assert second.tolist() == [3.0, 4.0] and metrics["loss"] == 1.5
    assert len(log) == 5  # once


@pytest.mark.parametrize(
    "look",
    [
        lambda column: torch.cat([torch.ones(1), column])[1:],
        lambda column: torch.zeros(2) + column,
        lambda column: column.clone(),
        lambda column: column[torch.tensor([True, True])],
        lambda column: torch.stack([column, torch.ones(2)])[0],
        lambda column: torch.where(torch.tensor([True, True]), column, 0.0),
        lambda column: torch.zeros(2).copy_(column),
        lambda column: pickle.loads(pickle.dumps(column)),
        lambda column: Batch([2], {"values": column}).select([0])["values"],
        lambda column: Batch.concat([Batch([2], {"values": column})])["values"],
    ],
)
def test_every_way_to_look_finds_the_values_in_an_ordinary_tensor(look):
    found = look(asked(RoleExecutor(), [], "a", [1.0, 2.0]))
    assert type(found) is torch.Tensor and found.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("look", [dict, lambda m: m | {}, lambda m: {} | m, lambda m: {**m}, lambda m: eval(repr(m))])
def test_every_way_to_look_at_metrics_finds_them(look):
    assert look(RoleExecutor().metrics(lambda: 2.0, lambda value: {"loss": value})) == {"loss": 2.0}


def test_metrics_may_be_added_to_before_they_have_come():
    metrics = RoleExecutor().metrics(lambda: 2.0, lambda value: {"loss": value, "lr": 1.0})
    metrics["reward"] = 3.0
    del metrics["lr"]
    assert metrics == {"loss": 2.0, "reward": 3.0}


def test_gradients_pass_a_column_by():
    weight = torch.ones(2, requires_grad=True)
    (weight * asked(RoleExecutor(), [], "a", [1.0, 2.0])).sum().backward()
    assert weight.grad.tolist() == [1.0, 2.0]


def test_a_batch_is_waited_for_only_while_it_has_columns_to_come():
    agenda, log = RoleExecutor(), []
    batch = Batch([2], {"values": asked(agenda, log, "a", [1.0, 2.0])})
    agenda.settle_for(batch)
    asked(agenda, log, "b", [3.0])
    agenda.settle_for(batch)
    assert log == ["work a", "deliver a"]
    batch["advantages"] = asked(agenda, log, "c", [4.0, 5.0])
    agenda.settle_for(batch)
    assert log[2:] == ["work b", "work c", "deliver b", "deliver c"]


def test_an_eager_agenda_answers_at_once():
    log = []
    column = asked(RoleExecutor(eager=True), log, "a", [1.0])
    assert log == ["work a", "deliver a"] and type(column) is torch.Tensor and column.tolist() == [1.0]


def test_what_failed_is_not_done_again():
    agenda = RoleExecutor()
    column = agenda.column(1, lambda: 1 / 0, lambda _: torch.zeros(1))
    with pytest.raises(ZeroDivisionError):
        column.sum()
    agenda.settle()


def looked_at_here_or_there():
    """Rank 0 looks at once, rank 1 where both meet: the collectives are the same ones."""
    agenda, rank = RoleExecutor(), dist.get_rank()

    def deliver(own):
        total = torch.tensor([own])
        dist.all_reduce(total)
        return total

    first = agenda.column(1, lambda: 1.0 + rank, deliver)
    second = agenda.column(1, lambda: 10.0 + rank, deliver)
    seen = float(first) if rank == 0 else None
    agenda.settle()
    return seen, float(first), float(second)


def test_ranks_may_look_at_different_places(ranks):
    assert ranks.run(2, looked_at_here_or_there) == [(3.0, 3.0, 21.0), (None, 3.0, 21.0)]
