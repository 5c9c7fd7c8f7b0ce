"""A key-value cache that grows in place, where `DynamicCache` copies all of it at every token."""

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """A cache layer with spare columns: `keys` and `values` (rows, heads, length, dim) are views of them."""

    key_room: torch.Tensor
    value_room: torch.Tensor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Start with no column at all, in the dtype and on the device of the states."""
        super().lazy_initialization(key_states, value_states)
        self._keep(key_states[:, :, :0], value_states[:, :, :0], length=0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states (rows, heads, new, dim); returns all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > self.key_room.shape[-2]:
            self.key_room = _with_room(self.key_room[:, :, :start], end)
            self.value_room = _with_room(self.value_room[:, :, :start], end)
        self.key_room[:, :, start:end] = key_states
        self.value_room[:, :, start:end] = value_states
        return self._keep(self.key_room, self.value_room, length=end)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Become the given rows; the spare columns are left behind."""
        length = self.get_seq_length()
        keys = self.key_room[:, :, :length].index_select(0, beam_idx)
        values = self.value_room[:, :, :length].index_select(0, beam_idx)
        self._keep(keys, values, length)

    def _keep(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.key_room, self.value_room = keys, values
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]
        return self.keys, self.values


def roomy_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache for a model; layers that keep a window or a state, not all columns, stay as they are."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def take_rows(cache: DynamicCache, rows: torch.Tensor) -> None:
    """Make the cache hold the given rows (r,) int64 of what it held; repeats and omissions are allowed."""
    cache.reorder_cache(rows)  # type: ignore[arg-type]  # annotated LongTensor, which no tensor function returns


def _with_room(states: torch.Tensor, columns: int) -> torch.Tensor:
    """A copy of (rows, heads, length, dim) with space for `columns` columns, half as many again, and 32."""
    rows, heads, length, dim = states.shape
    room = states.new_empty(rows, heads, columns + columns // 2 + 32, dim)
    room[:, :, :length] = states
    return room
