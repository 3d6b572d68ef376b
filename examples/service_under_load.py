"""A service that four clients ask at once: what does not fit runs in pieces, and nothing is lost.

One thread computes. It takes all requests that wait and runs them together, in as many pieces as
the memory wants; an answer, or an error, comes back to each client. A budget stands for the device.
"""

import logging
import queue
import random
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from tenure import adaptive

LIMIT, CLIENTS, REQUESTS, WIDTH = "10MiB", 4, 25, 64
# each smaller size is logged; what is counted is enough here
logging.getLogger("tenure.adaptive").setLevel(logging.ERROR)

Request = tuple[Tensor, "Future[Tensor]"]
END: Request = (torch.empty(0), Future())  # comes when every client has its last answer


class Service:
    """A model, and the requests that wait for it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.waiting: queue.Queue[Request] = queue.Queue()
        self.did: Counter[str] = Counter()

    def ask(self, rows: Tensor) -> Tensor:
        """Wait for the answer, as a client does, on a thread of its own."""
        answer: Future[Tensor] = Future()
        self.waiting.put((rows, answer))
        return answer.result()

    def run(self) -> None:
        """Serve what waits, all at a time and within the limit, until the end."""
        with adaptive.memory_budget(LIMIT), torch.inference_mode():
            while (first := self.waiting.get()) is not END:
                n_others = self.waiting.qsize()
                self._serve([first, *(self.waiting.get() for _ in range(n_others))])

    def _serve(self, requests: list[Request]) -> None:
        self.did["batches"] += 1
        try:
            found = self._outputs(torch.cat([rows for rows, _ in requests]))
        except Exception as error:  # each client is told, and the next batch runs
            for _, answer in requests:
                answer.set_exception(error)
            return
        parts = found.split([len(rows) for rows, _ in requests])
        for (_, answer), part in zip(requests, parts, strict=True):
            answer.set_result(part)
        self.did["answers"] += len(requests)

    def _outputs(self, batch: Tensor) -> Tensor:
        @adaptive.execute.chunked(
            batch, collect="host", on_retry=lambda e: self.did.update([e.kind])
        )
        def outputs(rows: Tensor, start: int, end: int) -> Tensor:
            self.did["pieces"] += 1
            return torch.argmax(self.model(rows), 1)

        joined: Tensor = outputs
        return joined


def client(service: Service, seed: int) -> int:
    """Ask for a few rows, or for thousands, and compare each answer with the model's own."""
    sizes, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(REQUESTS):
        rows = torch.randn(sizes.choice([1, 10, 100, 3000]), WIDTH, generator=numbers).double()
        assert service.ask(rows).equal(service.model(rows).argmax(1))
    return REQUESTS


def main() -> None:
    """Let the clients ask at once, and count."""
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 10)
    service = Service(nn.Sequential(*layers).double())
    with ThreadPoolExecutor(CLIENTS + 1) as threads:
        serving = threads.submit(service.run)
        asked = sum(threads.map(lambda seed: client(service, seed), range(CLIENTS)))
        service.waiting.put(END)
        serving.result()
    did = service.did
    print(f"{asked} requests, {did['answers']} answers, in {did['batches']} batches")
    print(f"{did['shrink']} times too large for {LIMIT}, so in {did['pieces']} pieces")
    assert asked == did["answers"] == CLIENTS * REQUESTS
    assert did["shrink"] > 0


if __name__ == "__main__":
    main()
