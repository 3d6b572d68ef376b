"""Files that are cut short, or have bits flipped: an error that names them, or what was written."""

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import nn

from tenure import TenureError, adaptive
from tenure.paging import load_paged
from tenure.profiler import Recording

from ..show.report_samples import RUN


class Damage:
    """One file, damaged again and again.

    ``read`` returns what must equal ``expected``; a `TenureError` that names the file will do.
    """

    def __init__(self, path, read, head_bytes=None):
        self.path, self.read = path, read
        self.whole = path.read_bytes()
        # what is flipped: in a file of weights the numbers themselves have no check
        self.head_bytes = head_bytes or len(self.whole)
        self.expected = read()
        self.refused = self.exact = 0
        self.wrong = []

    def cut(self, n_cuts, chance):
        ends = range(len(self.whole))
        for end in chance.sample(ends, min(n_cuts, len(ends))):
            self.try_one(self.whole[:end], f"cut at {end}")

    def flip(self, n_flips, chance):
        for _ in range(n_flips):
            damaged = bytearray(self.whole)
            bits = [chance.randrange(8 * self.head_bytes) for _ in range(chance.choice((1, 1, 2)))]
            for bit in bits:
                damaged[bit // 8] ^= 1 << bit % 8
            self.try_one(bytes(damaged), f"bits {bits} flipped")

    def try_one(self, data, what):
        self.path.write_bytes(data)
        try:
            found = self.read()
        except TenureError as error:
            self.refused += 1
            if self.path.name not in str(error):
                self.wrong.append(f"{what}: {error!s} does not name the file")
        except Exception as error:
            self.wrong.append(f"{what}: {type(error).__name__}: {error}")
        else:
            self.exact += found == self.expected
            if found != self.expected:
                self.wrong.append(f"{what}: read as something else")


def _weights(path):
    def made():
        return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 2))

    def read():
        with torch.device("meta"):
            model = made()
        with load_paged(model, path, "cpu"), torch.no_grad():
            return model(torch.ones(1, 8)).tolist()

    torch.manual_seed(0)
    save_file(made().state_dict(), path, {"format": "pt"})

    head = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    return Damage(path, read, head)


def _recording(path):
    RUN.save(path)
    return Damage(path, lambda: json.dumps(Recording.load(path).to_dict()))


def _sizes(path):
    adaptive.reset()
    for name in ("one", "two"):
        adaptive.batch(initial_batchsize=8, context=name)(lambda batchsize: batchsize)()
    adaptive.save(path)

    def read():
        adaptive.reset()
        adaptive.load(path)
        adaptive.save(path)
        return path.read_text()

    return Damage(path, read)


def run(n_cuts, n_flips, seed=0):
    """Damage each kind of file so often; a `Damage` of each."""
    chance = random.Random(seed)
    kinds = {"weights.safetensors": _weights, "run.tenure": _recording, "sizes.json": _sizes}
    found = {}
    with TemporaryDirectory() as folder:
        for name, make in kinds.items():
            damage = make(Path(folder, name))
            damage.cut(n_cuts, chance)
            damage.flip(n_flips, chance)
            found[name] = damage
    adaptive.reset()
    return found
