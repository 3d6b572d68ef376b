"""A transformer for tests of sharded modules, whole and sharded in each way."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

N_WORDS, WIDTH, LENGTH, HEAD = 60, 32, 8, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        hidden = self.before(x)
        # the heads that are here
        shape = (*x.shape[:2], -1, HEAD)
        q, k, v = (each(hidden).view(shape).transpose(1, 2) for each in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.after(x))))


class Transformer(nn.Module):
    def __init__(self, n_words=N_WORDS, *, checkpoints=False, depth=3):
        super().__init__()
        self.words = nn.Embedding(n_words, WIDTH)
        # a first, a last, and one between: what is sent for one beside the work of another
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, n_words, bias=False)
        self.checkpoints = checkpoints

    def forward(self, x):
        hidden = self.words(x)
        for block in self.blocks:
            if self.checkpoints:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        return self.head(self.norm(hidden))


def whole(seed=0, **options):
    torch.manual_seed(seed)
    return Transformer(**options)


def sharded(net, **options):
    """Each layer and the root by ``fully_shard``."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def in_parallel(net):
    """Each layer, the words and the head by ``parallelize_module``."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = dict.fromkeys(("q", "k", "v", "wide"), ColwiseParallel())
    rows = dict.fromkeys(("o", "narrow"), RowwiseParallel())
    for block in net.blocks:
        parallelize_module(block, mesh, {**columns, **rows})
    words = RowwiseParallel(input_layouts=Replicate())
    head = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(net, mesh, {"words": words, "head": head})


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS = {
    "plain": (sharded, {}, {}),
    # uneven: the last rank has less of the words, and none of a bias
    "padded": (sharded, {}, {"n_words": 61}),
    "kept whole": (sharded, {"reshard_after_forward": False}, {}),
    "half precision": (sharded, {"mp_policy": HALF}, {}),
    "checkpoints": (sharded, {}, {"checkpoints": True}),
    "tensor parallel": (in_parallel, {}, {}),
}


def net_of(kind, dtype=torch.float32, **of_net):
    """A net of a kind of `KINDS`."""
    place, options, of_kind = KINDS[kind]
    return place(whole(**of_kind, **of_net).to(dtype), **options)


def tokens(n_samples, seed=1):
    torch.manual_seed(seed)
    return torch.randint(N_WORDS, (n_samples, LENGTH))


def loss_of(net):
    """The mean over tokens."""

    def fn(x):
        return F.cross_entropy(net(x).flatten(0, 1).float(), x.flatten())

    return fn


def whole_gradients(net):
    """The gradients of all parameters, whole, on each rank; a collective."""
    found = {}
    for name, parameter in net.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            is_shared = hasattr(gradient, "full_tensor")
            found[name] = gradient.full_tensor() if is_shared else gradient
    return found
