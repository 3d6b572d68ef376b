"""Batches whose tensors hold one sample a row, taken apart, and their chunks.

Invariant: a tensor of samples is never passed on whole by accident; what can't be told is refused
by its path. What all samples share is passed on itself. What one attempt or pass has written into
the batch, no other one gets, unless it writes the same.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from tenure._containers import Level, is_record, level_of, tensors_in
from tenure._errors import AdaptiveUsageError
from tenure._text import describe_tensor, listed
from tenure._torch.compiler import is_compiled, mark_dynamic, marked_dynamic, never_compiled
from tenure._torch.modules import modules_told
from tenure._torch.quiet import without_functions
from tenure._torch.writes import versions_of
from tenure.scopes import owner_of, persist

from .._undo import differing
from ._gradients import leaves_of

SampleDims: TypeAlias = (
    int | Literal["items"] | Mapping[Any, Any] | list[Any] | tuple[Any, ...] | None
)
"""The place of the samples: a dimension; None for what all samples share; ``"items"`` for a list
with one item a sample; or a container of these, shaped like the outer levels of the tree."""

_Dim = int | None | Literal["items"]
_Build = Callable[[Iterator[Any]], Any]
# What is passed on as it is; a str is no list of its letters.
_SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def cut_off(value: Any) -> Any:
    """Return a tensor that requires grad as its own leaf; anything else as it is."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    return value.detach().requires_grad_()


class Leaf(NamedTuple):
    """A value at one place of a tree.

    Attributes:
        path: the place, as an expression.
        value: a tensor of any shape, dtype and device, or a value that is not taken apart.
        dim: where its samples are; None if all samples share it.
    """

    path: str
    value: Any
    dim: _Dim

    @property
    def is_shared(self) -> bool:
        """True for a tensor that all samples share."""
        return self.dim is None and isinstance(self.value, Tensor) and self.value.dim() > 0

    @property
    def n_samples(self) -> int:
        """The number of its samples; only if it is split."""
        if self.dim == "items":
            return len(self.value)
        return int(self.value.shape[self.dim])

    def part(self, start: int, length: int) -> Any:
        """Return the samples from ``start``, a view of a tensor; all of a shared leaf."""
        if self.dim is None:
            return self.value
        if self.dim == "items":
            return self.value[start : start + length]
        if type(self.value) is Tensor:
            # a view has no memory that a scope would have to own
            with without_functions():
                return self.value.narrow(self.dim, start, length)
        if isinstance(self.value, Tensor):
            return self.value.narrow(self.dim, start, length)
        # an array of NumPy, whose slices are views as well
        before = (slice(None),) * (self.dim % self.value.ndim)
        return self.value[(*before, slice(start, start + length))]


class SampleTree:
    """A container, taken apart once.

    Args:
        tree: a tensor, or a container of tensors and plain values.
        dims: where the samples are.
        name: what errors call the tree.
        argument: what errors call the argument that ``dims`` comes from.
        is_deep: whether containers that all samples share are taken apart, too.

    Attributes:
        leaves: what it holds, in order.

    Raises:
        AdaptiveUsageError: something in it can't be split, or ``dims`` does not fit.
    """

    def __init__(
        self,
        tree: Any,
        dims: SampleDims,
        *,
        name: str,
        argument: str,
        is_deep: bool = False,
    ) -> None:
        self.leaves: list[Leaf] = []
        self._is_deep = is_deep
        # the containers that stand around the place: one may hold itself
        self._around: set[int] = set()
        self._name = name
        self._argument = argument
        # lists of plain values, which may be labels or settings: judged when the number of samples
        # is known
        self._plain: list[tuple[str, int]] = []
        # other lists, which may have one item a sample: how many, and whether all are tensors
        self._lists: dict[str, tuple[int, bool]] = {}
        # lists of tensors of one shape, which may be one sample each
        self._alike: list[tuple[str, int]] = []
        self._build = self._take_apart(tree, dims, name)

    @property
    def structure(self) -> list[str]:
        """The paths of its leaves."""
        return [leaf.path for leaf in self.leaves]

    def with_leaves(self, values: list[Any]) -> Any:
        """Return a container like this one, of other leaves."""
        return self._build(iter(values))

    def like(self, values: list[Any]) -> SampleTree:
        """Return the same, of other leaves."""
        other = copy.copy(self)
        pairs = zip(self.leaves, values, strict=True)
        other.leaves = [leaf._replace(value=value) for leaf, value in pairs]
        return other

    def n_samples(self) -> int:
        """Return how many samples it has.

        Raises:
            AdaptiveUsageError: its leaves don't agree, or none of them is split.
        """
        first: Leaf | None = None
        n_samples = 0
        for leaf in self.leaves:
            if leaf.dim is None:
                continue
            # the first leaf says how many; a batch's own len() may be the number of its keys
            if first is None:
                first, n_samples = leaf, leaf.n_samples
            elif leaf.n_samples != n_samples:
                raise AdaptiveUsageError(
                    f"{_counted(first)}, and {_counted(leaf)}. {self._advice(first, leaf)}"
                )
        if first is None:
            raise AdaptiveUsageError(
                f"{self._name} holds no tensor with samples, so there is nothing to split. "
                "Pass the tensors of the batch in it, not through a closure."
            )
        for path, length in self._plain:
            # 8 names beside 8 samples belong to them, or are 8 classes; guessing wrong is silent
            if length == n_samples > 1:
                raise AdaptiveUsageError(
                    f"{path} is a list of {length} plain values, as many as there are samples: it "
                    f"may belong to them or not. Say which with {self._argument}: "
                    '"items" at its place splits it, None lets all samples share it.'
                )
        return n_samples

    def refuse_ambiguous(self) -> None:
        """Make sure that tensors of a list are not taken for batches where each may be a sample.

        Raises:
            AdaptiveUsageError: there are more of them than each has rows, and nothing beside them.
        """
        split = [leaf for leaf in self.leaves if leaf.dim is not None]
        for path, length in self._alike:
            rows = split[0].n_samples
            if length > max(rows, 3) and all(leaf.path.startswith(f"{path}[") for leaf in split):
                raise AdaptiveUsageError(
                    f"{path} is a list of {length} tensors, and each has {rows} rows: they may be "
                    f"{length} samples, or hold {rows} samples each. Say which with "
                    f'{self._argument}: "items" at its place splits the list, [0] * {length} '
                    "splits each tensor."
                )

    # --- taking apart

    def _take_apart(self, value: Any, dims: Any, path: str) -> _Build:
        # an instance may have any attribute
        if isinstance(value, Tensor) or hasattr(type(value), "__array_interface__"):
            self.leaves.append(Leaf(path, value, self._dim_in_range(value, dims, path)))
            return next
        if dims == "items":
            if not isinstance(value, list | tuple):
                raise AdaptiveUsageError(
                    f'{self._argument} has "items" for {path}, which is a {type(value).__name__}. '
                    "Only a list or a tuple has items."
                )
            if isinstance(value, tuple):
                self._refuse_columns(value, path)
            self.leaves.append(Leaf(path, value, "items"))
            return next
        container = None if isinstance(value, _SIMPLE) else level_of(value)
        # what all samples share is passed on itself in a batch: a tokenizer or a config may not
        # survive a copy
        is_deep = self._is_deep and container is not None and id(value) not in self._around
        if isinstance(value, _SIMPLE) or (dims is None and not is_deep):
            self.leaves.append(Leaf(path, value, None))
            return next
        if container is None:
            raise AdaptiveUsageError(
                f"{path} is a {type(value).__name__}, which can't be taken apart. Register it with "
                f"torch.utils._pytree, pass the tensors in it, or say with {self._argument}=None "
                "at its place that all samples share it."
            )
        if dims is not None:
            if isinstance(value, list | tuple) and value:
                if all(isinstance(each, _SIMPLE) for each in value):
                    self._plain.append((path, len(value)))
                elif isinstance(dims, int):
                    are_tensors = all(isinstance(each, Tensor) for each in value)
                    self._lists[path] = len(value), are_tensors
                    if are_tensors and len({(each.shape, each.dtype) for each in value}) == 1:
                        self._alike.append((path, len(value)))
            self._refuse_hidden(value, container, path)
        self._around.add(id(value))
        below = self._dims_below(container.keys, dims, path)
        is_named = dataclasses.is_dataclass(value) and not isinstance(value, Mapping)
        builds = [
            self._take_apart(child, below[key], f"{path}.{key}" if is_named else f"{path}[{key!r}]")
            for key, child in zip(container.keys, container.children, strict=True)
        ]
        self._around.discard(id(value))
        return lambda values: container.make([build(values) for build in builds])

    def _refuse_hidden(self, value: Any, container: Level, path: str) -> None:
        """Make sure that no tensor would stay whole beside those that are split."""
        if not isinstance(value, dict) and not is_record(value):
            return
        space = getattr(value, "__dict__", {})
        names = [] if space is value else [name for name in space if name not in container.keys]
        hidden = [name for name in names if isinstance(space[name], Tensor)]
        if hidden:
            raise AdaptiveUsageError(
                f"{path} is a {type(value).__name__} that keeps {_listed(hidden)} as an attribute, "
                "beside its items, where nothing splits it. Pass it as an item, or the tensors in "
                "a plain dict."
            )

    def _dims_below(self, keys: list[Any], dims: Any, path: str) -> dict[Any, Any]:
        if dims is None or isinstance(dims, int):
            return dict.fromkeys(keys, dims)
        if isinstance(dims, Mapping):
            unknown = [key for key in dims if key not in keys]
            if not unknown:
                return {key: dims.get(key, 0) for key in keys}
        elif isinstance(dims, list | tuple) and len(dims) == len(keys):
            return dict(zip(keys, dims, strict=True))
        raise AdaptiveUsageError(
            f"{self._argument} has {dims!r} for {path}, which has {_listed(keys)}. Give a "
            'dimension, None, "items", or a container of these of the same shape.'
        )

    def _dim_in_range(self, value: Any, dims: Any, path: str) -> _Dim:
        """Return where a tensor, or an array of NumPy, has its samples."""
        n_dims = value.ndim
        dim = None if n_dims == 0 else dims
        if dim is None:
            return None
        is_tensor = isinstance(value, Tensor)
        if not isinstance(dim, int) or isinstance(dim, bool) or not -n_dims <= dim < n_dims:
            array = f"an array of {value.dtype}{list(value.shape)}"
            kind = describe_tensor(value) if is_tensor else array
            raise AdaptiveUsageError(
                f"{self._argument} has {dims!r} for {path}, which is {kind}. "
                "Give one of its dimensions, or None if all samples share it."
            )
        # rows of sparse tensors are no views, and nested ones have no dimension to narrow
        if is_tensor and (value.layout is not torch.strided or value.is_nested):
            raise AdaptiveUsageError(
                f"{path} is {describe_tensor(value)} of layout {value.layout}, which can't be "
                f"split. Pass a dense tensor, or say with {self._argument}=None at its place "
                "that all samples share it."
            )
        return dim

    def _refuse_columns(self, value: tuple[Any, ...], path: str) -> None:
        """Refuse "items" for a tuple of lists, which are hardly its samples."""
        lengths = {len(each) if isinstance(each, list | tuple) else 0 for each in value}
        if len(lengths) == 1 and min(lengths) > len(value) > 1:
            raise AdaptiveUsageError(
                f'{self._argument} has "items" for {path}, which is a tuple of {len(value)} '
                f"lists, and each has {min(lengths)} items. To split these, give "
                f'("items",) * {len(value)}. If each of them is a sample, pass list({path}).'
            )

    def _advice(self, first: Leaf, leaf: Leaf) -> str:
        before, around = (
            [path for path in self._lists if each.path.startswith(f"{path}[")]
            for each in (first, leaf)
        )
        # two lists beside each other, as of images and of their boxes; else the list around it
        alike = [
            f"{a} and {b}"
            for a in before
            for b in around
            if a not in around and self._lists[a][0] == self._lists[b][0] and b not in before
        ]
        alone = [path for path in around[-1:] if self._lists[path][1]]
        items = ""
        if alike or alone:
            has = "have one item a sample each" if alike else "has one item a sample"
            items = f' If {(alike or alone)[0]} {has}, give "items" at its place.'
        return (
            f"Say with {self._argument} which dimension of {leaf.path} has the samples, or None if "
            f"all samples share it.{items}"
        )


def _counted(leaf: Leaf) -> str:
    along = "" if leaf.dim == "items" else f" along dimension {leaf.dim}"
    return f"{leaf.path} has {leaf.n_samples} samples{along}"


def _listed(keys: list[Any]) -> str:
    return ", ".join(map(repr, keys[:8])) + (", ..." if len(keys) > 8 else "") or "nothing"


class CutInputs:
    """The chunks of a batch.

    Args:
        tree: the batch.
        whole: the batch as the user passed it.

    Attributes:
        leaves: the leaves that its tensors are, or are computed from.
        frozen: its tensors that require no grad, and might.
        trained: its tensors that require grad, and their paths.
        computed: the paths of tensors that are computed from others with gradients.
        n_samples: the samples of the batch.
        expects_writes: whether it may be written, because it is a copy for one run.
        length: the samples that the function was given last.
    """

    def __init__(self, tree: SampleTree, whole: Any) -> None:
        self._tree = tree
        self._whole = whole
        self._tensors: list[Tensor] = []
        self.frozen: list[Tensor] = []
        self.computed: list[str] = []
        self.trained: list[tuple[str, Tensor]] = []
        with without_functions():
            for path, value, _ in tree.leaves:
                if isinstance(value, Tensor):
                    self._tensors.append(value)
                    if value.grad_fn is not None:
                        self.computed.append(path)
                    if value.requires_grad:
                        self.trained.append((path, value))
                    elif value.is_floating_point():
                        self.frozen.append(value)
            # they count writes, so that nothing has to be copied to notice one
            self._versions = versions_of(self._tensors)
            # one that the function itself lets require grad has a gradient of no interest
            self.leaves = leaves_of([value for _, value in self.trained]) if self.trained else []
        self.expects_writes = False
        # what was written, and its values after that
        self._rewritten: list[tuple[Tensor, Tensor]] = []
        self.n_samples = self.length = tree.n_samples()

    def written(self) -> Tensor | None:
        """Return a tensor that was written; None while the batch is what it was."""
        with without_functions():
            versions = versions_of(self._tensors)
        for tensor, before, now in zip(self._tensors, self._versions, versions, strict=True):
            if before != now:
                return tensor
        return None

    def begin(self) -> None:
        """Note what the function has written since it was given the batch the last time.

        Raises:
            AdaptiveUsageError: as of `check_rewritten`.
        """
        if self.expects_writes or self.written() is None:
            return
        self.check_rewritten()
        with persist(), without_functions(), torch.no_grad():
            versions = versions_of(self._tensors)
            for tensor, before, now in zip(self._tensors, self._versions, versions, strict=True):
                if before != now and all(each is not tensor for each, _ in self._rewritten):
                    self._rewritten.append((tensor, tensor.clone()))
            self._versions = versions

    def check_rewritten(self) -> None:
        """Make sure that what was written once is the same after it was written again.

        Raises:
            AdaptiveUsageError: it is not, so that the gradients are those of another batch.
        """
        if not self._rewritten:
            return
        with without_functions(), torch.no_grad():
            found = differing(self._rewritten)
        for (tensor, _), differs in zip(self._rewritten, found, strict=True):
            if differs:
                raise AdaptiveUsageError(
                    "step() has run its function again, which has written into "
                    f"{describe_tensor(tensor)} of the batch twice, and that is not the same as "
                    "once, as with x.div_(255). Gradients are as before, and the batch is not. "
                    "Write into a copy, as in x = x / 255."
                )

    def check_splittable(self) -> None:
        """Make sure that it is clear what a sample is, and that no graph would run twice.

        Raises:
            AdaptiveUsageError: it is not, or a tensor was computed with gradients.
        """
        self._tree.refuse_ambiguous()
        if self.computed:
            raise AdaptiveUsageError(
                f"step() has to split the batch, and got {listed(self.computed, most=3)}, computed "
                "from tensors that require grad: each micro-batch would run that graph backward "
                "again. Nothing was changed. Compute it in the function of step(), or detach() it."
            )

    def whole(self) -> Any:
        """Return the batch itself."""
        self.length = self.n_samples
        return self._whole

    def expecting_other_sizes(self) -> AbstractContextManager[None]:
        """Return a block in which compiled code gets the batch as one of several sizes."""
        return marked_dynamic(
            (leaf.value, leaf.dim)
            for leaf in self._tree.leaves
            if isinstance(leaf.value, Tensor) and isinstance(leaf.dim, int)
        )

    def chunk(self, start: int, length: int) -> Any:
        """Return a container like the batch, of views of some of its samples."""
        self.length = length
        pieces = []
        for leaf in self._tree.leaves:
            piece = leaf.part(start, length)
            # else compiled code would be compiled again for each size that is tried
            if isinstance(piece, Tensor) and isinstance(leaf.dim, int):
                mark_dynamic(piece, leaf.dim)
            pieces.append(piece)
        return self._tree.with_leaves(pieces)


def expecting_other_sizes_of(
    compiled: Collection[object], length: Callable[[], int]
) -> AbstractContextManager[None]:
    """Open a block in which inputs of compiled code are marked as changing in size.

    Args:
        compiled: the compiled modules and functions that are known.
        length: how many samples the function runs on now.
    """
    has_functions = any(not isinstance(each, nn.Module) for each in compiled)

    @never_compiled
    def given(module: nn.Module, values: Any) -> None:
        if is_compiled(module):
            _mark(values, length())

    @never_compiled
    def returned(module: nn.Module, values: Any) -> None:
        _mark(values, length())

    return modules_told(given, returned if has_functions else None)


def _mark(values: Any, length: int) -> None:
    # of one sample nothing says which dimension it is, and it is compiled by itself
    if length < 2:
        return
    for tensor in tensors_in([values]):
        # one dimension: two that are marked and of one size are taken to be the same
        dim = next((i for i, size in enumerate(tensor.shape) if size == length), None)
        # what was there before the step would keep the mark
        if dim is not None and (tensor.grad_fn is not None or owner_of(tensor) is not None):
            mark_dynamic(tensor, dim)
