"""Programs as people write them give the steps of a plain model, bit for bit, where it is paged."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing._internal.common_optimizers import optim_db

from benchmarks._paged_cycles import home, least_budget, same_bits, step
from tenure.paging import page

from ..models import WIDTH, TiedLanguageModel
from ..support import about_values, weight_bytes
from .blocks import mlp

pytestmark = about_values


def draw(sim, number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, WIDTH, generator=generator).to(sim.device)


def tokens(sim, number):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(50, (3, 7), generator=generator).to(sim.device)


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


def training(make):
    """A program that trains such a model."""

    def program(sim):
        model = yield make()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        x_of = tokens if make is an_embedding_of_largest_norms else draw
        for i in range(3):
            with nn.utils.parametrize.cached():
                yield train(model, optimizer, x_of(sim, i))
            yield train(model, optimizer, x_of(sim, i))

    program.__name__ = make.__name__
    return program


def two_models_that_train_each_other(sim):
    model = yield nn.ModuleList([mlp(), mlp()])
    generator, critic = model
    optimizers = [torch.optim.Adam(each.parameters(), 1e-2) for each in model]
    for i in range(3):
        optimizers[1].zero_grad()
        fake = generator(draw(sim, i))
        loss = critic(draw(sim, i + 50)).mean() - critic(fake.detach()).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        other = -critic(generator(draw(sim, i))).mean()
        other.backward()
        optimizers[0].step()
        yield loss, other


def a_copy_between_a_forward_and_its_backward_pass(sim):
    model = yield mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, draw(sim, 0))
    loss = model(draw(sim, 1)).square().mean()
    copies = [copy.deepcopy(model)]
    loss.backward()
    optimizer.step()
    copies.append(copy.deepcopy(model))
    yield [list(each.state_dict().values()) for each in copies]
    yield [p.grad for p in copies[1].parameters()]
    yield train(model, optimizer, draw(sim, 2))


def an_optimizer_for_each_parameter_in_the_backward_pass(sim):
    model = yield TiedLanguageModel()
    optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

    def arrived(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(arrived)
    for i in range(4):
        loss = model(tokens(sim, i)).square().mean()
        loss.backward()
        yield loss


class Returning(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.scale = mlp(), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.blocks(x), self.scale, {"first": self.blocks[0].weight[1:]}


def weights_that_a_forward_returns(sim):
    model = yield Returning()
    for i in range(3):
        y, scale, rest = model(draw(sim, i))
        ((y * scale).square().mean() + rest["first"].sum() * 0.1).backward()
        yield y, scale, rest["first"]
        step(model)


def gradients_of_several_outputs_at_once(sim):
    model = yield mlp()
    x = draw(sim, 0).requires_grad_()
    outputs, seeds = model(x)[0, :3], torch.eye(3).to(sim.device)
    wanted = [x, model[0].weight, model[8].bias]
    yield torch.autograd.grad(outputs, wanted, seeds, is_grads_batched=True, retain_graph=True)
    yield torch.autograd.functional.jacobian(lambda x: model(x)[0, :3], x, vectorize=True)
    yield torch.autograd.functional.hvp(lambda x: model(x).square().mean(), x, torch.ones_like(x))
    outputs.sum().backward()


PROGRAMS = (
    two_models_that_train_each_other,
    a_copy_between_a_forward_and_its_backward_pass,
    an_optimizer_for_each_parameter_in_the_backward_pass,
    weights_that_a_forward_returns,
    gradients_of_several_outputs_at_once,
    training(norms_of_weights),
    training(an_embedding_of_largest_norms),
    training(hooks_that_read_weights),
    training(Routed),
    training(Complex),
)


def run(sim, program, *, is_paged):
    """What a program yields, and the values and gradients that it leaves."""
    torch.manual_seed(0)
    steps = program(sim)
    model = next(steps)
    budget = max(weight_bytes(model) // 2, least_budget(model, sim.device))
    found = []
    sim.module.manual_seed_all(3)
    with contextlib.ExitStack() as end:
        if is_paged:
            end.enter_context(page(model, sim.device, budget=budget, training=True))
        else:
            model = model.to(sim.device)
        told = steps.send(model)
        while told is not None:
            found += home(torch.utils._pytree.tree_leaves(told))
            told = next(steps, None)
        found += home(model.state_dict().values()) + home(p.grad for p in model.parameters())
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_gives_the_same(sim, program):
    paged, plain = (run(sim, program, is_paged=each) for each in (True, False))
    assert len(paged) == len(plain)
    assert [i for i in range(len(plain)) if not same_bits([paged[i]], [plain[i]])] == []


# It wants sparse gradients, which the simulated device has not.
OPTIMIZERS = [info for info in optim_db if info.optim_cls is not torch.optim.SparseAdam]


def options_of(info):
    """Some of the settings that torch tests an optimizer with."""
    fewer = {"max_iter": 3} if info.optim_cls is torch.optim.LBFGS else {}
    for each in info.optim_inputs_func(device="cpu")[:3]:
        yield each.kwargs | fewer


@pytest.mark.exhaustive
@pytest.mark.parametrize("info", OPTIMIZERS, ids=lambda info: info.optim_cls.__name__)
def test_five_steps_of_every_optimizer_with_settings_that_torch_tests(sim, info):
    # On some devices, this one among them, torch takes all parameters at once, in another order.
    alike = {"foreach": False} if info.supported_impls and "foreach" in info.supported_impls else {}
    for options in options_of(info):

        def program(sim, options=options):
            model = yield mlp(2)
            parameters = list(model.parameters())
            if info.optim_cls.__name__ == "Muon":
                parameters = [each for each in parameters if each.ndim == 2]
            same = {} if options.get("fused") else alike
            optimizer = info.optim_cls(parameters, **same | options)
            for i in range(5):

                def closure(i=i):
                    optimizer.zero_grad()
                    loss = model(draw(sim, i)).square().mean()
                    loss.backward()
                    return loss

                yield optimizer.step(closure)

        paged, plain = (run(sim, program, is_paged=each) for each in (True, False))
        assert same_bits(paged, plain), options
