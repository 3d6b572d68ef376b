"""Programs as people write them give the steps of a plain model, bit for bit, where it is paged."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.testing._internal.common_optimizers import optim_db

from benchmarks._paged_cycles import home, least_budget, same_bits, step
from tenure.paging import page

from ..models import WIDTH, TiedLanguageModel

# about values, which no allocator changes: once, with the one that has more rules
pytestmark = pytest.mark.sim_allocator("cuda")


def mlp(n=5):
    return nn.Sequential(*[each for _ in range(n) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def draw(sim, number, *shape):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(*(shape or (4, WIDTH)), generator=generator).to(sim.device)


def tokens(sim, number):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(50, (3, 7), generator=generator).to(sim.device)


def train(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


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


def an_average_of_weights(sim):
    model = yield mlp()
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=ema)
    optimizer = sgd(model)
    for i in range(3):
        train(model, optimizer, draw(sim, i))
        average.update_parameters(model)
    yield list(average.module.state_dict().values())


def norms_of_weights(sim):
    model = yield nn.Sequential(
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
        nn.Linear(WIDTH, WIDTH),
    )
    optimizer = sgd(model)
    for i in range(3):
        with nn.utils.parametrize.cached():
            yield train(model, optimizer, draw(sim, i))
        yield train(model, optimizer, draw(sim, i))


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) * 0.1 for _ in range(4)])
        self.rest = nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.randn(WIDTH)})

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x * self.rest["a"] + self.rest["b"]


def lists_and_dictionaries_of_parameters(sim):
    model = yield Listed()
    optimizer = torch.optim.AdamW(model.parameters())
    for i in range(3):
        yield train(model, optimizer, draw(sim, i))


def embedding(**options):
    def program(sim):
        model = yield nn.Sequential(nn.Embedding(50, WIDTH, **options), mlp(3))
        optimizer = sgd(model)
        for i in range(3):
            yield train(model, optimizer, tokens(sim, i))

    return program


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def forward(self, x, chosen):
        for block, is_on in zip(self.blocks, chosen, strict=True):
            x = x + torch.tanh(block(x)) if is_on else x
        return x


def layers_that_are_left_out_at_random(sim):
    model = yield Dropped()
    optimizer = torch.optim.Adam(model.parameters())
    for i in range(6):
        chosen = torch.rand(6, generator=torch.Generator().manual_seed(i)).gt(0.4).tolist()
        optimizer.zero_grad()
        model(draw(sim, i).requires_grad_(), chosen).square().mean().backward()
        yield [each.grad for each in model.parameters()]
        optimizer.step()


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


def experts_that_are_chosen_by_the_input(sim):
    model = yield Routed()
    optimizer = torch.optim.AdamW(model.parameters())
    for i in range(5):
        yield train(model, optimizer, draw(sim, i))


def two_optimizers_that_accumulate(sim):
    model = yield mlp()
    first = torch.optim.SGD(model[:4].parameters(), 0.1, momentum=0.9)
    second = torch.optim.AdamW(model[4:].parameters())
    for i in range(6):
        model(draw(sim, i)).square().mean().backward()
        for optimizer, every in ((first, 2), (second, 3)):
            if i % every == every - 1:
                optimizer.step()
                optimizer.zero_grad(set_to_none=every == 2)


def layers_that_are_frozen_meanwhile(sim):
    model = yield mlp()
    optimizer = sgd(model)
    for i in range(6):
        model[2 * (i % 5)].requires_grad_(i % 2 == 0)
        yield train(model, optimizer, draw(sim, i))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = F.relu_(block(x).mul_(2).add_(1)).clone()
            x[:, 0] = 0
        return x


def activations_that_are_written_in_place(sim):
    model = yield InPlace()
    optimizer = sgd(model)
    for i in range(3):
        yield train(model, optimizer, draw(sim, i))


def gradients_that_are_clipped_by_value(sim):
    model = yield mlp()
    optimizer = sgd(model)
    for i in range(3):
        optimizer.zero_grad()
        model(draw(sim, i)).square().sum().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()


def a_functional_call_with_weights_of_its_own(sim):
    model = yield mlp()
    own = {name: p.detach().to(sim.device).clone() for name, p in model.named_parameters()}
    own = {name: p.requires_grad_() for name, p in own.items()}
    optimizer = sgd(model)
    for i in range(2):
        torch.func.functional_call(model, own, (draw(sim, i),)).square().mean().backward()
        yield train(model, optimizer, draw(sim, i)), [p.grad for p in own.values()]


def a_copy_between_a_forward_and_its_backward_pass(sim):
    model = yield mlp()
    optimizer = sgd(model)
    train(model, optimizer, draw(sim, 0))
    loss = model(draw(sim, 1)).square().mean()
    copies = [copy.deepcopy(model)]
    loss.backward()
    optimizer.step()
    copies.append(copy.deepcopy(model))
    yield [list(each.state_dict().values()) for each in copies]
    yield [p.grad for p in copies[1].parameters()]
    yield train(model, optimizer, draw(sim, 2))


def a_checkpoint_of_model_and_optimizer(sim):
    model = yield mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, draw(sim, 0))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    yield [train(model, optimizer, draw(sim, i)) for i in (1, 2)]
    file.seek(0)
    state, other = torch.load(file)
    model.load_state_dict(state)
    optimizer.load_state_dict(other)
    yield [train(model, optimizer, draw(sim, i)) for i in (1, 2)]


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


def hooks_that_read_weights(sim):
    model = yield mlp()
    model[2].register_forward_hook(lambda module, _, output: output + module.weight.sum() * 0.1)
    model[4].register_forward_pre_hook(lambda module, args: (args[0] * module.bias,))
    model[6].register_full_backward_pre_hook(lambda module, grads: (grads[0] * 1.5,))
    optimizer = sgd(model)
    for i in range(3):
        yield train(model, optimizer, draw(sim, i))


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


def graphs_that_are_thrown_away(sim):
    model = yield mlp()
    optimizer = sgd(model)
    for i in range(3):
        model(draw(sim, 7))
        kept = model(draw(sim, 8)).mean()
        first, second = (model(draw(sim, i + each)).square().mean() for each in (0, 20))
        second.backward()
        with torch.inference_mode():
            yield model(draw(sim, 9))
        first.backward()
        optimizer.step()
        optimizer.zero_grad()
        del kept


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = mlp()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        self.seen += 1
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return self.blocks(x - self.mean) * self.seen


def buffers_that_each_step_changes(sim):
    model = yield Counting()
    optimizer = sgd(model)
    for i in range(4):
        yield train(model, optimizer, draw(sim, i))


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


def complex_weights_and_their_conjugates(sim):
    model = yield Complex()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for i in range(3):
        yield train(model, optimizer, draw(sim, i))


def data_that_is_replaced_between_steps(sim):
    model = yield mlp()
    optimizer = sgd(model)
    for i in range(3):
        train(model, optimizer, draw(sim, i))
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9
            parameter.grad = parameter.grad * 0.5
        with torch.no_grad():
            model[0].weight.copy_(model[2].weight)
        model[4].weight.data.clamp_(-0.1, 0.1)
        optimizer.step()


PROGRAMS = {
    **{
        program.__name__: program
        for program in (
            two_models_that_train_each_other,
            an_average_of_weights,
            norms_of_weights,
            lists_and_dictionaries_of_parameters,
            layers_that_are_left_out_at_random,
            experts_that_are_chosen_by_the_input,
            two_optimizers_that_accumulate,
            layers_that_are_frozen_meanwhile,
            activations_that_are_written_in_place,
            gradients_that_are_clipped_by_value,
            a_functional_call_with_weights_of_its_own,
            a_copy_between_a_forward_and_its_backward_pass,
            a_checkpoint_of_model_and_optimizer,
            an_optimizer_for_each_parameter_in_the_backward_pass,
            hooks_that_read_weights,
            weights_that_a_forward_returns,
            gradients_of_several_outputs_at_once,
            graphs_that_are_thrown_away,
            buffers_that_each_step_changes,
            complex_weights_and_their_conjugates,
            data_that_is_replaced_between_steps,
        )
    },
    "an embedding of largest norms": embedding(max_norm=0.5),
    "an embedding with padding": embedding(padding_idx=3, scale_grad_by_freq=True),
}


def run(sim, program, *, is_paged):
    """What a program yields, and the values and gradients that it leaves."""
    torch.manual_seed(0)
    steps = program(sim)
    model = next(steps)
    weight_bytes = sum(p.nbytes for p in model.parameters())
    budget = max(weight_bytes // 2, least_budget(model, sim.device))
    handle = page(model, sim.device, budget=budget, training=True) if is_paged else None
    if handle is None:
        model = whole(model, sim.device)
    found = []
    sim.module.manual_seed_all(3)
    try:
        told = steps.send(model)
        while True:
            found += home(torch.utils._pytree.tree_leaves(told))
            told = next(steps)
    except StopIteration:
        pass
    found += home(model.state_dict().values()) + home(p.grad for p in model.parameters())
    if handle is not None:
        handle.unpage()
    return found


def whole(model, device):
    """The model itself on a device, with its ties."""
    ties = getattr(model, "embed", None)
    model = model.to(device)
    if ties is not None:
        model.head.weight = model.embed.weight
    return model


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_the_same(sim, name):
    paged, plain = (run(sim, PROGRAMS[name], is_paged=each) for each in (True, False))
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
