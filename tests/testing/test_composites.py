import copy

import pytest
import torch
from torch import nn


def compare_training(sim, module, *inputs):
    """One forward and backward on both devices from the same weights."""
    twin = copy.deepcopy(module).to(sim.device)
    expected = module(*inputs)
    actual = twin(*[tensor.to(sim.device) for tensor in inputs])
    for result in (expected, actual):
        first(result).sum().backward()
    torch.testing.assert_close(first(actual).cpu(), first(expected))
    for mine, theirs in zip(twin.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-4)


def first(result):
    return result if isinstance(result, torch.Tensor) else result[0]


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"bidirectional": True}])
def test_recurrent_layers_train_as_on_the_cpu(sim, cell, options):
    torch.manual_seed(0)
    compare_training(sim, cell(3, 5, num_layers=2, **options), torch.randn(4, 2, 3))


def test_the_cell_state_of_an_lstm_carries_gradients_too(sim):
    torch.manual_seed(0)
    lstm, x = nn.LSTM(3, 5), torch.randn(4, 2, 3)
    twin = copy.deepcopy(lstm).to(sim.device)
    lstm(x)[1][1].sum().backward()
    twin(x.to(sim.device))[1][1].sum().backward()
    for mine, theirs in zip(twin.parameters(), lstm.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def test_packed_sequences_keep_their_lengths_on_the_host(sim):
    lstm = nn.LSTM(3, 5).to(sim.device)
    x = torch.randn(4, 2, 3, device=sim.device)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2]))
    assert packed.batch_sizes.device.type == "cpu"
    output, lengths = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0])
    output.sum().backward()
    assert output.shape == (4, 2, 5)
    assert lengths.tolist() == [4, 2]


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv1d(3, 4, 2), (2, 3, 5)),
        (nn.Conv2d(4, 4, 3, padding=1, stride=2, groups=2), (2, 4, 6, 6)),
        (nn.Conv2d(3, 4, 3, dilation=2, bias=False), (2, 3, 8, 8)),
        (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
        (nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), (2, 3, 5, 5)),
        (nn.BatchNorm2d(3), (4, 3, 5, 5)),
        (nn.LayerNorm([3, 5]), (2, 3, 5)),
        (nn.GroupNorm(2, 4), (2, 4, 5)),
        (nn.InstanceNorm2d(3, affine=True), (2, 3, 5, 5)),
        (nn.RMSNorm(6), (2, 6)),
    ],
)
def test_convolutions_and_normalisations_train_as_on_the_cpu(sim, module, shape):
    torch.manual_seed(0)
    compare_training(sim, module, torch.randn(shape))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_losses_warn_of_nothing_and_train_as_on_the_cpu(sim, reduction):
    for loss in (nn.MSELoss, nn.SmoothL1Loss, nn.L1Loss, nn.HuberLoss):
        x = torch.randn(3, 4, requires_grad=True)
        twin = x.detach().to(sim.device).requires_grad_()
        measure = loss(reduction=reduction)
        measure(x, torch.zeros(3, 4)).sum().backward()
        measure(twin, torch.zeros(3, 4, device=sim.device)).sum().backward()
        torch.testing.assert_close(twin.grad.cpu(), x.grad)


def test_batch_norm_updates_its_running_statistics(sim):
    torch.manual_seed(0)
    norm, x = nn.BatchNorm1d(3), torch.randn(8, 3)
    twin = copy.deepcopy(norm).to(sim.device)
    norm(x), twin(x.to(sim.device))
    torch.testing.assert_close(twin.running_var.cpu(), norm.running_var)
    assert twin.num_batches_tracked.item() == 1


@pytest.mark.parametrize("causal", [False, True])
def test_attention_trains_as_on_the_cpu(sim, causal):
    torch.manual_seed(0)
    host = [torch.randn(2, 2, 5, 8, requires_grad=True) for _ in range(3)]
    device = [t.detach().to(sim.device).requires_grad_() for t in host]
    attend = nn.functional.scaled_dot_product_attention
    expected, actual = attend(*host, is_causal=causal), attend(*device, is_causal=causal)
    torch.testing.assert_close(actual.cpu(), expected)
    expected.sum().backward()
    actual.sum().backward()
    for mine, theirs in zip(device, host, strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def test_a_transformer_layer_trains_and_takes_its_fast_path(sim):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    compare_training(sim, layer, torch.randn(2, 3, 8))
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = layer.eval()(x)
        actual = copy.deepcopy(layer).to(sim.device)(x.to(sim.device))
    torch.testing.assert_close(actual.cpu(), expected)


def test_an_embedding_trains_as_on_the_cpu(sim):
    torch.manual_seed(0)
    compare_training(sim, nn.Embedding(5, 3), torch.tensor([1, 1, 4]))
    compare_training(sim, nn.EmbeddingBag(5, 3), torch.tensor([[1, 1], [4, 0]]))


def test_an_encoder_in_evaluation_takes_a_padding_mask_without_nested_tensors(sim):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, mask = torch.randn(2, 3, 4), torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=mask)
        twin = copy.deepcopy(encoder).to(sim.device)
        actual = twin(x.to(sim.device), src_key_padding_mask=mask.to(sim.device))
    torch.testing.assert_close(actual.cpu(), expected)
