"""Programs give the numbers and gradients of plain tensors, whole and in micro-batches."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tenure.adaptive import lazy

from .programs import Twice, Vision, assert_same, batch, mlp

SEED = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)
ORDER = torch.randperm(8, generator=torch.Generator().manual_seed(2))


def trained_by(loss, *others):
    """Run backward; the loss and other values as numbers."""
    loss.backward()
    return [each.item() for each in (loss, *others)]


# --- ways to run backward


def two_backwards(model, a, b):
    out = model(a)
    out.sum().backward(retain_graph=True)
    out.square().mean().backward()


def scaled(model, a, b):
    torch.amp.GradScaler("cpu", init_scale=8.0).scale(model(a).mean()).backward()


def factor_without_gradients(model, a, b):
    out = model(a)
    with torch.no_grad():
        factor = out.exp().mean(1, keepdim=True)
    (out * factor).sum().backward()


def compiled(model, a, b):
    called = torch.compile(model, backend="eager")
    for _ in range(2):  # once more, when code is there
        called(a * 1).square().mean().backward()


def in_a_checkpoint(model, a, b):
    checkpoint(model, a, use_reentrant=False).square().mean().backward()


class Remembers(nn.Linear):
    """Keeps its last output between checkpoints, as for a loss beside the model's own."""

    last = None

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.call, x, use_reentrant=False)
            self.last = x.detach()
        return x

    def call(self, x):
        return super().forward(x)


def remembered(model, a, b):
    model(a).square().mean().backward()
    return model.last.tolist()


def models_in_turns(models, a, b):
    """A generator and a discriminator: what one gives is detached for the other."""
    first, second = models
    fake = first(a)
    second(fake.detach()).square().mean().backward()
    second.zero_grad()
    second(fake).mean().backward()


# --- losses and what they are made of


def number_for_a_log(model, a, b, made=lambda loss: loss):
    """It is that of the line that made it."""
    out = model(a)
    loss = F.cross_entropy(out, b)
    log = loss * 2
    loss += out.pow(2).mean()
    return trained_by(made(loss), log)


def factor_of_the_batch_alone(model, a, b):
    """It is computed once, beside one that is trained and a penalty."""
    norm = nn.BatchNorm1d(4).double().requires_grad_(False)
    torch.manual_seed(5)
    scale = F.dropout(norm(a)).abs().mean()
    penalty = 0.1 * model[0].weight.square().sum()
    loss = F.cross_entropy(model(a), b) * scale * model[2].bias.sum() + penalty
    return [*trained_by(loss), norm.running_mean.tolist(), int(norm.num_batches_tracked)]


def prepared(prepare, model, a, b):
    """What is made of the batch alone may mix its samples."""
    torch.manual_seed(5)
    model(prepare(a)).square().mean().backward()


def plain_labels_and_masks(model, a, b, flat=False):
    """They are cut with the batch."""
    torch.manual_seed(5)
    y, mask = torch.randint(0, 3, (8, 2)), torch.rand(8, 6) > 0.5
    out = model(a).masked_fill(mask, -1.0).view(8, 2, 3)
    out, labels = (out.reshape(-1, 3), y.view(-1)) if flat else (out.transpose(1, 2), y)
    return trained_by(F.cross_entropy(out, labels))


def number_of_samples_in_a_tensor(make, model, a, b):
    out = model(a)
    return trained_by(out.square().sum() / make(out, out.shape[0]))


def batchmean(model, a, b, batch_first=True):
    """It divides by the first dimension."""
    out = model(a[:, None] * torch.arange(1.0, 6.0)[:, None].double()).log_softmax(-1)
    target = torch.full((8, 5, 3), 1 / 3, dtype=torch.float64)
    if not batch_first:
        out, target = out.transpose(0, 1), target.transpose(0, 1)
    return trained_by(F.kl_div(out, target, reduction="batchmean"))


def reads_in_order(order, model, a, b):
    out = model(a)
    loss = F.cross_entropy(out, b)
    read = {
        "a": lambda: (out.argmax(1) == b).sum().item(),
        "l": loss.item,
        "b": loss.backward,
        "o": lambda: out.sum().item(),
    }
    return [read[each]() for each in order]


def draws(model, a, b, way="sum"):
    """Numbers of a generator of the user's, one after the other, so that parts draw the same."""
    generator = torch.Generator().manual_seed(5)
    with torch.set_grad_enabled(way != "without gradients"):
        out = model(a)
        out = out * torch.empty_like(out).uniform_(generator=generator)
        if way != "without gradients":
            (out.sum() if way == "sum" else (out @ out.T).logsumexp(1).mean()).backward()
    return out.tolist(), generator.get_state()


# --- graphs of their own, beside the batch or from it


def labels(model, a, b):
    F.cross_entropy(model(a), b).backward()


def two_losses_of_one_graph(model, a, b):
    beside = model.beside()
    first, second = model(a, beside).square().mean(), model(a * 2, beside).sum()
    first.backward(retain_graph=True)
    second.backward()


def read_first(model, a, b):
    loss = model(a).square().mean()
    assert loss.item() > 0
    loss.backward(retain_graph=True)
    loss.backward()


def plain_term(model, a, b):
    loss = model(a).square().mean()
    (loss + model.scale.square().sum().exp()).backward()


def contrast(model, a, b):
    out = model(a)
    (out @ out.T).logsumexp(1).mean().backward()


def written_into_the_batch(model, a, b):
    _, positions, scale = model.beside()
    a = a * positions[0]
    a.mul_(scale)
    model.inner(a).square().mean().backward()


# --- writes, which go into no tensor of the user's


def passed_twice(model, a, b):
    a.sub_(0.5).div_(0.1)
    model(a).square().mean().backward()
    first = [p.grad.sum().item() for p in model.parameters()]
    # as SAM does
    model(a).square().mean().backward()
    return [*first, a.mean().item(), a[0, 0].item()]


def in_a_loss_over_the_batch(model, a, b):
    a.mul_(3)
    loss = model(a).square().mean() * a.std() + (model(a) @ a[:, :3].t()).logsumexp(1).sum()
    return trained_by(loss)


def without_gradients(model, a, b):
    a.mul_(3)
    with torch.no_grad():
        out = model(a)
    return [out.sum().item(), a.sum().item(), a.mul_(2).sum().item(), model(a).sum().item()]


def by_a_view_that_nobody_uses_again(model, a, b):
    """As masks of sliding windows do."""
    view = a[:, :2]
    a[:, :2] = view.clamp(max=0)
    return trained_by(model(a).square().mean(), a.sum())


def rows_and_labels(model, a, b):
    """As CutMix does."""
    a[:, 1:3] = a[ORDER, 1:3]
    b = b[ORDER]
    numbers = trained_by(F.cross_entropy(model(a), b), a.sum(), a[0, 1])
    return [*numbers, F.cross_entropy(model(a), b).item()]


def columns(model, a, b):
    a -= a.mean(0)
    a[:, 0] = a[:, 0].flip(0)
    a.mul_(2)
    return trained_by(F.cross_entropy(model(a), b), a.sum())


def masked_labels(model, a, b):
    b.masked_fill_(a[:, 0] > 0, -100)
    return trained_by(F.cross_entropy(model(a), b), (b != -100).sum())


def set_labels_of_a_copy(model, a, b):
    b = b.clone()
    b[a[:, 0] > 0] = -100
    return trained_by(F.cross_entropy(model(a), b), (b != -100).sum())


def plain_labels(model, a, b):
    """Between two calls that take them."""
    labels = batch()[1]
    out = model(a)
    labels[out.argmax(1) == labels] = -100
    return [*trained_by(F.cross_entropy(out, labels)), *labels.tolist()]


def what_a_model_gave(model, a, b):
    a[:, 0] = model(a).detach()[:, 0]
    return trained_by((model(a) - a.mean(0)[:3]).square().mean())


def by_index(model, a, b):
    a[:, 0] *= 2
    a[..., 2:4] -= a[:, :2]
    out = model(a)
    out[:, 1] *= 3
    before = out.sum().item()
    out[:, :2] += out.max().item()
    loss = (out * out.sum(1, keepdim=True)).square().mean()
    return [before, *trained_by(loss, out.sum(), a.sum())]


def a_parameter_into_the_batch(model, a, b):
    a.add_(model[0].bias[:4])
    return trained_by(model(a - a.mean(0)).square().mean() + model(a).square().mean())


ROOMS = (None, 3)
# each model and how many of its rows fit, and the programs that run with them
PROGRAMS = [
    (mlp, ROOMS, {
        "gradient": lambda model, a, b: model(a).backward(gradient=SEED),
        "gradient of a number": (
            lambda model, a, b: model(a).sum().backward(torch.tensor(3.0).double())
        ),
        "accumulated": lambda model, a, b: (
            model(a).sum().backward(), model(a).mean().backward()
        ),
        "a function that nothing trains through": (
            lambda model, a, b: model(Twice.apply(a)).sum().backward()
        ),
        "root of a log": partial(number_for_a_log, made=torch.sqrt),
        "normalized": partial(prepared, lambda x: (x - x.mean(0)) / x.std(0)),
        "mixed up": partial(prepared, lambda x: 0.3 * x + 0.7 * x[torch.randperm(len(x))]),
        "noise": partial(prepared, lambda x: x + 0 * torch.randn_like(x)),
        "new_tensor": partial(number_of_samples_in_a_tensor, lambda out, n: out.new_tensor(n)),
        "tensor": partial(number_of_samples_in_a_tensor, lambda _, n: torch.tensor(n)),
        **{order: partial(reads_in_order, order) for order in ("alb", "bla", "oab", "llb")},
        "draws, contrast": partial(draws, way="contrast"),
        "draws, without gradients": partial(draws, way="without gradients"),
    }),
    (mlp, ROOMS, [
        two_backwards, scaled, factor_without_gradients, compiled, in_a_checkpoint,
        number_for_a_log, factor_of_the_batch_alone, draws,
    ]),
    # a doubled batch is a product of twice the rows
    (mlp, (None, 7), {"twice": partial(prepared, lambda x: torch.cat([x, -x]))}),
    (mlp, (None, 15), {
        "batchmean": batchmean, "batchmean, turned": partial(batchmean, batch_first=False),
    }),
    (partial(mlp, n_out=6), ROOMS, {
        "plain labels": plain_labels_and_masks, "flat": partial(plain_labels_and_masks, flat=True),
    }),
    (lambda: weight_norm(nn.Linear(4, 4).double()), ROOMS, [in_a_checkpoint]),
    (lambda: Remembers(4, 4).double(), ROOMS, [remembered]),
    (lambda: nn.ModuleList([mlp(n_out=4), mlp()]), ROOMS, [models_in_turns]),
    (Vision, (None, 9), [
        labels, two_losses_of_one_graph, read_first, plain_term, contrast, written_into_the_batch,
    ]),
    (mlp, ROOMS, [
        passed_twice, in_a_loss_over_the_batch, without_gradients, by_a_view_that_nobody_uses_again,
        rows_and_labels, columns, masked_labels, set_labels_of_a_copy, plain_labels,
        what_a_model_gave, by_index,
    ]),
    # the batch is made of parameters then, and of more than samples
    (mlp, (None,), [a_parameter_into_the_batch]),
]  # fmt: skip


def _named(programs):
    return programs if isinstance(programs, dict) else {each.__name__: each for each in programs}


CASES = [
    pytest.param(make, program, room, id=f"{name}-{room}")
    for make, rooms, programs in PROGRAMS
    for name, program in _named(programs).items()
    for room in rooms
]


@pytest.mark.parametrize(("make", "program", "room"), CASES)
def test_a_program_gives_what_it_gives_of_plain_tensors(make, program, room):
    model = make()

    def run(wrap):
        # what is there is added to
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        x, y = batch()
        found = program(model, *wrap(x, y))
        if wrap is lazy:
            torch.testing.assert_close((x, y), batch(), rtol=0, atol=0)
        return found

    assert_same(model, run, room)
