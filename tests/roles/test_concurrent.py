"""Role calls inside and outside `concurrent_roles` blocks: order, results, misuse, and where exceptions point."""

import pickle
import traceback

import pytest
import torch
import torch.distributed as dist

from verl_mg.batch import Batch, ColumnKind
from verl_mg.pending_column import PendingColumn
from verl_mg.phase_timer import PhaseTimer
from verl_mg.roles.context import RoleExecutor


def request_column(executor, log, name, values):
    def work():
        log.append(f"work {name}")
        return values

    def deliver(result):
        log.append(f"deliver {name}")
        return torch.tensor(result)

    return executor.column(f"actor.{name}", len(values), work, deliver)


def make_executor():
    return RoleExecutor(PhaseTimer())


def pending_column(values=(1.0, 2.0)):
    """A column requested in a block, and the same column after the block."""
    executor, columns = make_executor(), []
    with executor.concurrent():
        columns.append(request_column(executor, [], "a", list(values)))
    return columns[0]


def test_concurrent_block_runs_all_work_before_any_delivery():
    executor, log = make_executor(), []
    batch = Batch([1, 1])
    with executor.concurrent():
        batch["values"] = request_column(executor, log, "a", [1.0, 2.0])
        batch.put("reward", request_column(executor, log, "b", [3.0, 4.0]), ColumnKind.SEQUENCE)
        metrics = executor.metrics("actor.update", lambda: log.append("work m"), lambda _: {"loss": 1.5})
        assert log == []
    assert log == ["work a", "work b", "work m", "deliver a", "deliver b"]
    assert (batch["values"] * 2).tolist() == [2.0, 4.0] and type(batch["values"]) is torch.Tensor
    assert batch["reward"].tolist() == [3.0, 4.0] and metrics["loss"] == 1.5
    assert len(log) == 5


def test_call_outside_a_block_returns_the_values():
    executor, log = make_executor(), []
    column = request_column(executor, log, "a", [1.0])
    metrics = executor.metrics("actor.update", lambda: 2.0, lambda value: {"loss": value})
    assert log == ["work a", "deliver a"] and type(column) is torch.Tensor and column.tolist() == [1.0]
    assert type(metrics) is dict and metrics == {"loss": 2.0}


USES = [
    lambda column: torch.cat([torch.ones(1), column])[1:],
    lambda column: torch.zeros(2) + column,
    lambda column: column.clone(),
    lambda column: column[torch.tensor([True, True])],
    lambda column: torch.stack([column, torch.ones(2)])[0],
    lambda column: torch.where(torch.tensor([True, True]), column, 0.0),
    lambda column: torch.zeros(2).copy_(column),
    lambda column: torch.tensor(list(column)),
    lambda column: torch.tensor(column.tolist()),
    lambda column: pickle.loads(pickle.dumps(column)),
    lambda column: Batch([2], {"values": column}).select([0])["values"],
    lambda column: Batch([2], {"values": column}).split([1])[0]["values"],
    lambda column: Batch([2], {"values": column}).select_columns(["values"])["values"],
    lambda column: Batch([2], {"values": column}).pad("values")[0][0],
    lambda column: Batch([2], {"values": column}).row("values", 0),
    lambda column: Batch.concat([Batch([2], {"values": column})])["values"],
]


@pytest.mark.parametrize("use", USES)
def test_pending_column_used_after_the_block_is_an_ordinary_tensor(use):
    result = use(pending_column())
    assert type(result) is torch.Tensor and result.tolist() == [1.0, 2.0] and not result.requires_grad


@pytest.mark.parametrize("use", [*USES, lambda column: column.shape, bool, float, len, lambda c: c.__setitem__(0, 1.0)])
def test_pending_column_used_inside_the_block_raises_naming_it(use):
    executor, log = make_executor(), []
    message = r"(actor\.a|column 'values') is not computed yet: .*after the block"
    with pytest.raises(RuntimeError, match=message), executor.concurrent():
        use(request_column(executor, log, "a", [1.0, 2.0]))
    assert log == []  # what was queued is dropped


def test_pending_column_inside_the_block_has_a_name_and_no_values():
    executor = make_executor()
    message = r"^column 'old_logprobs' is not computed yet: it is requested in a `with job"
    with pytest.raises(RuntimeError, match=message), executor.concurrent():
        column = request_column(executor, [], "a", [1.0, 2.0])
        assert isinstance(column, PendingColumn) and repr(column) == "PendingColumn(actor.a, 2 entries)"
        batch = Batch([2], {"old_logprobs": column})
        assert "old_logprobs" in batch and batch.names() == ["old_logprobs"]
        batch["old_logprobs"] + 1
    assert repr(pending_column()) == "tensor([1., 2.])"


def test_pending_column_of_the_wrong_size_is_refused_by_the_batch():
    executor = make_executor()
    with executor.concurrent(), pytest.raises(ValueError, match=r"column 'values' has shape \(1,\)"):
        Batch([2], {"values": request_column(executor, [], "a", [1.0])})


METRIC_USES = [dict, lambda m: {**m}, lambda m: {"loss": m["loss"]}, lambda m: dict(m.items()), lambda m: {} | dict(m)]


@pytest.mark.parametrize("use", METRIC_USES)
def test_pending_metrics_are_read_after_the_block_and_not_before(use):
    executor = make_executor()
    with executor.concurrent():
        metrics = executor.metrics("critic.update", lambda: 2.0, lambda value: {"loss": value})
        assert repr(metrics) == "PendingMetrics(critic.update)"
        with pytest.raises(
            RuntimeError, match=r"the metrics of critic\.update are not computed yet: .*after the block"
        ):
            use(metrics)
    assert use(metrics) == {"loss": 2.0} and repr(metrics) == "{'loss': 2.0}"


def test_value_with_an_equal_key_is_computed_once_in_a_block_and_each_time_outside():
    executor, computed = make_executor(), []

    def value(key: list[int]) -> int:
        return executor.once(key, lambda: computed.append(key) or len(computed))

    for _ in range(2):
        with executor.concurrent():
            assert value([1]) == value([1]) and value([2]) == value([1]) + 1
    assert computed == [[1], [2], [1], [2]]
    assert value([1]) != value([1])


def test_nested_blocks_and_calls_that_need_finished_roles_are_refused():
    executor = make_executor()
    executor.require_outside_block("rollout.update_weights")
    with executor.concurrent():
        with pytest.raises(RuntimeError, match="cannot be nested"), executor.concurrent():
            pass
        with pytest.raises(RuntimeError, match=r"rollout\.update_weights is called in a `with job"):
            executor.require_outside_block("rollout.update_weights")


def test_block_whose_body_raises_drops_its_calls():
    executor, log = make_executor(), []
    with pytest.raises(ZeroDivisionError), executor.concurrent():
        request_column(executor, log, "a", [1.0])
        raise ZeroDivisionError
    with executor.concurrent():
        request_column(executor, log, "b", [2.0])
    assert log == ["work b", "deliver b"]


@pytest.mark.parametrize("part", ["work", "deliver"])
def test_exception_in_a_queued_call_points_at_the_line_of_the_request(part):
    executor = make_executor()

    def fail(*_):
        raise ZeroDivisionError("broken")

    work, deliver = (fail, lambda _: torch.zeros(1)) if part == "work" else (lambda: None, fail)
    with pytest.raises(ZeroDivisionError) as caught, executor.concurrent():
        executor.column("actor.first", 1, lambda: None, lambda _: torch.zeros(1))
        executor.column("actor.second", 1, work, deliver)  # the line that is expected
        executor.column("actor.third", 1, lambda: None, lambda _: torch.zeros(1))
    lines = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__) if frame.filename == __file__]
    assert lines[-2].endswith("# the line that is expected") and lines[-1] == 'raise ZeroDivisionError("broken")'
    assert caught.value.__notes__[0].startswith(f"actor.second was requested at {__file__}:")
    executor.column("actor.next", 1, lambda: None, lambda _: torch.zeros(1))


def computed_on_two_ranks():
    """Both ranks run the same collectives, in the order of the requests."""
    executor, rank = make_executor(), dist.get_rank()

    def deliver(value):
        total = torch.tensor([value])
        dist.all_reduce(total)
        return total

    with executor.concurrent():
        first = executor.column("actor.a", 1, lambda: 1.0 + rank, deliver)
        second = executor.column("critic.b", 1, lambda: 10.0 + rank, deliver)
    return float(first), float(second)


def test_block_on_two_ranks_delivers_to_both(ranks):
    assert ranks.run(2, computed_on_two_ranks) == [(3.0, 21.0)] * 2
