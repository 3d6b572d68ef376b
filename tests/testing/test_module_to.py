import pytest
import torch
from torch import nn


def test_a_module_keeps_its_parameter_objects_on_the_way(sim):
    layer = nn.Linear(3, 3)
    weight = layer.weight
    layer.to(sim.device)
    assert layer.weight is weight
    assert weight.device == sim.device
    layer.cpu()
    assert layer.weight is weight
    assert weight.device.type == "cpu"
    assert sim.allocated_bytes == 0


def test_tied_weights_stay_tied_and_are_allocated_once(sim):
    embedding, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    head.weight = embedding.weight
    nn.Sequential(embedding, head).to(sim.device)
    assert head.weight is embedding.weight
    assert sim.allocated_bytes == 4 * 3 * 4


def test_an_optimizer_made_before_the_move_still_trains_the_module(sim):
    layer = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer.to(sim.device)
    before = layer.weight.tolist()
    layer(torch.ones(1, 3, device=sim.device)).sum().backward()
    optimizer.step()
    assert layer.weight.tolist()[0] == pytest.approx([value - 1 for value in before[0]])


def test_gradients_move_with_their_parameters(sim):
    layer = nn.Linear(3, 1)
    layer(torch.ones(1, 3)).sum().backward()
    layer.to(sim.device)
    assert layer.weight.grad.device == sim.device
    assert layer.weight.grad.tolist() == [[1, 1, 1]]


def test_data_may_be_set_across_devices_and_within_one(sim):
    parameter = nn.Parameter(torch.zeros(2))
    parameter.data = torch.ones(3, device=sim.device)
    assert parameter.device == sim.device
    assert parameter.requires_grad
    assert parameter.is_leaf
    parameter.data = torch.zeros(4, device=sim.device)
    assert parameter.shape == (4,)
    assert parameter.data.requires_grad is False


def test_hooks_of_a_parameter_move_with_it(sim):
    layer, called = torch.nn.Linear(2, 2), []
    layer.weight.register_hook(lambda grad: called.append("tensor"))
    handle = layer.weight.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
    layer.to(sim.device)
    layer(torch.ones(1, 2, device=sim.device)).sum().backward()
    assert called == ["tensor", "accumulated"]
    handle.remove()
    layer.cpu()
    layer(torch.ones(1, 2)).sum().backward()
    assert called == ["tensor", "accumulated", "tensor"]
