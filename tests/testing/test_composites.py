"""Layers of many operators train as on the CPU; `tests/sweeps` has each operator alone."""

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
        sum(each.sum() for each in tensors_of(result)).backward()
    for mine, theirs in zip(tensors_of(actual), tensors_of(expected), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs)
    for mine, theirs in zip(twin.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dict(twin.cpu().named_buffers()), dict(module.named_buffers()))


def tensors_of(result):
    return torch.utils._pytree.tree_leaves(result)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.LSTM(3, 5, num_layers=2, bidirectional=True), (4, 2, 3)),
        (nn.GRU(3, 5, bias=False), (4, 2, 3)),
        (nn.RNN(3, 5), (4, 2, 3)),
        (nn.Conv1d(3, 4, 2), (2, 3, 5)),
        (nn.Conv2d(4, 4, 3, padding=1, stride=2, groups=2), (2, 4, 6, 6)),
        (nn.Conv2d(3, 4, 3, dilation=2, bias=False), (2, 3, 8, 8)),
        (nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), (2, 3, 5, 5)),
        (nn.BatchNorm2d(3), (4, 3, 5, 5)),
        (nn.LayerNorm([3, 5]), (2, 3, 5)),
        (nn.GroupNorm(2, 4), (2, 4, 5)),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 3, 8)),
    ],
)
def test_layers_train_as_on_the_cpu(sim, module, shape):
    torch.manual_seed(0)
    compare_training(sim, module, torch.randn(shape))


def test_embeddings_train_as_on_the_cpu(sim):
    torch.manual_seed(0)
    compare_training(sim, nn.Embedding(5, 3), torch.tensor([1, 1, 4]))
    compare_training(sim, nn.EmbeddingBag(5, 3), torch.tensor([[1, 1], [4, 0]]))


def test_packed_sequences_keep_their_lengths_on_the_host(sim):
    lstm = nn.LSTM(3, 5).to(sim.device)
    x = torch.randn(4, 2, 3, device=sim.device)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2]))
    assert packed.batch_sizes.device.type == "cpu"
    output, lengths = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0])
    output.sum().backward()
    assert output.shape == (4, 2, 5)
    assert lengths.tolist() == [4, 2]


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


def test_an_encoder_in_evaluation_takes_its_fast_path_with_a_padding_mask(sim):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, mask = torch.randn(2, 3, 4), torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=mask)
        twin = copy.deepcopy(encoder).to(sim.device)
        actual = twin(x.to(sim.device), src_key_padding_mask=mask.to(sim.device))
    torch.testing.assert_close(actual.cpu(), expected)
