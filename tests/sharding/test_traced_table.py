"""A traced dialect comes back from its file as it was, and a broken file is named with its key."""

import json

import pytest

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.sharding.boxes import Piece, Shard
from verl_mg.sharding.traced_table import TracedTable, read_rank, read_traced_table, write_rank, write_traced_table

SHARDS = {
    "lm_head.weight": Shard(
        (4, 8), (Piece("lm_head.weight", ((0, 3), (0, 8)), ((0, 3), (0, 8))),), (((3, 4), (0, 8)),)
    ),
    "experts.w13_weight": Shard(
        (2, 4, 6),
        tuple(
            Piece(f"experts.{e}.{kind}", ((0, 2), (0, 6)), ((e, e + 1), (2 * i, 2 * i + 2), (0, 6)))
            for e in range(2)
            for i, kind in enumerate(("gate", "up"))
        ),
    ),
    "scale": Shard((), (Piece("scale", (), ()),)),
}
DIALECT = TracedTable("Qwen3MoeForCausalLM", "0.5.23", EngineLayout(tp=2, ep=2), (SHARDS, SHARDS))


@pytest.fixture
def path(tmp_path):
    write_traced_table(tmp_path / "deep" / "dialect.json", DIALECT)
    return tmp_path / "deep" / "dialect.json"


def test_a_dialect_comes_back(path):
    assert read_traced_table(path) == DIALECT
    assert [file.name for file in path.parent.iterdir()] == ["dialect.json"]


def test_the_form_of_the_file(path):
    content = json.loads(path.read_text())
    assert content["format"] == 1
    assert content["layout"] == {"tp": 2, "ep": 2, "attention_dp": 1, "pp": 1}
    assert content["ranks"][1]["lm_head.weight"] == {
        "shape": [4, 8],
        "pieces": [["lm_head.weight", [[0, 3], [0, 8]], [[0, 3], [0, 8]]]],
        "padding": [[[3, 4], [0, 8]]],
    }


def test_the_shards_of_a_rank_come_back(tmp_path):
    write_rank(tmp_path / "rank.json", SHARDS)
    assert read_rank(tmp_path / "rank.json") == SHARDS


def head(content):
    return content["ranks"][1]["lm_head.weight"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda c: c.update(format=2), "format: Input should be 1"),
        (lambda c: c.update(format="1"), "format: "),
        (lambda c: c.pop("sglang"), "sglang: Field required"),
        (lambda c: c.update(more=1), "more: Extra inputs are not permitted"),
        (lambda c: c["layout"].update(tp=3), "layout: rollout layout"),
        (lambda c: c["layout"].update(tp=2.0), "layout.tp: Input should be a valid integer"),
        (lambda c: c["ranks"].pop(), "ranks: 1 of them"),
        (lambda c: head(c)["shape"].__setitem__(0, -1), "ranks.1.lm_head.weight.shape.0: Input should be greater"),
        (lambda c: head(c)["shape"].__setitem__(0, 5), "ranks.1.lm_head.weight: 8 of its 40 elements"),
        (lambda c: head(c)["shape"].__setitem__(0, 3), "ranks.1.lm_head.weight: the box ((3, 4), (0, 8)) is not"),
        (lambda c: head(c)["shape"].append(1), "ranks.1.lm_head.weight: the box ((0, 3), (0, 8)) is not"),
        (lambda c: head(c).update(padding=[]), "ranks.1.lm_head.weight: 8 of its 32 elements"),
        (lambda c: head(c)["padding"].append([[0, 1], [0, 8]]), "ranks.1.lm_head.weight: the box ((0, 1), (0, 8))"),
        (lambda c: head(c)["padding"][0][0].reverse(), "ranks.1.lm_head.weight: the box ((4, 3), (0, 8)) is not"),
        (lambda c: head(c)["pieces"][0][1].__setitem__(0, [0, 2]), "ranks.1.lm_head.weight: a box of (2, 8)"),
        (lambda c: head(c)["pieces"][0].pop(), "ranks.1.lm_head.weight.pieces.0"),
        (lambda c: head(c)["pieces"][0].__setitem__(0, 7), "ranks.1.lm_head.weight.pieces.0.0: Input should be a val"),
    ],
)
def test_a_broken_file_is_named_with_its_key(path, change, complaint):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as error:
        read_traced_table(path)
    assert str(error.value).startswith(f"{path}: {complaint}")


def test_a_file_that_is_no_json_or_not_there(path):
    path.write_text("{")
    with pytest.raises(UserError, match=f"{path}: the file: Invalid JSON"):
        read_traced_table(path)
    path.unlink()
    with pytest.raises(UserError, match=f"{path}: cannot be read"):
        read_traced_table(path)


def test_a_failed_write_leaves_what_was_there(path):
    with pytest.raises(UserError, match="cannot be written"):
        write_traced_table(path / "below_a_file.json", DIALECT)
    assert read_traced_table(path) == DIALECT


def test_a_traced_dialect_stands_on_the_ranks_of_its_engines():
    held = DIALECT.shard_map(EnginePlacement(EngineLayout(tp=2, ep=2), tuple(range(10, 14))))
    assert held.ranks == (10, 11, 12, 13) and held.shards(12) == SHARDS
    assert held.tensors["lm_head.weight"].shape == (3, 8)
    with pytest.raises(UserError, match="traced for rollout layout tp2-ep2, not tp2"):
        DIALECT.shard_map(EnginePlacement(EngineLayout(tp=2), (0, 1)))
