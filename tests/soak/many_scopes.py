"""So many scopes, of every end that a scope can have, and nothing that stays."""

import torch

from tenure import NewDisposeScope, dispose, is_disposed

from .growth import grown

SCOPES_A_ROUND = 10
_A = torch.ones(4)


def one_round(i):
    """Ten scopes: nested, with survivors, left by an error, closed early, reporting, empty."""
    held = []
    with NewDisposeScope("outer") as outer:
        held.append(_A + i)
        with NewDisposeScope("middle") as middle:
            held.append(_A * i)
            with NewDisposeScope("inner") as inner:
                held.append(inner.move_to(outer, _A - i))
            held.append(middle.move_to_outer(held[0] + held[2]))
        with NewDisposeScope("keeps one") as keeps:
            held += [_A + 1, _A + 2]
            keeps.dispose_everything_but(held[-1])
            assert not is_disposed(held[-1])
        try:
            with NewDisposeScope("fails"):
                held.append(_A + 3)
                raise KeyError(i)
        except KeyError:
            pass
        with NewDisposeScope("reports", policy="report") as reports:
            # of a survivor the whole heap would be asked who holds it
            torch.add(_A, 4)
        assert reports.leaks is not None
        assert len(reports.leaks) == 0
        with NewDisposeScope("closed early") as early:
            held.append(_A + 5)
            early.close()
        with NewDisposeScope("detaches") as detaches:
            kept = detaches.detach(_A + 6)
        with NewDisposeScope("empty"):
            pass
        with NewDisposeScope("in a loop"):
            loop = [_A + 7]
            loop.append(loop)
            held.append(loop[0])
        assert not is_disposed(kept)
        assert not is_disposed(held[3])
    assert all(map(is_disposed, held)), i
    dispose(kept)


def run(n_scopes, *, n_warm=1000):
    """Open and close so many, and say what the process grew by after the first ones."""
    n_rounds = n_scopes // SCOPES_A_ROUND
    return grown(one_round, n_rounds, min(n_warm, n_rounds // 4))
