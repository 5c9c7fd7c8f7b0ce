"""Shrunk copy of the configuration of any family of `transformers`: few narrow layers of each kind, short windows.

    hidden 8192, 64 heads of 128, 8 kv heads   ->   hidden 64, 4 heads of 16, 2 kv heads
    layers s s s s s f s s s s s f ...         ->   s f                 (s: window, f: full)
    longest row 8192, window 4096              ->   longest row 64, window 32, factor 128

Widths are divided by one factor, counts of heads by another, so that what follows from several of them stays so. Names
of fields only suggest what to divide: a copy counts when its module builds, runs, and has the kinds of layers of the
whole depth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from logging import CRITICAL
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from verl_mg.errors import UserError, one_line
from verl_mg.models.tiny_model import CHOICES as INTEGERS
from verl_mg.models.transformers_module import module_class, takes, text_fields

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LONGEST_ROW = 64  # tokens of the longest row of a copy
MARGIN = 8  # of bounds that no row reaches: positions of some families begin at 2
VOCABULARY = 256  # the most tokens of a copy
ORDINARY_TOKENS = (4, 200)  # special ones, such as placeholders of images, have the first and the last ids
EXPERTS, CHOSEN_EXPERTS, EXPERT_GROUPS = 8, 2, 2  # the most of a copy; two groups of four, from which two are chosen
SELECTED = 4  # keys, or blocks of keys, that sparse attention selects in a copy: always fewer than a row has
HEADS = 4  # query heads of a copy
INDEX_HEADS = 16  # the most heads that score keys in a copy: of few, the scores are often all zero, and keys equal
WIDTHS_OF_HEADS = (16, 32, 64)  # of the widest head: the first with which a family builds
MULTIPLE = 16  # of which widths are multiples
SMALLEST = 4  # the smallest width: rotary embedding needs pairs
LAYERS = 16  # the most layers that are chosen from lists
DEPTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

Fields = dict[str, Any]
INDICES = re.compile(r"index$|idx$|^training$")
# Names of fields by what they count. The first group that matches decides.
VOCABULARIES = re.compile(r"vocab")
TOKENS = re.compile(r"token_(id|ids|index)$|_(token|tokens)$")
KV_HEADS = re.compile(r"num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups|multi_query_group_num")
INDEXERS = re.compile(r"^index_n_heads$")
HEAD_COUNTS = re.compile(r"heads?(_per_layer)?$")
GROUPS = re.compile(r"^(o_groups|n_groups|\w*n_?groups|index_kpool)$")
HEAD_WIDTHS = re.compile(r"head_?dim$|d_head$|dim_head$|head_size$|kv_channels|rotary_dim|query_pre_attn_scalar")
CHOICES = re.compile(r"experts_per_tok(en)?$|^moe_(k|topk|top_k)$|^top_k_experts$")
EXPERT_COUNTS = re.compile(r"(num|n)_(\w+_)?experts$|zero_expert_num")
SHARED_EXPERTS = re.compile(r"shared")
SELECTIONS = re.compile(r"index_topk|topk_blocks")
BOUNDS = re.compile(
    r"window(_size)?$|position_embeddings$|n_positions|n_ctx|max_seq_len|^attention_chunk_size|local_attention$|"
    r"block_size$|max_length$|context_length|floor_scale|compress_rates|rel_extent|max_distance|attn_chunk_length|mem_len"
)
ROUNDING = re.compile(r"multiple_of$|divisible_by$")
WIDTHS = re.compile(
    r"hidden_size|intermediate_size|ffn_dim|ffn_hidden|_dim$|_rank$|lowrank$|width$|state_size$|d_state$|d_model|d_ssm|"
    r"d_rel|n_embd|n_inner|d_inner|^dff$|dim_ff$|^emb_dim|embedding_size$|feed_forward_size|hidden_size_per_layer|"
    r"size_mlp|dim_model_base"
)
NOT_WIDTHS = re.compile(r"conv1d_width|clamp|num_")


@dataclass(frozen=True)
class ShrunkConfig:
    """A copy of a configuration, and what its bounds were divided by."""

    config: PretrainedConfig
    factor: float
    """Divisor of windows, original lengths of rope, and the longest row: that of the copy is at most `LONGEST_ROW`."""


@dataclass(frozen=True)
class Widths:
    """Widths of a copy; kernels of engines need larger ones."""

    of_heads: tuple[int, ...] = WIDTHS_OF_HEADS  # of the widest head: the first with which a family builds
    multiple: int = SMALLEST  # of which widths are multiples


def shrink(config: PretrainedConfig, longest_row: int, divisor: int = 1, widths: Widths = Widths()) -> ShrunkConfig:
    """Returns a narrow copy of a language model's configuration, of the same family and with each kind of its layers.

    A row of the copy with `LONGEST_ROW` tokens crosses the bounds that the job's longest row crosses. `divisor`, such
    as the ranks of tensor and context parallelism, divides the heads of the copy where it divides the model's heads.
    UserError if no copy can be built.
    """
    with _silent():
        return _shrink(config, longest_row, divisor, widths)


@contextmanager
def _silent() -> Iterator[None]:
    """Keeps `transformers` from warning of the sizes of copies that are tried."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _shrink(config: PretrainedConfig, longest_row: int, divisor: int, widths: Widths) -> ShrunkConfig:
    bounds = _Bounds(longest_row, max(1.0, longest_row / LONGEST_ROW))
    failure: Exception = ValueError("it has no layers of its kinds")
    for head_width in widths.of_heads:
        narrow = partial(_copy, config, _Target(bounds, divisor, head_width, widths.multiple))
        try:
            kinds, depths = _kinds(_meta(narrow(None))), list(_depths(config))
        except Exception as error:  # of any kind, from a library at untested sizes
            failure = error
            continue
        for layers in depths:
            try:
                copy = narrow(layers)
                if _kinds(_meta(copy)) == kinds:
                    _run(copy)
                    return ShrunkConfig(copy, bounds.factor)
            except Exception as error:
                failure = error
    raise UserError(
        f"model_type {config.model_type!r}: no narrow copy of it runs with rows in proportion to {longest_row} tokens "
        f"({one_line(failure)}). Use shorter rows, or a causal language model."
    ) from failure


def narrow_module(config: PretrainedConfig, attention: str = "eager") -> PreTrainedModel:
    """Returns the module of a copy in float32, with random weights; generators of random numbers stay as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = {"dtype": torch.float32, "attn_implementation": attention}
        module: PreTrainedModel = module_class(config).from_config(deepcopy(config), **options)
    module.generation_config = GenerationConfig()  # a token that ends texts does not end a row of random tokens
    generator, trained = torch.Generator().manual_seed(0), dict(module.named_parameters())
    with torch.no_grad():
        for name, tensor in {**trained, **module.state_dict(keep_vars=True)}.items():
            if name in trained or (not isinstance(tensor, nn.Parameter) and _is_filled_later(tensor)):
                _vary(tensor, generator)
    return module.eval().requires_grad_(False)


def _is_filled_later(buffer: Tensor) -> bool:
    """Returns whether a buffer waits for its values: one with several, such as a causal decay, has the family's."""
    return bool((buffer == buffer.flatten()[:1]).all())


def _vary(tensor: Tensor, generator: torch.Generator) -> None:
    """Gives matrices the size with which they pass on what they are given, and varies everything else."""
    if not tensor.is_floating_point():
        tensor.copy_(torch.randint(INTEGERS, tensor.shape, generator=generator))
        return
    # The usual random values are so small that even a missing mask hardly changes an output.
    noise = torch.randn(tensor.shape, generator=generator)
    mean, spread = float(tensor.mean()), float(tensor.std()) if tensor.numel() > 1 else 0.0
    if tensor.dim() > 1 and abs(mean) <= 0.5 * spread:
        tensor.copy_(noise / math.sqrt(max(tensor.shape[1:])))
    else:
        tensor.add_(0.1 * noise)


def row_logits(module: Any, ids: Tensor) -> Tensor:
    """Returns the logits (n, t, V) in float32 of whole rows (n, t)."""
    options = {"use_cache": False} if takes(module, "use_cache") else {}
    logits: Tensor = module(input_ids=ids, **options).logits
    return logits.float()


def row_logprobs(module: Any, rows: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Returns the log-probs of the tokens of each row but its first one, each row by itself."""
    results = []
    for row in rows:
        ids = torch.tensor([row])
        # A copy: a module may keep frequencies of the longest row so far.
        logits = row_logits(deepcopy(module), ids)[0, :-1]
        results.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
    return results


def random_rows(config: PretrainedConfig, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns rows of random tokens of a copy, always the same ones."""
    vocab, generator = config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    tokens = torch.randint(*ORDINARY_TOKENS, (sum(lengths),), generator=generator) % vocab
    return [tuple(part.tolist()) for part in tokens.split(list(lengths))]


def _meta(config: PretrainedConfig) -> nn.Module:
    with torch.device("meta"):
        module: nn.Module = module_class(config).from_config(config, dtype=torch.float32)
    return module


@torch.no_grad()
def _run(config: PretrainedConfig) -> None:
    """Runs a module of random weights over a few tokens; the generators of random numbers stay as they are."""
    with torch.random.fork_rng(devices=[]):
        module: Any = module_class(config).from_config(config, dtype=torch.float32).eval()
    module(input_ids=torch.arange(3, 11)[None], use_cache=False)


def _kinds(part: nn.Module, in_layer: bool = False) -> Any:
    """Returns what a module consists of, whatever the number of its layers: a set for each list of parts."""
    # By class, switches and shapes: two layers that differ by a number only, such as a scale, are of one kind.
    switches = {
        name: value if isinstance(value, bool | str) else bool(value)
        for name, value in vars(part).items()
        if isinstance(value, bool | str | int | float | None) and not INDICES.search(name)
    }
    # Outside of layers a shape may follow from their number.
    shapes = tuple((name, tuple(p.shape)) for name, p in part.named_parameters(recurse=False)) if in_layer else ()
    children = dict(part.named_children())
    numbered = frozenset(_kinds(child, in_layer=True) for name, child in children.items() if name.isdigit())
    named = tuple((name, _kinds(child, in_layer)) for name, child in children.items() if not name.isdigit())
    return type(part).__name__, tuple(switches.items()), shapes, numbered, named


# -- layers


def _depths(config: PretrainedConfig) -> Iterator[tuple[int, ...]]:
    """Yields choices of layers: one of each kind that lists of the configuration name, then the first ones."""
    text = config.get_text_config(decoder=True)
    count = int(text.num_hidden_layers)
    lists = [value for value in text.to_dict().values() if isinstance(value, list | tuple) and len(value) == count]
    unshared = count - int(getattr(text, "num_kv_shared_layers", None) or 0)
    rows = [repr([layer >= unshared, *(each[layer] for each in lists)]) for layer in range(count)]
    first = [rows.index(row) for row in dict.fromkeys(rows)]
    last = [count - 1 - rows[::-1].index(row) for row in dict.fromkeys(rows)]
    # A layer before those that share keys differs from others of its kind: it keeps them.
    for chosen in (first * 2 if len(first) == 1 else first, sorted({*first, *last})):
        if len(chosen) <= LAYERS:
            yield tuple(chosen)
    for depth in DEPTHS:
        if depth < count:
            yield tuple(range(depth))
    yield tuple(range(count))


def _of_layers(fields: Fields, count: int, layers: tuple[int, ...]) -> Fields:
    """Returns the fields of some of the layers: a list with a value for each layer, or numbers of layers."""
    result = dict(fields)
    for name, value in fields.items():
        if isinstance(value, list | tuple) and len(value) == count:
            result[name] = [value[layer] for layer in layers]
        elif isinstance(value, list | tuple) and re.search(r"layers$|layer_ids$|idxs$|indices$", name):
            result[name] = [place for place, layer in enumerate(layers) if layer in value]
        elif name == "per_layer_config" and isinstance(value, Mapping):
            digits = max(map(len, value), default=1)
            given = {int(layer): each for layer, each in value.items()}
            result[name] = {
                str(place).zfill(digits): given[layer] for place, layer in enumerate(layers) if layer in given
            }
        elif re.search(r"^first_k_dense|^num_dense_layers|^max_window_layers", name) and isinstance(value, int):
            result[name] = sum(layer < value for layer in layers)
        elif name == "num_kv_shared_layers" and value:
            result[name] = sum(layer >= count - value for layer in layers)
        elif name == "attention_types":  # GPT-Neo: kinds of layers, and how often they are repeated
            result[name] = [[kinds, -(-len(layers) // len(kinds))] for kinds, _ in value]
    return result


# -- widths


@dataclass(frozen=True)
class _Bounds:
    """Lengths that rows cross."""

    longest_row: int
    factor: float

    def shrunk(self, bound: float) -> int:
        """Returns a bound that rows of the copy cross exactly where the job's rows cross the given one."""
        if bound >= self.longest_row:
            return max(math.ceil(bound / self.factor), LONGEST_ROW + MARGIN)
        return max(int(bound / self.factor), 2)


@dataclass(frozen=True)
class _Target:
    """Widths and bounds by which the sizes of all parts of a copy are chosen."""

    bounds: _Bounds
    divisor: int  # of the number of heads
    head_width: int
    multiple: int  # of which other widths are multiples


@dataclass(frozen=True)
class _Scale:
    """Divisors of a part of a model."""

    heads: float  # of counts of heads
    head_width: int  # of the widths of heads
    width: float  # of all other widths
    kv_heads: int | None
    bounds: _Bounds
    multiple: int

    @classmethod
    def of(cls, config: PretrainedConfig, target: _Target) -> _Scale:
        """Returns the divisors with which the widest head has a width."""
        divisor, head_width = target.divisor, target.head_width
        heads = int(_known(config, "num_attention_heads", "num_heads") or HEADS)
        hidden = int(_known(config, "hidden_size") or heads * head_width)
        kv = next((v for k, v in config.to_dict().items() if KV_HEADS.fullmatch(k) and isinstance(v, int)), None)
        ranks = math.gcd(divisor, heads)
        # A divisor of the heads, so that what follows from their number stays a whole number; even where that is.
        counts = [n for n in range(HEADS, 4 * HEADS + 1) if heads % n == 0 and n % 2 <= heads % 2 and n % ranks == 0]
        kept = min(counts, default=math.lcm(HEADS, ranks)) if heads > HEADS else heads
        fewer = kv if kv is None or kv == 1 else kept if kv == heads else math.lcm(2, math.gcd(divisor, kv))
        if fewer and kept % fewer:
            kept = math.lcm(kept, fewer)
        widths = [v for k, v in config.to_dict().items() if _is_head_width(k) and isinstance(v, int) and v]
        widths += [] if widths and _known(config, "head_dim") else [hidden // heads]
        # A divisor of all of them that leaves pairs for rotary embedding, and pairs of pairs for that of images.
        common, paired = math.gcd(*widths), 2 if min(widths) % SMALLEST else SMALLEST
        by_width = max(
            (
                n
                for n in range(1, min(max(widths) // head_width, min(widths) // SMALLEST) + 1)
                if common % n == 0 and min(widths) // n % paired == 0
            ),
            default=1,
        )
        narrow = hidden * kept // (heads * by_width)
        if hidden != heads * (_known(config, "head_dim") or hidden // heads) or heads % kept:
            step = math.lcm(MULTIPLE, target.multiple, kept)
            narrow = max(2 * MULTIPLE, -(-narrow // step) * step)
        return cls(heads / kept, by_width, hidden / narrow, fewer, target.bounds, target.multiple)

    def field(self, name: str, value: Any) -> Any:
        """Returns the value of a field of the copy."""
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return value
        if isinstance(value, list | tuple) and name.endswith("_factor"):  # one for each pair of rotary embedding
            return list(value[:: self.head_width])
        if isinstance(value, list | tuple) and name.endswith("_section"):  # pairs with the position in time, height, ..
            ends = [round(sum(value[:n]) / self.head_width) for n in range(len(value) + 1)]
            return [end - start for start, end in pairwise(ends)]
        if isinstance(value, list | tuple):
            return [self.field(name, each) for each in value] if not VOCABULARIES.search(name) else value
        if isinstance(value, Mapping):  # bounds of kinds of layers, or fields
            of_kinds = BOUNDS.search(name)
            return {key: self.field(name if of_kinds else str(key), each) for key, each in value.items()}
        if not isinstance(value, int) or value <= 1 or TOKENS.search(name):
            return value
        return self._number(name, value)

    def _number(self, name: str, value: int) -> int:
        if VOCABULARIES.search(name):
            return min(value, VOCABULARY)
        if BOUNDS.search(name):
            return self.bounds.shrunk(value)
        if SELECTIONS.search(name):
            return min(value, SELECTED)
        if CHOICES.search(name):
            return min(value, CHOSEN_EXPERTS)
        if EXPERT_COUNTS.search(name):
            return value if SHARED_EXPERTS.search(name) else min(value, EXPERTS)
        if name == "n_group":
            return min(value, EXPERT_GROUPS)
        if name == "topk_group":
            return min(value, EXPERT_GROUPS // 2)
        if ROUNDING.search(name):
            return min(value, 8)
        if KV_HEADS.fullmatch(name) and self.kv_heads:
            return self.kv_heads
        if INDEXERS.search(name) and value > HEADS:
            return min(value, INDEX_HEADS)
        if HEAD_COUNTS.search(name):
            return max(1, int(value / self.heads))
        if GROUPS.search(name):
            return min(value, 2)
        if HEAD_WIDTHS.search(name):
            return max(1, value // self.head_width)
        if WIDTHS.search(name) and not NOT_WIDTHS.search(name):
            width = value / self.width
            # Whole, or what a grouped product of matrices can read.
            step = max(MULTIPLE, self.multiple)
            return int(width) if width % self.multiple == 0 else max(1, round(width / step)) * step
        return value


def _known(config: PretrainedConfig, *names: str) -> int | None:
    fields = text_fields(config)
    return next((value for name in names if isinstance(value := fields.get(name), int)), None)


def _is_head_width(name: str) -> bool:
    return bool(HEAD_WIDTHS.search(name)) and "mamba" not in name


def _copy(config: PretrainedConfig, target: _Target, layers: tuple[int, ...] | None) -> PretrainedConfig:
    """Returns a narrow copy with some of the layers; None: with all."""
    text = config.get_text_config(decoder=True)
    fields = _narrow(config, target, _Scale.of(text, target))
    part = next((name for name in config.sub_configs if getattr(config, name, None) is text), None)
    _name_tokens(fields)
    if layers is not None:
        inner = fields if part is None else fields[part]
        count, name = int(text.num_hidden_layers), text.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        inner.update(_of_layers(inner, count, layers))
        inner[name] = len(layers)
    copy: PretrainedConfig = type(config).from_dict(fields)
    return copy


def _narrow(config: PretrainedConfig, target: _Target, scale: _Scale) -> Fields:
    fields: Fields = {}
    for name, value in _unusual_fields(config).items():
        child = getattr(config, name, None) if name in config.sub_configs else None
        if child is None or not hasattr(child, "to_dict"):
            fields[name] = scale.field(name, value)
            continue
        inner = _Scale.of(child, target) if hasattr(child, "hidden_size") else scale
        fields[name] = _narrow(child, target, inner)
        if "out_hidden_size" in fields[name]:  # a tower's outputs are as wide as the text's embeddings
            fields[name]["out_hidden_size"] = int(value["out_hidden_size"] / scale.width)
    return fields


def _unusual_fields(config: PretrainedConfig) -> Fields:
    """Returns the fields but for defaults that every configuration has, which some parts refuse."""
    from transformers import PretrainedConfig

    usual = PretrainedConfig().to_dict()
    return {name: value for name, value in config.to_dict().items() if name not in usual or value != usual[name]}


def _name_tokens(fields: Fields, given: dict[int, int] | None = None) -> None:
    """Replaces ids of tokens that the smaller vocabulary does not have by others, the same everywhere."""
    given, vocab = {} if given is None else given, VOCABULARY
    for name, value in fields.items():
        if isinstance(value, dict) and name.endswith("config"):
            _name_tokens(value, given)
        elif TOKENS.search(name):
            many = value if isinstance(value, list) else [value]
            ids = [
                given.setdefault(each, VOCABULARY - 1 - len(given)) if isinstance(each, int) and each >= vocab else each
                for each in many
            ]
            fields[name] = ids if isinstance(value, list) else ids[0]
