"""What happens to the tensors that are still alive when their scope has been unlinked.

Nothing here can fail for one tensor and so stop the rest, and nothing masks the block's exception.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import Tensor

from tenure._errors import ScopeLeakError
from tenure._torch.compiler import belongs_to_graph
from tenure._torch.quiet import without_functions

from ._deferred import inside_operation
from ._disposal import Disposal, dispose_plain, dispose_tensor, swap_is_trusted
from ._disposed import Cause
from ._leaks import build_leak_report
from ._ledger import Reference, owns, site_of
from ._owners import held_by_owners

if TYPE_CHECKING:
    from ._block import Block
    from ._thread import ThreadScopes

Survivors = list[tuple[Tensor, Reference]]
_logger = logging.getLogger("tenure.scopes")


def settle(scope: Block, survivors: Survivors, exc: BaseException | None) -> None:
    """Do with the survivors of a closed scope what its policy says.

    Raises:
        ScopeLeakError: the policy is ``"raise"``, tensors leaked, and the block did not fail.
    """
    survivors = disposable(scope, survivors)
    failed = exc is not None and not isinstance(exc, GeneratorExit)
    if failed and scope.on_error == "keep":
        _keep(scope, survivors)
    elif scope.policy == "dispose":
        if survivors:  # often all that a ledger lists has died by itself
            dispose_all(scope, survivors, Cause(scope.label, scope.site))
    else:
        _report(scope, survivors, masked=exc is not None)


def disposable(scope: Block, survivors: Survivors) -> Survivors:
    """Those of ``survivors`` that are no state of a module, an optimizer or a CUDA graph.

    The others go free. What a caller has attached by name is the scope's, whoever holds it; only
    from a graph, which hands the same handle out again, nothing can be taken.
    """
    if not survivors:
        return survivors
    threads = scope._threads
    held = held_by_owners(tensor for tensor, _ in survivors)
    of_graphs = {id(tensor) for tensor, _ in survivors if belongs_to_graph(tensor)}
    if not held and not of_graphs:
        return survivors
    mine: Survivors = []
    for tensor, reference in survivors:
        is_held = id(tensor) in held and not owns(threads.chosen, tensor)
        if is_held or id(tensor) in of_graphs:
            threads.hand_out(reference)
        else:
            mine.append((tensor, reference))
    return mine


def dispose_all(scope: Block, owned: Survivors, cause: Cause) -> None:
    """Dispose tensors that have been taken from the ledger of ``scope``; ``owned`` ends empty.

    None of them may be a CUDA graph's.
    """
    threads = scope._threads
    if inside_operation(scope._opener):
        threads.disposed += len(owned)
        for _, reference in owned:
            threads.deferred.add(reference, cause)
        owned.clear()
        return
    # what dies with a twin may be a user's and run code, so it dies when all is done
    rest, twins = list[tuple[Tensor, Reference]](), list[Tensor]()
    interruptions = _dispose_plain_ones(owned, cause, threads, rest, twins)
    owned.clear()
    while rest:
        tensor, reference = rest.pop()
        try:
            _dispose(tensor, reference, cause, threads)
        except BaseException as error:  # as below
            interruptions.append(error)
    if interruptions:
        raise interruptions[-1]


def _dispose_plain_ones(
    owned: Survivors, cause: Cause, threads: ThreadScopes, rest: Survivors, twins: list[Tensor]
) -> list[BaseException]:
    """Dispose by far the most, those of no class of their own; ``rest`` gets the others."""
    interruptions: list[BaseException] = []
    if not swap_is_trusted():
        rest += owned
        return interruptions
    with without_functions():  # once, because it costs as much as a disposal
        for tensor, reference in owned:
            try:
                if type(tensor) is Tensor and dispose_plain(
                    tensor, cause, site_of(reference), twins
                ):
                    threads.disposed += 1
                else:
                    rest.append((tensor, reference))
            except BaseException as error:  # Ctrl-C, or a log handler that raises: the rest goes
                interruptions.append(error)
    return interruptions


def _dispose(tensor: Tensor, reference: Reference, cause: Cause, threads: ThreadScopes) -> None:
    disposal = dispose_tensor(tensor, cause, site_of(reference))
    if disposal in {Disposal.IMPOSSIBLE, Disposal.GRAPHS}:
        threads.hand_out(reference)
    elif disposal is not Disposal.ALREADY:
        threads.disposed += 1


def _keep(scope: Block, survivors: Survivors) -> None:
    for _, reference in survivors:
        scope._threads.hand_out(reference)


def _report(scope: Block, survivors: Survivors, *, masked: bool) -> None:
    _keep(scope, survivors)
    found = [(tensor, _site_text(reference)) for tensor, reference in survivors]
    ours = (survivors, *survivors)
    scope.leaks = report = build_leak_report(found, scope=scope.label, ignore=ours)
    if not report.records:
        return
    _logger.warning("%s", report)
    if scope.policy == "raise" and not masked:
        raise ScopeLeakError(str(report), report)


def _site_text(reference: Reference) -> str | None:
    site = site_of(reference)
    return None if site is None else str(site)
