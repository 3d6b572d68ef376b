"""Cutting a model into units: what goes to the device, and leaves it, in one piece.

Invariant: each extent of the table is in exactly one unit. What several groups of modules use, a
tied embedding say, is a unit of its own that each of them needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from torch import nn

from tenure._torch.compiler import is_compiled

from ._tensors import TensorTable, Unit

# Their forward reads the weights of their children, all at once.
_INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
# Their children are called one after the other, so that a unit of neighbours is used in one go.
_IN_ORDER = (nn.Sequential, nn.ModuleList)

Fits = Callable[[nn.Module], bool]
"""Whether a module is small enough to be a unit."""


@dataclass(frozen=True, slots=True)
class UnitSize:
    """How large a module may be to become a unit.

    Attributes:
        n_bytes: at most so many bytes, and small neighbours share a unit up to them.
        n_parameters: where the bytes are None: fewer parameters than these.
    """

    n_bytes: int | None = None
    n_parameters: int = 0

    def fits(self, table: TensorTable) -> Fits:
        """Return the rule, for the modules of a table."""
        most_bytes = self.n_bytes
        if most_bytes is None:
            return lambda module: sum(p.numel() for p in module.parameters()) < self.n_parameters
        return lambda module: n_bytes_in(table, module.modules()) <= most_bytes


@dataclass(eq=False, slots=True)
class Cut:
    """A model in units.

    Attributes:
        units: all of them, in the order in which the modules are registered.
        needs: for each module that leads units, those that its forward needs.
    """

    units: list[Unit]
    needs: dict[nn.Module, list[Unit]]


@dataclass(slots=True)
class _Group:
    """Modules whose tensors make a unit; the leaders are those whose forward brackets its use."""

    name: str
    modules: list[nn.Module]
    leaders: list[nn.Module]
    n_bytes: int


def cut(
    model: nn.Module,
    table: TensorTable,
    fits: Fits,
    *,
    merge_bytes: int = 0,
    apart: Collection[nn.Module] = (),
) -> Cut:
    """Cut a model from the top down: a module that fits is a unit, any other is cut further.

    Args:
        model: the model of the table.
        table: its tensors.
        fits: whether a module is small enough. A module without children is never cut.
        merge_bytes: neighbours in a Sequential or a ModuleList share a unit up to this size.
        apart: modules that share no unit with what is around them, and are never cut.
    """
    groups = _Cutter(table, fits, merge_bytes, apart).groups(model, "")
    extents = [table.extents_of(group.modules) for group in groups]
    uses = Counter(id(extent) for extent in chain.from_iterable(extents))
    # Used by a group that no forward brackets, a tensor may be read at any time.
    unled = (used for group, used in zip(groups, extents, strict=True) if not group.leaders)
    loose = {id(extent) for extent in chain.from_iterable(unled)}
    shared: dict[int, Unit] = {}
    units: list[Unit] = []
    needs: dict[nn.Module, list[Unit]] = {}
    for group, used in zip(groups, extents, strict=True):
        own = [extent for extent in used if uses[id(extent)] == 1]
        # What only this group uses. The rest, a tied embedding above all, would be copied for each
        # group that it is in if it were part of all of their units.
        needed = [Unit(group.name, own, not group.leaders)] if own else []
        for extent in used:
            if uses[id(extent)] > 1:
                if id(extent) not in shared:
                    name = extent.tensors[0].name
                    shared[id(extent)] = Unit(name, [extent], id(extent) in loose)
                needed.append(shared[id(extent)])
        units += [unit for unit in needed if unit not in units]
        for leader in group.leaders:
            needs.setdefault(leader, []).extend(needed)
    return Cut(units, needs)


def sizes_with_own(model: nn.Module, table: TensorTable) -> set[int]:
    """Return the sizes of modules that have tensors of their own beside their submodules.

    A layer of experts that holds their weights itself, beside a router, is one.
    """
    return {
        n_bytes_in(table, module.modules())
        for module in model.modules()
        if module is not model
        and not all(_is_whole(child, table) for child in (module, *module.children()))
    }


def _is_whole(module: nn.Module, table: TensorTable) -> bool:
    """Return whether a module's own tensors are used in its forward alone, or it has none."""
    is_called = type(module).forward is not nn.Module.forward
    return not table.direct[module] or (is_called and not any(module.children()))


def n_bytes_in(table: TensorTable, modules: Iterable[nn.Module]) -> int:
    """Return the bytes of the extents that modules use."""
    return sum(extent.n_bytes for extent in table.extents_of(modules))


@dataclass(slots=True)
class _Cutter:
    table: TensorTable
    fits: Fits
    merge_bytes: int
    apart: Collection[nn.Module]
    _done: set[nn.Module] = field(default_factory=set)

    def groups(self, module: nn.Module, name: str) -> list[_Group]:
        inside = [each for each in module.modules() if each not in self._done]
        # Activations and dropout have nothing to page, and a module under a second name has been
        # cut.
        if not n_bytes_in(self.table, inside):
            self._done.update(inside)
            return []
        if self._is_unit(module, inside):
            self._done.update(inside)
            leaders = list(_leaders(module))
            return [_Group(name or "model", inside, leaders, n_bytes_in(self.table, inside))]
        return [*self._own(module, name), *self._children(module, name)]

    def _is_unit(self, module: nn.Module, inside: list[nn.Module]) -> bool:
        if module in self.apart:
            return True
        if any(each in self.apart for each in inside):
            return False
        # What is compiled gets all that it needs before it runs.
        if isinstance(module, _INDIVISIBLE) or is_compiled(module) or self.fits(module):
            return True
        # Cut further, it would only lose its forward as a bracket.
        return not any(self.table.direct[each] for each in inside if each is not module)

    def _own(self, module: nn.Module, name: str) -> list[_Group]:
        # A class token or a table of positions beside the blocks, as of a vision transformer: its
        # forward lasts as long as the model's, and brackets nothing.
        self._done.add(module)
        n_bytes = n_bytes_in(self.table, [module])
        return [_Group(name or "model", [module], [], n_bytes)] if n_bytes else []

    def _children(self, module: nn.Module, name: str) -> list[_Group]:
        parts = [
            self.groups(child, f"{name}.{key}" if name else key)
            for key, child in module.named_children()
            if child not in self._done
        ]
        return list(self._merged(parts) if isinstance(module, _IN_ORDER) else chain(*parts))

    def _merged(self, parts: list[list[_Group]]) -> Iterator[_Group]:
        """Join neighbours that are one small group each, to units of even size."""
        total_bytes = sum(part[0].n_bytes for part in parts if len(part) == 1)
        # Even units need the smallest ring: six blocks, where four fit, are 3 and 3, not 4 and 2.
        n_units = -(-total_bytes // self.merge_bytes) if self.merge_bytes else 0
        most_bytes = -(-total_bytes // n_units) if n_units else 0
        last: _Group | None = None
        for part in parts:
            for group in part:
                if last is not None and len(part) == 1 and self._may_join(last, group, most_bytes):
                    last = _joined(last, group)
                    continue
                if last is not None:
                    yield last
                last = group
        if last is not None:
            yield last

    def _may_join(self, first: _Group, second: _Group, most_bytes: int) -> bool:
        # A unit is loose or not as a whole; what is loose must stay.
        if not first.leaders or not second.leaders:
            return False
        if any(module in self.apart for module in first.modules + second.modules):
            return False
        return first.n_bytes + second.n_bytes <= most_bytes


def _joined(first: _Group, second: _Group) -> _Group:
    return _Group(
        f"{first.name.partition(' to ')[0]} to {second.name}",
        first.modules + second.modules,
        first.leaders + second.leaders,
        first.n_bytes + second.n_bytes,
    )


def _leaders(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module, or, where it is never called itself, its children."""
    # The blocks of a model of transformers or diffusers stand in a ModuleList: hooks on that would
    # never be called.
    if type(module).forward is not nn.Module.forward:
        yield module
    else:
        for child in module.children():
            yield from _leaders(child)
