"""A service in scopes: a function hands its result to the caller, who decides what lives."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from tenure import NewDisposeScope, is_disposed, owner_of, persist, scoped, statistics

_masks: dict[int, Tensor] = {}


def causal_mask(length: int) -> Tensor:
    """A cached mask; what must outlive the request that needs it first is made in persist()."""
    if length not in _masks:
        with persist():
            _masks[length] = torch.ones(length, length).tril()
    return _masks[length]


@scoped
@torch.no_grad()
def answer(model: nn.Module, request: Tensor) -> Tensor:
    """The answer moves to the scope of the caller; the temporaries go."""
    hidden = causal_mask(len(request)) @ request
    scores: Tensor = model(hidden)
    return scores.softmax(-1)


def answers(model: nn.Module, requests: Iterable[Tensor]) -> Iterator[Tensor]:
    """One answer after the other, each in the scope of whoever asks for the next."""
    for request in requests:
        yield answer(model, request)


def main() -> None:
    """Serve five requests and see that only the caller decides what lives."""
    model = nn.Linear(4, 2)
    requests = [torch.randn(3, 4) for _ in range(5)]
    seen: list[Tensor] = []
    before = statistics().live

    with NewDisposeScope("service") as service:
        for result in answers(model, requests):
            assert owner_of(result) is service
            seen.append(result)
        best = service.move_to_outer(torch.stack(seen).amax())

    assert all(map(is_disposed, seen))
    assert not is_disposed(_masks[3])
    assert statistics().live == before + 1  # `best`, and nothing else
    print(f"best score {best.item():.3f}; {len(seen)} answers served and gone")


if __name__ == "__main__":
    main()
