"""Pictures of docs/, drawn from real weight tables, plans, schedules and placements.

python -m tools.docs.draw_docs [FOLDER]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path

import torch

from tools.docs.lengths import read_lengths
from tools.docs.svg import Picture
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.layout.packing import pack
from verl_mg.models.flops import row_flops
from verl_mg.models.hf_config import read_config
from verl_mg.reshard import Plan, best_stride, plan, schedule
from verl_mg.reshard.schedule import BUCKET_BYTES, Bucket
from verl_mg.sharding.boxes import Box, Shard, intersect, numel
from verl_mg.sharding.weight_table import WeightTable, weight_table

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
MODEL = "qwen2_5_7b"
GIB, MIB = 2**30, 2**20
QKV = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}


def weights() -> WeightTable:
    """Weight table of the model of all pictures: 28 query heads, 4 key-value heads, 28 layers."""
    return weight_table(read_config(ROOT / "tools" / "model_configs" / f"{MODEL}.json"))


def resharding(engine: str) -> Plan:
    """From tp4-pp2 to engines on the same 8 ranks of one node."""
    everyone = tuple(range(8))
    source = weights().shard_map_megatron(Placement(Layout.parse("tp4-pp2"), everyone))
    engines = best_stride(source, weights(), EnginePlacement(EngineLayout.parse(engine), everyone), ranks_per_node=8)
    return plan(source, weights().shard_map_engine(engines), ranks_per_node=8)


# -- one weight, cut in two ways


def qkv() -> Picture:
    """Megatron's four shards of a fused weight, the tensors of the checkpoint, and SGLang's two shards."""
    picture = Picture(860, 645, "The qkv weight of a layer: 4 shards of Megatron, 3 tensors, 2 shards of SGLang")
    per_row = 0.1
    megatron = [
        weights().megatron(Layout.parse("tp4"), rank)["decoder.layers.0.self_attention.linear_qkv.weight"]
        for rank in range(4)
    ]
    sglang = [
        weights().engine_shards(EngineLayout.parse("tp2"), rank)["model.layers.0.self_attn.qkv_proj.weight"]
        for rank in range(2)
    ]
    for x, head, below in (
        (110, "Megatron, tp4", "linear_qkv.weight, by query group"),
        (430, "checkpoint", "the names that both sides share"),
        (750, "SGLang, tp2", "qkv_proj.weight, q over k over v"),
    ):
        picture.words(x, 26, head, "ink large", "middle")
        picture.words(x, 46, below, "soft small", "middle")
    middle = _tensor_tops(megatron, per_row)
    for rank, shard in enumerate(megatron):
        top = 70 + rank * (shard.shape[0] * per_row + 12)
        picture.words(50, top + shard.shape[0] * per_row / 2, f"rank {rank}", anchor="end")
        for piece in shard.pieces:
            here, there = _span(piece.target, top, per_row), _span(piece.source, middle[piece.tensor], per_row)
            picture.box(60, here[0], 100, here[1] - here[0], rank)
            picture.words(110, sum(here) / 2, _heads(piece.tensor, piece.source), "ink small", "middle")
            picture.ribbon((160, *here), (380, *there), rank)
            picture.box(380, there[0], 100, there[1] - there[0], rank)
    for tensor, top in middle.items():
        picture.words(430, top - 9, tensor.removeprefix("model.layers.0.self_attn."), "soft small", "middle")
    for rank, shard in enumerate(sglang):
        top = 76 + rank * (shard.shape[0] * per_row + 24)
        picture.words(810, top + shard.shape[0] * per_row / 2, f"rank {rank}")
        for piece in shard.pieces:
            for source, other in enumerate(megatron):
                for held in other.pieces:
                    common = intersect(held.source, piece.source) if held.tensor == piece.tensor else None
                    if common is None:
                        continue
                    shift = piece.target[0][0] - piece.source[0][0]
                    here = _span(common, middle[piece.tensor], per_row)
                    there = _span(((common[0][0] + shift, common[0][1] + shift),), top, per_row)
                    picture.ribbon((480, *here), (700, *there), source)
                    picture.box(700, there[0], 100, there[1] - there[0], source)
                    picture.words(750, sum(there) / 2, _heads(piece.tensor, common), "ink small", "middle")
    picture.words(
        430,
        622,
        "Qwen2.5-7B: 28 query heads, 4 key-value heads of 128 rows; colours: where it comes from",
        "soft small",
        "middle",
    )
    return picture


def _tensor_tops(shards: list[Shard], per_row: float) -> dict[str, float]:
    rows: dict[str, int] = defaultdict(int)
    for shard in shards:
        for piece in shard.pieces:
            rows[piece.tensor] = max(rows[piece.tensor], piece.source[0][1])
    tops, top = {}, 82.0
    for tensor, count in rows.items():
        tops[tensor] = top
        top += count * per_row + 26
    return tops


def _span(box: Box, top: float, per_row: float) -> tuple[float, float]:
    return top + box[0][0] * per_row, top + box[0][1] * per_row


def _heads(tensor: str, box: Box) -> str:
    letter = next(letter for letter, name in QKV.items() if name in tensor)
    width = weights().config.head_dim
    first, last = box[0][0] // width, box[0][1] // width - 1
    return f"{letter} heads {first}-{last}" if last > first else f"{letter} head {first}"


# -- who sends what to whom


def traffic() -> Picture:
    """GiB between the ranks in one sync, for two layouts of the engines."""
    picture = Picture(860, 500, "GiB from rank to rank in one weight sync from tp4-pp2 to engines of tp4 and of tp2")
    for left, engine, count in ((88, "tp4", "two engines tp4"), (508, "tp2", "four engines tp2")):
        _matrix(picture, left, resharding(engine), f"tp4-pp2 to {count}")
    return picture


def _matrix(picture: Picture, left: float, moves: Plan, title: str) -> None:
    size, top, ranks = 38, 84, range(8)
    sent, kept = _flows(moves)
    most = max([*sent.values(), *kept.values()])
    picture.words(left + size * 4, 26, title, "ink large", "middle")
    picture.words(
        left + size * 4, 46, "columns receive; brown: taken from the rank's own memory", "soft small", "middle"
    )
    picture.words(left - 14, top - 14, "from", "soft small", "end")
    for rank in ranks:
        picture.words(left + (rank + 0.5) * size, top - 14, str(rank), "soft", "middle")
        picture.words(left - 14, top + (rank + 0.5) * size, str(rank), "soft", "end")
        for other in ranks:
            x, y = left + other * size, top + rank * size
            picture.box(x, y, size - 2, size - 2, "empty")
            value = kept[rank] if rank == other else sent[rank, other]
            if value >= 0.005 * GIB:
                shade = 0.25 + 0.75 * value / most
                picture.box(x, y, size - 2, size - 2, 7 if rank == other else rank // 4, shade)
                picture.words(x + size / 2 - 1, y + size / 2 - 1, f"{value / GIB:.2f}", "ink small", "middle")
    whole, numbers = _whole(moves), moves.traffic(itemsize=2)
    lines: dict[str, Callable[[int], float]] = {
        "received": lambda rank: numbers[rank].received,
        "lower bound": lambda rank: numbers[rank].lower_bound,
        "full tensors": lambda rank: whole - _held(moves, rank),
    }
    for row, (name, value_of) in enumerate(lines.items()):
        y = top + 8 * size + 18 + row * 20
        picture.words(left - 6, y, name, "soft small", "end")
        for rank in ranks:
            picture.words(left + (rank + 0.5) * size, y, f"{value_of(rank) / GIB:.2f}", "ink small", "middle")
    picture.words(
        left + size * 4,
        top + 8 * size + 84,
        "GiB a rank; blue: from the first stage, orange: from the second",
        "soft small",
        "middle",
    )


def _flows(moves: Plan) -> tuple[Mapping[tuple[int, int], int], Mapping[int, int]]:
    """Bytes by sender and receiver, and what a rank takes from itself."""
    sent: dict[tuple[int, int], int] = defaultdict(int)
    kept: dict[int, int] = defaultdict(int)
    for rank in range(8):
        rank_moves = moves.rank_plan(rank)
        for move in rank_moves.receives:
            sent[move.peer, rank] += numel(move.box) * moves.itemsize(move.tensor, 2)
        for copy in rank_moves.copies:
            kept[rank] += numel(copy.target_box) * moves.itemsize(copy.tensor, 2)
    return sent, kept


def _whole(moves: Plan) -> int:
    return sum(
        numel(tuple((0, n) for n in entry.tensor.shape)) * 2 for entry in weights().tensor_index.entries.values()
    )


def _held(moves: Plan, rank: int) -> int:
    return sum(numel(piece.source) * 2 for shard in moves.source.shards(rank).values() for piece in shard.pieces)


# -- in which order


def buckets() -> Picture:
    """Some buckets of one rank: two buffers, each filled while the other one is on its way."""
    rank, first = 1, 100
    rank_schedule = schedule(resharding("tp2"), rank, torch.bfloat16)
    shown = rank_schedule.buckets[first : first + 8]
    picture = Picture(860, 282, "Buckets of one rank: two in flight, each of messages to and from its peers")
    picture.words(20, 26, f"Rank {rank}, from tp4-pp2 to four engines tp2", "ink large")
    caption = (
        f"{len(shown)} of its {len(rank_schedule.buckets)} buckets of at most {BUCKET_BYTES // MIB} MiB, "
        "as wide as their bytes"
    )
    picture.words(20, 46, f"{caption}; {rank_schedule.bytes_received / GIB:.2f} GiB received in all", "soft small")
    scale = 720 / sum(bucket.nbytes for bucket in shown)
    starts = [80 + scale * before for before in accumulate((b.nbytes for b in shown), initial=0)]
    for lane, name in enumerate(("buffer A", "buffer B")):
        picture.words(70, 96 + lane * 80, name, "soft small", "end")
    for number, bucket in enumerate(shown):
        y, x = 76 + number % 2 * 80, starts[number]
        end = starts[min(number + 2, len(shown))]
        picture.box(x, y, end - x, 40, "empty")
        for peer, outgoing, left, right in _messages(bucket, x, scale):
            picture.box(left, y if outgoing else y + 20, right - left, 20, peer)
        if number + 1 < len(shown) and end - starts[number + 1] > 60:
            picture.words((starts[number + 1] + end) / 2, y + 20, "in flight", "soft small", "middle")
        picture.words(x, y + 50, f"bucket {first + number}", "soft small")
    peers = sorted({message.peer for bucket in shown for message in bucket.messages})
    for place, peer in enumerate(peers):
        picture.box(80 + place * 90, 240, 14, 14, peer)
        picture.words(100 + place * 90, 247, f"rank {peer}", "soft small")
    picture.words(840, 247, "upper half: sent, lower half: received", "soft small", "end")
    return picture


def _messages(bucket: Bucket, x: float, scale: float) -> Iterator[tuple[int, bool, float, float]]:
    """(peer, outgoing, left, right) of the messages of a bucket, side by side."""
    for message in bucket.messages:
        yield message.peer, message.outgoing, x, x + message.nbytes * scale
        x += message.nbytes * scale


# -- rows


def packing() -> Picture:
    """Rows of recorded lengths in the micro-batches of four data-parallel ranks."""
    ranks, budget, count = 4, 6144, 96
    lengths = [
        length.total
        for length in read_lengths(ROOT / "tools" / "docs" / "lengths_of_samples" / "random_qwen3_4096.txt")[:count]
    ]
    flops = row_flops(weights().config, weights().tensor_index)
    shares = pack(lengths, [flops(length) for length in lengths], ranks, budget)
    steps = len(shares[0])
    padded = ranks * max(lengths) * -(-count // ranks)
    picture = Picture(860, 78 + ranks * 46 + 56, "Rows of very different lengths in micro-batches of four ranks")
    picture.words(20, 26, f"{count} rows of {min(lengths)} to {max(lengths)} tokens on dp{ranks}", "ink large")
    picture.words(
        20, 46, f"micro-batches of at most {budget} tokens, boxes are rows; as wide as their tokens", "soft small"
    )
    gap = 14
    scale = (720 - gap * (steps - 1)) / (budget * steps)
    loads = [sum(flops(lengths[row]) for micro in share for row in micro) for share in shares]
    for rank, share in enumerate(shares):
        y = 70 + rank * 46
        picture.words(70, y + 17, f"dp {rank}", "soft", "end")
        for step, micro in enumerate(share):
            x = 80 + step * (budget * scale + gap)
            picture.box(x, y, budget * scale, 34, "empty")
            for row in micro:
                picture.box(x, y, lengths[row] * scale, 34, _quartile(lengths[row], lengths))
                x += lengths[row] * scale
        picture.words(812, y + 17, f"{loads[rank] * ranks / sum(loads):.3f}", "ink small")
    y = 70 + ranks * 46 + 14
    picture.words(80, y, f"{sum(lengths)} tokens; padded to the longest they would be {padded}", "soft small")
    picture.words(840, y, "right: predicted work of a rank over the mean", "soft small", "end")
    picture.words(80, y + 20, "colours: the quarter of the rows, by length, that a row belongs to", "soft small")
    return picture


def _quartile(length: int, lengths: list[int]) -> int:
    return min(3, 4 * sorted(lengths).index(length) // len(lengths))


# -- placement of roles

PLACED = {
    "All roles on all ranks": (
        ("actor", "tp2-pp2", range(8)),
        ("reference", "tp4", range(8)),
        ("critic", "tp2-pp2", range(8)),
        ("rollout", "tp4", range(8)),
    ),
    "Apart: critic.ranks=4-7, rollout.num_ranks=2": (
        ("actor", "tp2-pp2", range(4)),
        ("reference", "tp4", range(4)),
        ("critic", "tp2", range(4, 8)),
        ("rollout", "tp2", range(8, 10)),
    ),
}


def placements() -> Picture:
    """Draws the part of each role on every rank, for two jobs."""
    picture = Picture(860, 470, "Placement of the roles of two jobs, rank by rank")
    top = 22.0
    for title, roles in PLACED.items():
        count = max(ranks.stop for *_, ranks in roles)
        width = 660 / count
        picture.words(20, top + 4, title, "ink large")
        for rank in range(count):
            picture.words(120 + (rank + 0.5) * width, top + 28, f"rank {rank}", "soft small", "middle")
        for row, (role, layout, ranks) in enumerate(roles):
            y = top + 42 + row * 38
            picture.words(110, y + 10, role, anchor="end")
            picture.words(110, y + 23, layout, "soft small", "end")
            for rank, copy, lines in _rank_parts(role, layout, ranks):
                x = 120 + rank * width
                picture.box(x, y, width - 3, 33, copy + 4 * (role == "rollout"))
                for line, text in enumerate(lines):
                    picture.words(x + width / 2 - 1, y + 11 + line * 12, text, "ink small", "middle")
        top += 224
    picture.words(
        840, 456, "colours: the copy of the model, or the engine, that a rank is part of", "soft small", "end"
    )
    return picture


def _rank_parts(role: str, layout: str, ranks: range) -> Iterator[tuple[int, int, tuple[str, str]]]:
    """Yields (rank, copy of the model, its part in two lines of text)."""
    if role == "rollout":
        engines = EnginePlacement(EngineLayout.parse(layout), tuple(ranks))
        for rank in ranks:
            at = engines.coordinates(rank)
            yield rank, at.engine, (f"tp {at.tp}", f"engine {at.engine}")
        return
    placement = Placement(Layout.parse(layout).fit(len(ranks)), tuple(ranks))
    for rank in ranks:
        held = placement.coordinates(rank)
        assert held is not None
        stage = f" pp {held.pp}" if placement.layout.pp > 1 else ""
        yield rank, held.dp, (f"tp {held.tp}{stage}", f"dp {held.dp}")


DRAWN: Mapping[str, Callable[[], Picture]] = {
    draw.__name__: draw for draw in (qkv, traffic, buckets, packing, placements)
}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWN.items():
        draw().save(folder / f"{name}.svg")
        print(folder / f"{name}.svg")
