"""Tensors that report the device `cuda` and keep their values on the CPU.

Every operation on them is checked as CUDA would check it (all tensors on one device, single numbers excepted), computed
on the CPU, and recorded where it launches a kernel and where the host would wait for the device. Values are real, and
therefore also shapes that depend on values, as those of a mixture of experts. Other ranks are assumed to send what this
rank sends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import megatron
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import attention
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
FOLDERS = [Path(__file__).parents[2] / "verl_mg", *map(Path, megatron.__path__)]
"""Packages in which an operation is placed by file and function."""
aten, c10d = torch.ops.aten, torch.ops.c10d
WAITING = {
    *(aten.nonzero, aten.masked_select, aten.bincount, aten._unique2, aten.unique_consecutive, aten.unique_dim),
    *(aten.equal, aten._local_scalar_dense),
}
"""Operations whose result, or its size, the host needs before it continues."""
COPIES = {aten._to_copy, aten.copy_}
WITHOUT_KERNEL = {
    *(aten._unsafe_view, aten._local_scalar_dense, aten.record_stream, aten.set_, aten.resize_),
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided),
}
"""Operations that move no data on the device, besides views."""
UNFUSED = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "sort", "topk", "_embedding_bag", "scatter", "scatter_")
"""Operations that torch.compile does not join with others."""
ENDS = ("cu_seq_q", "cu_seq_k")
"""Arguments of torch's variable-length attention: the ends of sequences of queries and of keys."""


class CudaTensor(Tensor):
    """Tensor on `cuda` with the values of a CPU tensor."""

    values: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor) -> CudaTensor:
        place = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, values.size(), dtype=values.dtype, device=CUDA, **place)

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __repr__(self) -> str:
        return f"CudaTensor({self.values!r})"

    @property
    def data(self) -> Tensor:
        """This tensor without its graph. Assignment replaces the values."""
        return self.detach()

    @data.setter
    def data(self, new: CudaTensor) -> None:
        Tensor.data.__set__(self, new)
        self.values = new.values

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a cuda tensor outside the mode")


class FakeCuda(TorchDispatchMode):
    """Mode in which tensors can be created on `cuda` and moved there.

    Attributes:
        waits: (operation, `file:function` of the nearest frame of the project or of megatron-core) of each operation
            for which the host waits, in the order of time.
        kernels: (operation, `file:function`) of each operation that launches a kernel, in the order of time. Every
            operation of torch counts as one, also a sort, which has several; copies from and to the host count as
            none. In a compiled function an uninterrupted run of operations that torch joins counts as one, which has
            the function's name.
        traffic: (operation, bytes of its arguments and results) of each operation that launches a kernel, also in
            compiled functions.
        receive: fills a tensor, on the CPU, that another rank sends to this one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[str, str]] = []
        self.kernels: list[tuple[str, str]] = []
        self.traffic: list[tuple[str, int]] = []
        self._compiled: list[str] = []
        self._whole = self._joined = False
        self._pinned: dict[int, Tensor] = {}  # by address, which is not used again while the tensor exists
        self.receive: Callable[[Tensor], object] = lambda tensor: tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it computes on local tensors, in this mode too
        if func in (aten.is_pinned.default, aten._pin_memory.default):
            return self._is_pinned(args[0]) if func is aten.is_pinned.default else self._pin(args[0].clone())
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        devices = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        has_cuda = any(isinstance(tensor, CudaTensor) for tensor in tensors)
        if func.overloadpacket in COPIES and self._copy_waits(func, args, kwargs):
            self.waits.append((_name(func), _place()))
        elif has_cuda and func.overloadpacket not in COPIES and func.namespace != "c10d":
            _check_devices(func, tensors)
            if _waits(func, args):
                self.waits.append((_name(func), _place()))
        result = self._on_cpu(func, tree_map(_values, args), tree_map(_values, kwargs))
        to_cuda = devices[0].type == "cuda" if devices else has_cuda
        if to_cuda and all(isinstance(tensor, CudaTensor) or not tensor.dim() for tensor in tensors):
            self._count(func)
            if not _moves_nothing(func):
                moved = [x.nbytes for x in (*tensors, *tree_leaves(result)) if isinstance(x, Tensor)]
                self.traffic.append((_name(func), sum(moved)))
        wrapped = {id(tensor.values): tensor for tensor in tensors if isinstance(tensor, CudaTensor)}
        return tree_map(lambda x: _wrapped(x, wrapped, to_cuda), result)

    @contextmanager
    def compiled(self, name: str, whole: bool) -> Iterator[None]:
        """Context manager: operations are those of a compiled function; `whole`: it is one kernel whatever it does."""
        self._compiled.append(name)
        self._whole, self._joined = whole, False
        yield
        self._compiled.pop()

    def _count(self, func: Any) -> None:
        if _moves_nothing(func):
            return
        joins = bool(self._compiled) and (self._whole or _name(func) not in UNFUSED)
        if not (joins and self._joined):
            self.kernels.append((self._compiled[0] if joins else _name(func), _place()))
        self._joined = joins

    def _on_cpu(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func.namespace == "torch_attn":
            return _attention(func, args, kwargs)
        if _name(func) == "_fused_rms_norm_backward":
            return _rms_norm_gradients(*args, **kwargs)
        if func in (aten.mm.dtype, aten.mm.dtype_out, aten.addmm.dtype_out):
            return _mixed_product(*args, **kwargs)
        if func is aten.histc.default and not args[0].is_floating_point():  # the CPU counts floats alone
            return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
        if func.namespace == "c10d":
            return _exchange(func, args, self.receive)
        pinned = kwargs.get("pin_memory")
        result = func(*args, **(kwargs | {"pin_memory": False} if pinned else kwargs))
        return self._pin(result) if pinned else result

    def _pin(self, tensor: Tensor) -> Tensor:
        assert tensor.is_cpu, "only host memory can be pinned"
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_cpu and tensor.untyped_storage().data_ptr() in self._pinned

    def _copy_waits(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Returns whether a copy has one end on the host, and blocks it."""
        if func.overloadpacket is aten.copy_:
            target, source = args[:2]
            non_blocking = len(args) > 2 and args[2]
            ends, host = {target.device.type, source.device.type}, target if source.is_cuda else source
        else:
            ends = {args[0].device.type, (kwargs.get("device") or args[0].device).type}
            non_blocking, host = kwargs.get("non_blocking", False), args[0]
            if not host.is_cpu:  # to a new tensor in memory that is not pinned
                return len(ends) > 1
        return len(ends) > 1 and not (non_blocking and self._is_pinned(host))


def compiled(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    """Stands for torch.compile: runs the function as it is and counts its kernels as those of a compiled one."""

    flexible = function.__module__ == "verl_mg.training.flex_attention"
    replaced = {"flex_attention": _flex_attention} if flexible else {}

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, FakeCuda)]
        if not modes:
            return function(*arguments, **options)
        with modes[0].compiled(function.__name__, flexible), mock.patch.dict(function.__globals__, replaced):
            return function(*arguments, **options)

    return run


def _moves_nothing(func: Any) -> bool:
    """Returns whether an operation allocates memory or returns views of its arguments, and launches no kernel."""
    if func.overloadpacket in WITHOUT_KERNEL:
        return True
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _mixed_product(*arguments: Any, out: Tensor | None = None) -> Tensor:
    """Product of half-precision matrices in float32, and the same added to a matrix, which the CPU does not have."""
    *added, left, right, dtype = arguments
    assert left.dtype is right.dtype is torch.bfloat16 and dtype is torch.float32
    assert all(matrix.dtype is dtype for matrix in added)
    product = left.to(dtype) @ right.to(dtype)
    if out is None:
        return product
    return torch.add(*added, product, out=out) if added else out.copy_(product)


def _name(func: Any) -> str:
    return func.overloadpacket.__name__


def _place() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        for folder in FOLDERS:  # not any folder of such a name: a checkout may be called verl_mg too
            if file.startswith(f"{folder}/"):
                return f"{folder.name}{file.removeprefix(str(folder))}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def _values(x: Any) -> Any:
    if isinstance(x, CudaTensor):
        return x.values
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == "cuda" else x


def _wrapped(x: Any, known: dict[int, CudaTensor], to_cuda: bool) -> Any:
    if not isinstance(x, Tensor):
        return x
    if id(x) in known:  # changed in place
        return known[id(x)]
    return CudaTensor(x) if to_cuda else x


def _check_devices(func: Any, tensors: Iterable[Tensor]) -> None:
    """Raises where tensors of CPU and CUDA meet; CUDA takes numbers and index tensors from the CPU."""
    on_cpu = [tensor for tensor in tensors if not isinstance(tensor, CudaTensor) and tensor.dim()]
    if on_cpu:
        shapes = [tuple(tensor.shape) for tensor in on_cpu]
        raise RuntimeError(f"{func}: tensors on cuda, and on the CPU those of shapes {shapes}")


def _waits(func: Any, args: Any) -> bool:
    if func.overloadpacket in (aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_):
        masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        # torch fills under a mask with a number, without an index.
        return masked and not (func.overloadpacket is not aten.index and args[2].is_cpu and args[2].numel() == 1)
    return func.overloadpacket in WAITING or (func is aten.repeat_interleave.Tensor)


def _exchange(func: Any, args: Any, receive: Callable[[Tensor], object]) -> Any:
    """Writes what the other ranks send, if all of them have what this rank has; returns what the collective returns."""
    name = _name(func)
    if name == "alltoall_base_":  # torch's fake group admits only sizes with which ranks exchange their own values
        unused = torch.zeros(torch.distributed.ProcessGroup.unbox(args[2]).size())
        result = func(unused, unused.clone(), args[2], [], [])
    else:
        result = func(*args)
    if name == "recv_":
        for tensor in args[0]:
            receive(tensor)
    elif name in ("_allgather_base_", "allgather_into_tensor_coalesced_"):
        pairs = zip(*args[:2], strict=True) if isinstance(args[0], list) else [args[:2]]
        for output, sent in pairs:
            output.view(-1, sent.numel()).copy_(sent.clone().view(1, -1))  # it may be a part of the output
    elif name == "allgather_":
        for output, sent in zip(*args[:2], strict=True):
            for part in output:
                part.copy_(sent)
    elif name in ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
        group = torch.distributed.ProcessGroup.unbox(args[2])
        pairs = zip(*args[:2], strict=True) if isinstance(args[0], list) else [args[:2]]
        for output, sent in pairs:
            output.copy_(sent.flatten().chunk(group.size())[group.rank()].view_as(output).clone())
    elif name == "reduce_scatter_":
        group = torch.distributed.ProcessGroup.unbox(args[2])
        for output, parts in zip(*args[:2], strict=True):
            output.copy_(parts[group.rank()].clone())
    elif name == "alltoall_base_":
        group = torch.distributed.ProcessGroup.unbox(args[2])
        parts = (
            x.split(list(sizes)) if sizes else x.chunk(group.size())
            for x, sizes in zip(args[:2], args[3:5], strict=True)
        )
        outputs, sent = parts
        for output in outputs:  # a rank that routes tokens elsewhere sends more or fewer
            output.zero_()[: len(sent[group.rank()])] = sent[group.rank()][: len(output)]
    elif name not in ("allreduce_", "allreduce_coalesced_", "broadcast_", "send", "barrier"):
        raise NotImplementedError(f"the fake group has no {name}")
    return result


def _rms_norm_gradients(
    gradient: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Computes what torch has for CUDA alone; rstd: the reciprocal of the root mean square."""
    axes, normalized = list(range(-len(shape), 0)), x * rstd
    of_normalized = gradient if weight is None else gradient * weight
    of_x = rstd * (of_normalized - normalized * (of_normalized * normalized).mean(axes, keepdim=True))
    of_weight = (gradient * normalized).flatten(0, -len(shape) - 1).sum(0) if mask[1] else None
    return of_x if mask[0] else None, of_weight


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes torch's FlexAttention by matrices, with what its kernel requires of a mask and of shapes."""
    assert all(x.dim() == 4 and x.stride(-1) == 1 for x in (query, key, value)), "the kernel reads rows of heads"
    repeat = query.shape[1] // key.shape[1]
    assert repeat == 1 or enable_gqa, "fewer heads of keys need enable_gqa"
    # On an H200 "No valid choices" under torch 2.11 and 2.14: the kernel for decoding has no size that fits our blocks.
    forced = (kernel_options or {}).get("FORCE_USE_FLEX_ATTENTION")
    assert forced or query.shape[2] >= 128, "the kernel for decoding does not compile"
    assert block_mask.seq_lengths == (query.shape[2], key.shape[2]), "the mask is one of other lengths"
    queries, keys = (torch.arange(length, device="cuda") for length in block_mask.seq_lengths)
    first = torch.zeros((), dtype=torch.int32, device="cuda")
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = (query.float() @ key.float().mT) * (scale or query.shape[3] ** -0.5)
    if score_mod:
        scores = score_mod(scores, first, first, queries[:, None], keys)
    visible = block_mask.mask_mod(first, first, queries[:, None], keys)
    scores = scores.masked_fill(~visible, -torch.inf)
    context = (scores.softmax(-1) @ value.float()).to(query.dtype)
    context = context.transpose(1, 2).contiguous().transpose(1, 2)  # in memory like the query
    return (context, scores.logsumexp(-1)) if return_lse else context


def _attention(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Computes torch's variable-length attention sequence by sequence, with what its kernel requires."""
    given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
    inputs = [given[name] for name in ("query", "key", "value")]
    assert all(x.dtype in (torch.float16, torch.bfloat16) for x in inputs), "the kernel computes in half precision"
    same = len({x.shape[2] for x in inputs}) == 1
    assert same or attention.current_flash_attention_impl(), (
        "FlashAttention-2 has one width for queries, keys and values"
    )
    assert all(given[name].dtype is torch.int32 for name in ENDS), "the kernel reads 32-bit lengths"
    repeat = inputs[0].shape[1] // inputs[1].shape[1]
    assert repeat == 1 or given.get("enable_gqa", True), "fewer heads of keys need enable_gqa"
    backward = _name(func) == "_varlen_attn_backward"
    query, key, value = inputs
    of_queries, of_keys = [query, given["grad_out"]] if backward else [query], [key, value]
    parts = []
    for (start, end), (first, last) in zip(*(pairwise(given[name].tolist()) for name in ENDS), strict=True):
        (q, *gradient), keys = [x[start:end] for x in of_queries], [x[first:last] for x in of_keys]
        parts.append(_attend([q, *keys, *gradient], given, repeat))
    results = tuple(torch.cat(part).to(inputs[0].dtype) for part in zip(*parts, strict=True))
    if backward:
        return results
    statistics = torch.zeros(inputs[0].shape[1], len(inputs[0])), torch.zeros(2, dtype=torch.uint64)
    return *results, *statistics


def _attend(columns: list[Tensor], options: dict[str, Any], repeat: int) -> tuple[Tensor, ...]:
    """Returns the context of one sequence, or the gradients of queries, keys and values; all (length, heads, width).

    Queries are those of the last tokens.
    """
    query, key, value, *gradient = (x.float().transpose(0, 1) for x in columns)
    key, value = key.repeat_interleave(repeat, 0), value.repeat_interleave(repeat, 0)
    left, right = options["window_size"]
    length, keys = query.shape[1], key.shape[1]
    distance = torch.arange(keys - length, keys)[:, None] - torch.arange(keys)
    visible = (distance >= -right) & ((distance <= left) if left >= 0 else True)
    scale = options["scale"] or query.shape[2] ** -0.5
    weights = (query @ key.mT * scale).masked_fill(~visible, -torch.inf).softmax(-1)
    if not gradient:
        return ((weights @ value).transpose(0, 1),)
    of_weights = gradient[0] @ value.mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
    of_key, of_value = (x.unflatten(0, (-1, repeat)).sum(1) for x in (of_scores.mT @ query, weights.mT @ gradient[0]))
    return tuple(x.transpose(0, 1) for x in (of_scores @ key, of_key, of_value))
