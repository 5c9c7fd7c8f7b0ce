"""Rows of trajectories that share prefixes, for tests."""

import torch

from verl_mg.batch import Batch, ColumnKind
from verl_mg.layout.shared_prefixes import PrefixLinks, SharingRows
from verl_mg.roles.role import mark_shared

MAX_SEGMENTS = 1024
# Of each row: its parent or None, first tokens of it, and tokens of its own. A chain, siblings of which one shares a
# token less, a row that repeats all of another one, one that is a part of it, and one alone.
TREES = (
    ((None, 0, 12), (0, 9, 6), (1, 13, 5), (1, 4, 7), (0, 12, 1)),
    ((None, 0, 5), (0, 5, 0), (0, 3, 0), (0, 4, 9), (3, 12, 3)),
    ((None, 0, 8),),
)


def sharing_rows(vocab: int, seed: int = 0) -> Batch:
    """Rows with the columns of an update, tokens of shared prefixes under the loss mask too."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = []
    columns: dict[str, list[int]] = {"sample_id": [], "prefix_of": [], "prefix_length": []}
    for trajectory, tree in enumerate(TREES):
        first = len(rows)
        for segment, (parent, count, own) in enumerate(tree):
            prefix = [] if parent is None else rows[first + parent][:count]
            rows.append([*prefix, *torch.randint(1, vocab, (own,), generator=generator).tolist()])
            columns["sample_id"].append(trajectory * MAX_SEGMENTS + segment)
            columns["prefix_of"].append(trajectory * MAX_SEGMENTS + (segment if parent is None else parent))
            columns["prefix_length"].append(count)
    batch = Batch.from_rows(rows)
    for name, values in columns.items():
        batch.put(name, torch.tensor(values), ColumnKind.SEQUENCE)
    batch["loss_mask"] = torch.rand(batch.total_tokens, generator=generator) < 0.7
    for name in ("advantages", "noise"):
        batch[name] = torch.randn(batch.total_tokens, generator=generator)
    return batch


# Tokens of each prompt, and of the responses of its samples.
SAMPLED = ((9, (4, 7, 1, 0)), (1, (3, 5)), (14, (2, 6, 6)), (14, (5,)))


def sampled_rows(vocab: int) -> Batch:
    """Rows of samples of several prompts, with the columns of an update; the last two differ in their last token."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, vocab, (count,), generator=generator) for count, _ in SAMPLED]
    prompts[3] = torch.cat([prompts[2][:-1], prompts[2][-1:] % (vocab - 1) + 1])
    pairs = [(prompt, count) for prompt, (_, counts) in zip(prompts, SAMPLED, strict=True) for count in counts]
    rows = [[*prompt.tolist(), *torch.randint(1, vocab, (n,), generator=generator).tolist()] for prompt, n in pairs]
    batch = Batch.from_rows(rows)
    batch["sample_id"] = torch.arange(len(rows))
    batch["prompt_length"] = torch.tensor([len(prompt) for prompt, _ in pairs])
    batch["loss_mask"] = batch.positions >= batch.expand_to_tokens(batch["prompt_length"])
    for name in ("advantages", "noise"):
        batch[name] = torch.randn(batch.total_tokens, generator=generator)
    return batch


def sharing_micro_batch(vocab: int) -> Batch:
    """The same rows as one micro-batch, in which shared tokens are computed once."""
    batch = sharing_rows(vocab)
    numbers = range(len(batch))
    columns = (batch[name].tolist() for name in ("sample_id", "prefix_of", "prefix_length"))
    sample_ids, prefix_of, prefix_length = columns
    links = PrefixLinks.from_columns(sample_ids, batch.lengths.tolist(), prefix_of, prefix_length)
    return mark_shared(batch, numbers, SharingRows.of(links, numbers).shared)


def positions_computed_once() -> list[int]:
    """Positions of the tokens of the rows, those that they share counted once."""
    return [position for tree in TREES for _, count, own in tree for position in range(count, count + own)]
