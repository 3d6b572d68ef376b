"""Programs as people write them give the steps of a plain model, bit for bit, where it is paged."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing._internal.common_optimizers import optim_db

from benchmarks._paged_cycles import least_budget, step
from tenure.paging import page

from ..models import WIDTH, TiedLanguageModel
from ..support import about_values
from .blocks import mlp

pytestmark = about_values


def train(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def norms_of_weights():
    make = parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal
    return nn.Sequential(*[each(nn.Linear(WIDTH, WIDTH)) for each in make], mlp(1))


def an_embedding_of_largest_norms():
    return nn.Sequential(nn.Embedding(50, WIDTH, max_norm=0.5), mlp(3))


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([mlp(2) for _ in range(4)])

    def forward(self, x):
        values, chosen = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, columns = torch.where(chosen == number)
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * values[rows, columns, None])
        return y


def hooks_that_read_weights():
    model = mlp()
    model[2].register_forward_hook(lambda module, _, output: output + module.weight.sum() * 0.1)
    model[4].register_forward_pre_hook(lambda module, args: (args[0] * module.bias,))
    model[6].register_full_backward_pre_hook(lambda module, grads: (grads[0] * 1.5,))
    return model


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        weights = [torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) * 0.1 for _ in range(4)]
        self.weights = nn.ParameterList(weights)

    def forward(self, x):
        x = x.to(torch.cfloat)
        for weight in self.weights:
            x = x @ weight.conj().T + x @ weight.mT
        return torch.view_as_real(x)


def training(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    for x in batches:
        with nn.utils.parametrize.cached():
            found.append(train(model, optimizer, x))
        found.append(train(model, optimizer, x))
    return found


def two_models_that_train_each_other(model, batches):
    generator, critic = model
    optimizers = [torch.optim.Adam(each.parameters(), 1e-2) for each in model]
    found = []
    for x, y, _ in zip(batches, batches[1:], range(3), strict=False):
        optimizers[1].zero_grad()
        fake = generator(x)
        loss = critic(y).mean() - critic(fake.detach()).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        other = -critic(generator(x)).mean()
        other.backward()
        optimizers[0].step()
        found += [loss, other]
    return found


def a_copy_between_a_forward_and_its_backward_pass(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, batches[0])
    loss = model(batches[1]).square().mean()
    copies = [copy.deepcopy(model)]
    loss.backward()
    optimizer.step()
    copies.append(copy.deepcopy(model))
    states = [list(each.state_dict().values()) for each in copies]
    gradients = [p.grad for p in copies[1].parameters()]
    return states, gradients, train(model, optimizer, batches[2])


def an_optimizer_for_each_parameter_in_the_backward_pass(model, batches):
    optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

    def arrived(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(arrived)
    losses = []
    for x in batches:
        losses.append(model(x).square().mean())
        losses[-1].backward()
    return losses


class Returning(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.scale = mlp(), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.blocks(x), self.scale, {"first": self.blocks[0].weight[1:]}


def weights_that_a_forward_returns(model, batches):
    found = []
    for x in batches:
        y, scale, rest = model(x)
        ((y * scale).square().mean() + rest["first"].sum() * 0.1).backward()
        found += [each.detach().clone() for each in (y, scale, rest["first"])]
        step(model)
    return found


def gradients_of_several_outputs_at_once(model, batches):
    x = batches[0].requires_grad_()
    outputs, seeds = model(x)[0, :3], torch.eye(3).to(x.device)
    wanted = [x, model[0].weight, model[8].bias]
    found = [
        torch.autograd.grad(outputs, wanted, seeds, is_grads_batched=True, retain_graph=True),
        torch.autograd.functional.jacobian(lambda x: model(x)[0, :3], x, vectorize=True),
        torch.autograd.functional.hvp(lambda x: model(x).square().mean(), x, torch.ones_like(x)),
    ]
    outputs.sum().backward()
    return found


def steps_of(info, options):
    """Steps of an optimizer of torch's own database."""
    # On some devices, this one among them, torch takes all parameters at once, in another order.
    if "foreach" in (info.supported_impls or ()) and not options.get("fused"):
        options = {"foreach": False} | options

    def program(model, batches):
        parameters = list(model.parameters())
        if info.optim_cls.__name__ == "Muon":
            parameters = [each for each in parameters if each.ndim == 2]
        optimizer, losses = info.optim_cls(parameters, **options), []
        for x in batches:

            def closure(x=x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        return losses

    return program


def optimizers():
    """Some of the settings that torch tests each optimizer with."""
    for info in optim_db:
        # It wants sparse gradients, which the simulated device has not.
        if info.optim_cls is torch.optim.SparseAdam:
            continue
        fewer = {"max_iter": 3} if info.optim_cls is torch.optim.LBFGS else {}
        for i, each in enumerate(info.optim_inputs_func(device="cpu")[:3]):
            program = steps_of(info, each.kwargs | fewer)
            yield pytest.param(program, lambda: mlp(2), id=f"{info.optim_cls.__name__} {i}")


PROGRAMS = (
    (two_models_that_train_each_other, lambda: nn.ModuleList([mlp(), mlp()])),
    (a_copy_between_a_forward_and_its_backward_pass, mlp),
    (an_optimizer_for_each_parameter_in_the_backward_pass, TiedLanguageModel),
    (weights_that_a_forward_returns, Returning),
    (gradients_of_several_outputs_at_once, mlp),
    (training, norms_of_weights),
    (training, an_embedding_of_largest_norms),
    (training, hooks_that_read_weights),
    (training, Routed),
    (training, Complex),
    *optimizers(),
)
OF_WORDS = (TiedLanguageModel, an_embedding_of_largest_norms)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("program", "make"), PROGRAMS)
def test_a_program_gives_the_same(sim, pair, program, make):
    both = pair(make())
    draw = (
        partial(torch.randint, 50, (3, 7)) if make in OF_WORDS else partial(torch.randn, 4, WIDTH)
    )
    batches = [draw().to(sim.device) for _ in range(5)]
    budget = max(both.weight_bytes // 2, least_budget(both.host, sim.device))
    with page(both.host, sim.device, budget=budget, training=True):
        both.agree(lambda model: program(model, [each.clone() for each in batches]))
    assert both.values_differ() == []
