"""`Batch`, the one message between the parts: ragged columns and no padding.

Two rows, of 3 and 2 tokens, prompts of 1 token each:

    batch = Batch.from_rows([[5, 8, 2], [7, 2]])    row 0: prompt 5, response 8 2    row 1: prompt 7, response 2

    lengths     [3, 2]                 one entry a row
    tokens      [5, 8, 2, 7, 2]        a token column: flat, (sum(lengths),)
    loss_mask   [0, 1, 1, 0, 1]        a token column
    reward      [1.0, 0.0]             a sequence column: (n,)

    offsets     [0, 3, 5]              row i has the entries offsets[i]:offsets[i + 1]
    sequence_ids, positions            [0, 0, 0, 1, 1], [0, 1, 2, 0, 1]
    expand_to_tokens(reward)           [1, 1, 1, 0, 0]
    pad("tokens")                      [[5, 8, 2], [7, 2, 0]] and its mask
    select([1, 0])["tokens"]           [7, 2, 5, 8, 2]

    support_sizes  [0, 2, 0, 0, 1]     a token column: candidates of the draw of each token
    support_ids    [8, 6, 2]           a candidate column, token after token: row 0 has two entries, row 1 has one

Columns that the recipes and roles of verl_mg agree on (float32 unless said):

| column | kind | meaning |
|---|---|---|
| tokens | token, int64 | prompt, response and observations of a row, in order |
| loss_mask | token, bool | true on the tokens that the policy wrote |
| rollout_logprobs, old_logprobs, ref_logprobs | token | log-prob of token t at entry t; 0 outside the mask |
| policy_versions | token, int64 | the weights that wrote the token; -1 where none did |
| old_outputs | token | (2,) a token: `old_logprobs`, and the sum of the squared probabilities of the vocabulary |
| sampler_top | token | (2, k) a token: log-probs and ids of the tokens that the engine found likeliest there |
| old_top | token | (k,) a token: log-probs of these tokens by the policy that `old_logprobs` are of |
| centering | token | (1 + k,) a token: factors of the tail and of these tokens in score centering |
| values, advantages, returns | token | of token t at entry t |
| correction | token | weight of token t's loss against the mismatch of rollout and training; 0 outside the mask |
| correction_below, correction_above | token | 1 where the ratio of that weight is out of its bounds |
| correction_rejected | token | 1 where the token is left out of the loss, so that its weight is 0 |
| teacher_logprobs | token | log-prob of token t by the row's teacher at entry t; 0 outside the mask |
| teacher_top | token | (2, k) a token: log-probs and ids of the tokens that the teacher finds likeliest there |
| teacher_hidden | token | (h,) a token, in the teacher's dtype: its last hidden state, which predicts the token |
| teacher | sequence, int64 | number of the row's teacher |
| support_sizes | token, int32 | candidates that top-k, top-p and min-p left of the vocabulary; 0: all of it |
| support_ids | candidate, int32 | their token ids: log-probs are of the distribution over them |
| routed_experts | token, int16 | (layers, k) a token: the experts that took it in the rollout; -1 where not known |
| selection_sizes | token, int32 | bytes of the token's selections of keys; 0: not known, or it attends to all keys |
| selected_keys | selection, uint8 | (layers,) a byte: eight keys each, of which the token attends to those with a 1 |
| reward | sequence | the scalar score of the row |
| group | sequence, int64 | rows of one prompt share it; where agents have names, rows of one agent and prompt |
| trajectory | sequence, int64 | rows of one sample share it: an agent's sample has a row for each of its segments |
| agent | sequence, int64 | number in `rollout.agent_names` of the agent that wrote in the row; of agents with names |
| sample_id | sequence, int64 | unique over the run and the ranks; in a trajectory in the order of the segments |
| prefix_of, prefix_length | sequence, int64 | of agents: the row begins with so many tokens of that id's row |
| prompt_id, prompt_length | sequence, int64 | which prompt, and how many tokens are in front of the response |
| policy_version | sequence, int64 | the oldest weights that wrote of the row |
| truncated | sequence, bool | the response was cut at the length limit |
| pair, chosen | sequence, int64 and bool | two rows of one prompt to be compared, and which of them is preferred |

`images` is no column, because it is ragged twice, by row and by image: for each row of a vision-language model the
tuple of its encoded images, in the order of their placeholders in `tokens`; None where no row has any. The rows of a
prompt share them, see `verl_mg.images`.

The rows of a trajectory are on one rank and have the same reward; whatever counts samples counts a trajectory once.
Without agents a trajectory is a row. A batch without the column has as many trajectories as rows. An episode of agents
with names is a trajectory for each of them: what compares the samples of a prompt compares trajectories of one agent.

Inside a recipe a batch is distributed over all ranks of the job, each row on exactly one of them. Roles
fetch the rows that they work on and bring columns back, so a recipe never mentions ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from verl_mg.images import RowImages
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from verl_mg import pending_column
else:
    torch = lazy_import("torch")
    pending_column = lazy_import("verl_mg.pending_column")


class ColumnKind(IntEnum):
    """Unit of a column's entries; UNKNOWN in a batch without rows. Of those in COUNTED_BY tokens have several."""

    UNKNOWN = 0
    SEQUENCE = 1
    TOKEN = 2
    CANDIDATE = 3
    SELECTION = 4


SUPPORT_SIZES, SUPPORT_IDS = "support_sizes", "support_ids"
SELECTION_SIZES, SELECTED_KEYS = "selection_sizes", "selected_keys"
COUNTED_BY = {ColumnKind.CANDIDATE: SUPPORT_SIZES, ColumnKind.SELECTION: SELECTION_SIZES}
"""Token column with the number of entries that each token has in a column of a kind."""
COUNTED_COLUMNS = {SUPPORT_IDS: ColumnKind.CANDIDATE, SELECTED_KEYS: ColumnKind.SELECTION}
_COUNTED_BY_NUMBERS = {COUNTED_BY[kind]: name for name, kind in COUNTED_COLUMNS.items()}
TOKEN_COLUMNS = frozenset(
    {"tokens", "loss_mask", "policy_versions", "rollout_logprobs", "old_logprobs", "ref_logprobs"}
    | {"old_outputs", "sampler_top", "old_top", "centering"}
    | {"teacher_logprobs", "teacher_top", "teacher_hidden"}
    | {"values", "advantages", "returns", "routed_experts", *COUNTED_BY.values()}
    | {"correction", "correction_below", "correction_above", "correction_rejected"}
)
SEQUENCE_COLUMNS = frozenset(
    {"reward", "group", "trajectory", "sample_id", "prefix_of", "prefix_length", "prompt_id", "prompt_length"}
    | {"agent", "policy_version", "truncated", "pair", "chosen", "teacher"}
)


class Batch:
    """Rows of different lengths as flat columns.

    Shapes: `lengths` (n,) int64, token columns (sum(lengths), ...), sequence columns (n, ...).
    """

    def __init__(self, lengths: Tensor | Sequence[int], columns: dict[str, Tensor] | None = None) -> None:
        self.lengths = torch.as_tensor(lengths, dtype=torch.int64)
        self._columns: dict[str, Tensor] = {}
        self._kinds: dict[str, ColumnKind] = {}
        self._images: Sequence[RowImages] | None = None
        for name, values in (columns or {}).items():
            self[name] = values

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int]]) -> Batch:
        """Returns a batch with only the column `tokens`."""
        rows = list(rows)
        flat = [token for row in rows for token in row]
        return cls([len(row) for row in rows], {"tokens": torch.tensor(flat, dtype=torch.int64)})

    # -- columns

    def __len__(self) -> int:
        return self.lengths.numel()

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._columns:
            raise KeyError(f"the batch has no column {name!r}; it has {', '.join(self.names()) or 'none'}")
        values = self._columns[name]
        # Once it is computed it becomes an ordinary tensor, whose operations take no detour through Python.
        if isinstance(values, pending_column.PendingColumn):
            values = self._columns[name] = values.read(f"column {name!r}")
        return values

    def __setitem__(self, name: str, values: Tensor) -> None:
        self.put(name, values, self._guess_kind(name, values))

    def put(self, name: str, values: Tensor, kind: ColumnKind) -> None:
        """Sets a column of a given kind; ValueError where the values do not fit it.

        Args:
            name: name of the column.
            values: (sum(counts(kind)), ...), such as (n, ...) for a sequence column; or a `PendingColumn`.
            kind: needed for new names in a batch whose shape does not decide, such as one without rows.
        """
        expected, shape = self._num_entries(kind), _shape(values)
        # Entries and their numbers may be set in either order.
        is_early = kind in COUNTED_BY and COUNTED_BY[kind] not in self
        if shape[:1] != (expected,) and not is_early:
            raise ValueError(
                f"column {name!r} has shape {shape}: a {kind.name.lower()} column of this batch starts "
                f"with {expected} ({len(self)} rows, {self.total_tokens} tokens)"
            )
        counted = _COUNTED_BY_NUMBERS.get(name, "")
        if counted in self and int(values.sum()) != len(self[counted]):
            raise ValueError(
                f"column {name!r} adds up to {int(values.sum())}, but {counted!r} has {len(self[counted])}"
            )
        self._columns[name] = values
        self._kinds[name] = kind

    def _guess_kind(self, name: str, values: Tensor) -> ColumnKind:
        if name in TOKEN_COLUMNS:
            return ColumnKind.TOKEN
        if name in SEQUENCE_COLUMNS:
            return ColumnKind.SEQUENCE
        if name in COUNTED_COLUMNS:
            return COUNTED_COLUMNS[name]
        if name in self._kinds:
            return self._kinds[name]
        # A rank without rows cannot know; `concat` takes the kind of the other batches.
        if len(self) == 0:
            return ColumnKind.UNKNOWN
        # Every row has at least one token, so the two sizes differ as soon as one row has two.
        return ColumnKind.SEQUENCE if _shape(values)[:1] == (len(self),) else ColumnKind.TOKEN

    def kind(self, name: str) -> ColumnKind:
        """Returns what the column has an entry for."""
        return self._kinds[name]

    def _num_entries(self, kind: ColumnKind) -> int:
        if kind in COUNTED_BY:
            return int(self.counts(kind).sum())
        return self.total_tokens if kind is ColumnKind.TOKEN else len(self)

    def counts(self, kind: ColumnKind) -> Tensor:
        """Returns the number of entries that each row has in a column of the kind, (n,) int64."""
        if kind is ColumnKind.TOKEN:
            return self.lengths
        if kind not in COUNTED_BY:
            return torch.ones_like(self.lengths)
        counts, sizes = torch.zeros_like(self.lengths), COUNTED_BY[kind]
        return counts.index_add_(0, self.sequence_ids, self[sizes].long()) if sizes in self else counts

    def names(self) -> list[str]:
        """Returns the columns' names, sorted: the same order on every rank."""
        return sorted(self._columns)

    # -- images

    @property
    def images(self) -> Sequence[RowImages] | None:
        """The images of each row; None where no row has any. The batch keeps the sequence itself."""
        return self._images

    @images.setter
    def images(self, images: Sequence[RowImages] | None) -> None:
        if images is not None and len(images) != len(self):
            raise ValueError(f"images of {len(images)} rows: the batch has {len(self)}")
        self._images = images

    # -- positions of tokens

    @cached_property
    def total_tokens(self) -> int:
        """Number of tokens of all rows, sum(lengths)."""
        return int(self.lengths.sum())

    @cached_property
    def offsets(self) -> Tensor:
        """(n + 1,) int64: row i holds entries offsets[i]:offsets[i + 1] of a token column."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    @cached_property
    def sequence_ids(self) -> Tensor:
        """(sum(lengths),) int64: the row of each token."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    @cached_property
    def positions(self) -> Tensor:
        """(sum(lengths),) int64: each token's place in its row, from 0."""
        return torch.arange(self.total_tokens) - self.offsets[:-1][self.sequence_ids]

    @property
    def last(self) -> Tensor:
        """(sum(lengths),) bool: true on the last token of each row."""
        return self.positions == self.expand_to_tokens(self.lengths) - 1

    def expand_to_tokens(self, values: Tensor) -> Tensor:
        """Returns a sequence column (n,) as a token column (sum(lengths),): each token gets its row's value."""
        return values[self.sequence_ids]

    def row(self, name: str, i: int) -> Tensor:
        """Returns one row (lengths[i], ...) of a token column.

        Args:
            name: name of the column.
            i: number of the row.
        """
        start, stop = self.offsets[i : i + 2].tolist()
        return self[name][start:stop]

    # -- trajectories

    @property
    def trajectory_index(self) -> Tensor:
        """(n,) int64: the number of each row's trajectory, from 0 in the order of their first appearance."""
        if "trajectory" not in self:
            return torch.arange(len(self))
        _, index = self["trajectory"].unique(return_inverse=True)
        rows = torch.arange(len(self))
        appearance = torch.full((_count(index),), len(self)).scatter_reduce_(0, index, rows, "amin")
        return appearance.argsort().argsort()[index]

    @property
    def first_rows(self) -> Tensor:
        """(t,) int64: of each trajectory the row with the lowest `sample_id`, in the order of `trajectory_index`."""
        rows, sizes, _ = self._joined_rows()
        return rows[sizes.cumsum(0) - sizes]

    @property
    def last_rows(self) -> Tensor:
        """(t,) int64: of each trajectory the row with the highest `sample_id`, in the order of `trajectory_index`."""
        rows, sizes, _ = self._joined_rows()
        return rows[sizes.cumsum(0) - 1]

    def one_per_trajectory(self) -> Batch:
        """Returns the sequence columns of `first_rows`, for values that the rows of a trajectory share."""
        names = [name for name, kind in self._kinds.items() if kind <= ColumnKind.SEQUENCE]
        return self.select_columns(names).select(self.first_rows)

    def _joined_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows (n,) by trajectory and in it by sample id; number of rows (t,) and of tokens (t,) of each trajectory."""
        index = self.trajectory_index
        order, count = torch.arange(len(self)), _count(index)
        if count < len(self):
            order = self["sample_id"].argsort(stable=True)
            order = order[index[order].argsort(stable=True)]
        sizes = torch.bincount(index, minlength=count)
        lengths = torch.zeros(count, dtype=torch.int64).index_add_(0, index, self.lengths)
        return order, sizes, lengths

    def pad(self, name: str, fill: float = 0) -> tuple[Tensor, Tensor]:
        """Returns a token column as a padded table with a line for each trajectory, its rows one after another.

        Args:
            name: name of the column.
            fill: value of the padding.

        Returns:
            The table (t, T, ...) in the order of `trajectory_index`, where T is the number of tokens of the longest
            trajectory, and the bool mask (t, T) of real entries.
        """
        rows, _, lengths = self._joined_rows()
        width = int(lengths.max()) if len(lengths) else 0
        mask = torch.arange(width) < lengths[:, None]
        values = self[name]
        table = values.new_full((len(lengths), width, *values.shape[1:]), fill)
        table[mask] = values if len(lengths) == len(self) else values[self.entries(rows)]
        return table, mask

    def unpad(self, table: Tensor) -> Tensor:
        """Returns a padded table (t, T) as a token column (sum(lengths),); the inverse of `pad`."""
        rows, _, lengths = self._joined_rows()
        values = table[torch.arange(table.shape[1]) < lengths[:, None]]
        if len(lengths) == len(self):
            return values
        return torch.empty_like(values).index_copy_(0, self.entries(rows), values)

    # -- verbs

    def select(self, rows: Tensor | Sequence[int]) -> Batch:
        """Returns the given rows in the given order; `rows`: indices or a bool mask (n,)."""
        index = torch.as_tensor(rows)
        index = index.nonzero().flatten() if index.dtype == torch.bool else index.to(torch.int64)
        entries = {kind: self.entries(index, kind) for kind in set(self._kinds.values())}
        chosen = Batch(self.lengths[index])
        for name, kind in self._kinds.items():
            chosen.put(name, self[name][entries[kind]], kind)
        if self._images is not None:
            chosen.images = [self._images[row] for row in index.tolist()]
        return chosen

    def entries(self, rows: Tensor, kind: ColumnKind = ColumnKind.TOKEN) -> Tensor:
        """Returns the positions (sum(counts(kind)[rows]),) int64 of the entries of rows (m,) int64, row after row.

        Args:
            rows: numbers of the rows.
            kind: kind of the column.
        """
        if kind is not ColumnKind.TOKEN and kind not in COUNTED_BY:
            return rows
        return entries_of(self.counts(kind), rows)

    def select_columns(self, names: Iterable[str]) -> Batch:
        """Returns the same rows and images with the named columns; names that are not there are left out."""
        rows = Batch(self.lengths)
        rows.images = self._images
        for name in names:
            if name in self:
                rows.put(name, self[name], self._kinds[name])
        return rows

    def repeat(self, times: int | Sequence[int]) -> Batch:
        """Returns each row `times` times, copies side by side; a sequence has the number for each row."""
        return self.select(torch.arange(len(self)).repeat_interleave(torch.as_tensor(times, dtype=torch.int64)))

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Returns consecutive parts of the given numbers of rows, which must add up to n."""
        if sum(sizes) != len(self):
            raise ValueError(f"split sizes {list(sizes)} add up to {sum(sizes)}, the batch has {len(self)} rows")
        parts = [Batch(lengths) for lengths in self.lengths.split(list(sizes))]
        rows = {kind: self.counts(kind).split(list(sizes)) for kind in set(self._kinds.values())}
        counts = {kind: [int(n.sum()) for n in of_parts] for kind, of_parts in rows.items()}
        for name, kind in self._kinds.items():
            for part, values in zip(parts, self[name].split(counts[kind]), strict=True):
                part.put(name, values, kind)
        ends = list(accumulate(sizes))
        if self._images is not None:
            for part, end in zip(parts, ends, strict=True):
                part.images = self._images[end - len(part) : end]
        return parts

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Returns all rows of the given batches, which must have the same columns."""
        names = batches[0].names()
        for other in batches[1:]:
            if other.names() != names:
                raise ValueError(f"batches with different columns: {names} and {other.names()}")
        whole = Batch(torch.cat([batch.lengths for batch in batches]))
        for name in names:
            # UNKNOWN, of batches without rows, is the smallest.
            kind = max(batch.kind(name) for batch in batches)
            whole.put(name, torch.cat([batch[name] for batch in batches]), kind)
        if any(batch.images is not None for batch in batches):
            whole.images = [images for batch in batches for images in batch.images or [()] * len(batch)]
        return whole


def entries_of(counts: Tensor, rows: Tensor) -> Tensor:
    """Returns the positions in a flat column, of which each row has `counts` (n,) entries, of rows (m,), in order.

    Args:
        counts: (n,) int64, such as [2, 0, 3] of the entries a a c c c.
        rows: (m,) int64, such as [2, 0], whose entries are at 2 3 4 0 1.
    """
    starts, sizes = (counts.cumsum(0) - counts)[rows], counts[rows]
    return torch.repeat_interleave(starts - sizes.cumsum(0) + sizes, sizes) + torch.arange(int(sizes.sum()))


def _count(index: Tensor) -> int:
    """Returns how many numbers, all from 0 on, occur."""
    return int(index.max()) + 1 if len(index) else 0


def _shape(values: Tensor) -> tuple[int, ...]:
    return values.dimensions if isinstance(values, pending_column.PendingColumn) else tuple(values.shape)
