import torch
from torch import nn


def test_products_run_low_sums_in_float32_and_mixed_arguments_in_the_widest_type(sim):
    x, dtype = torch.randn(4, 4, device=sim.device), torch.float16
    with torch.autocast("sim", dtype=dtype):
        product = x @ x
        for each in (product, product.relu(), nn.functional.linear(x, x)):
            assert each.dtype == dtype
        assert nn.functional.conv1d(x[None], x[:, :, None]).dtype == dtype
        for function in (torch.exp, torch.sum, lambda t: t.softmax(-1), lambda t: t.pow(2)):
            assert function(product).dtype == torch.float32
        assert nn.functional.layer_norm(product, (4,)).dtype == torch.float32
        assert torch.sum(product, dtype=dtype).dtype == dtype
        assert torch.dot(product[0], x[0]).dtype == torch.float32
        assert (x.double() @ x.double()).dtype == torch.float64
        with torch.autocast("sim", enabled=False):
            assert (x @ x).dtype == torch.float32
    assert (x @ x).dtype == torch.float32


def test_a_weight_used_twice_is_cast_once_and_forgotten_after(sim):
    layer = nn.Linear(64, 64, bias=False).to(sim.device)
    x = torch.randn(1, 64, device=sim.device, dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("sim", dtype=torch.bfloat16):
        before_bytes = sim.allocated_bytes
        layer(layer(x))
        assert sim.allocated_bytes == before_bytes + 64 * 64 * 2
    assert sim.allocated_bytes == before_bytes


def test_gradients_arrive_in_the_type_of_the_weights(sim):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(sim.device)
    with torch.autocast("sim", dtype=torch.bfloat16):
        logits = model(torch.randn(3, 4, device=sim.device))
        target = torch.zeros(3, dtype=torch.long, device=sim.device)
        loss = nn.functional.cross_entropy(logits, target)
    loss.backward()
    assert loss.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_grad_scaler_scales_skips_and_backs_off(sim):
    weight = nn.Parameter(torch.ones(2, device=sim.device))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("sim", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    assert weight.grad.tolist() == [4, 4]
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0, 0]
    weight.grad = torch.tensor([float("inf"), 1.0], device=sim.device)
    scaler.scale(weight.sum())
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0, 0]
    assert scaler.get_scale() == 2.0
