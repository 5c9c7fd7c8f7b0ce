"""Portions: sizes, and what stays together."""

from verl_mg.models.tensor_index import TensorInfo
from verl_mg.reshard import split_into_chunks
from verl_mg.sharding.boxes import Piece, Shard, full_box
from verl_mg.sharding.shard_map import ExplicitShardMap


def shard_map(**parameters: tuple[str, ...]) -> ExplicitShardMap:
    """One rank whose parameters stack tensors of 2 x 5."""
    shape, shards, names = (2, 5), {}, []
    for parameter, tensors in parameters.items():
        pieces = tuple(Piece(t, full_box(shape), ((2 * i, 2 * i + 2), (0, 5))) for i, t in enumerate(tensors))
        shards[parameter] = Shard((2 * len(tensors), 5), pieces)
        names += tensors
    return ExplicitShardMap({0: shards}, {name: TensorInfo(i, shape) for i, name in enumerate(names)})


def cut(whole: ExplicitShardMap, elements: int, **options: object) -> list[list[str]]:
    return [list(portion.tensors) for portion in split_into_chunks(whole, [0], elements, **options)]


def test_split_into_chunks_fills_chunks_to_the_maximum():
    whole = shard_map(a=("a",), b=("b",), c=("c",))
    assert cut(whole, 20) == [["a", "b"], ["c"]]
    assert cut(whole, 1) == [["a"], ["b"], ["c"]]


def test_split_into_chunks_keeps_tensors_of_a_parameter_together():
    assert cut(shard_map(a=("a",), fused=("q", "k"), b=("b",)), 20) == [["a"], ["q", "k"], ["b"]]


def test_split_into_chunks_keep_together_joins_tensors():
    whole = shard_map(a=("a",), b=("b",), c=("c",), d=("d",))
    assert cut(whole, 20, keep_together=[["b", "d"]]) == [["a"], ["b", "d"], ["c"]]
