"""Predicted peaks of training steps against `max_memory_allocated`, within 5 %."""

import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import PredictionError, predict_peak
from tests.paging.models import Residual

from .rig import Rig, check, transformers

_WITHIN = 0.05


def _compared(rig: Rig, model, loss_of, *batch):
    """Predict a step, then run two of them."""
    model = model.to(rig.device)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = [each.to(rig.device) for each in batch]
    rig.tidy()
    report, error = None, None
    try:
        report = predict_peak(lambda *batch: loss_of(model, *batch), *batch, optimizer=optimizer)
    except PredictionError as raised:
        error = str(raised)
    rig.tidy()
    begun, peaks = rig.allocated(), []
    for _ in range(2):
        rig.reset_peak()
        loss_of(model, *batch).backward()
        peaks.append(rig.peak())
        optimizer.step()
        peaks.append(rig.peak())
        optimizer.zero_grad()
    passes, first, _, later = peaks
    reserved = int(rig.module.max_memory_reserved(rig.device))
    assert report is not None, f"{first} bytes in the first step, {later} later: {error}"
    predicted = report.allocated_bytes
    # only the unrounded figure is told of later steps
    predicted_later = max(report.later_peak_bytes or 0, report.peak_bytes)
    ratio, later_ratio = predicted / first, predicted_later / max(first, later)
    figures = {
        "predicted_over_real": ratio, "later_over_real": later_ratio,
        "predicted_bytes": predicted, "real_bytes": first, "forward_backward_bytes": passes,
        "later_real_bytes": later, "allowance_bytes": report.allowance_bytes,
        "reserved_bytes": reserved, "needed_bytes": report.needed_bytes,
        "at_rest_bytes": begun, "left_over_bytes": rig.allocated() - begun,
    }  # fmt: skip
    assert abs(ratio - 1) < _WITHIN, figures
    # of a small model, what blocks are rounded up to is more than that
    assert rig.sim or abs(later_ratio - 1) < _WITHIN, figures
    assert max(first, later) <= report.needed_bytes, figures
    return figures


@check(limit_s=90)
def predict_gpt2(rig):
    library = transformers()
    small = rig.pick({}, {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 500})
    config = library.GPT2Config(**small)
    tokens = torch.randint(config.vocab_size, rig.pick((8, 512), (2, 64)))
    model = library.GPT2LMHeadModel(config).train()
    return _compared(rig, model, lambda model, x: model(x, labels=x).loss, tokens)


@check(limit_s=90)
def predict_bert(rig):
    library = transformers()
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2}
    small = rig.pick({}, sizes | {"intermediate_size": 128, "vocab_size": 500})
    config = library.BertConfig(**small)
    tokens = torch.randint(config.vocab_size, rig.pick((32, 256), (2, 64)))
    model = library.BertForMaskedLM(config).train()
    return _compared(rig, model, lambda model, x: model(x, labels=x).loss, tokens)


@check(limit_s=90)
def predict_convolutions(rig):
    width = rig.pick(128, 8)
    model = nn.Sequential(
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *[Residual(width) for _ in range(rig.pick(6, 1))],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 1000),
    )
    images = torch.randn(*rig.pick((48, 3, 224, 224), (2, 3, 32, 32)))
    labels = torch.randint(1000, (len(images),))
    return _compared(rig, model, lambda model, x, y: F.cross_entropy(model(x), y), images, labels)


class _Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, 2 * width, 2, batch_first=True)
        self.head = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


@check(limit_s=90)
def predict_lstm(rig):
    width = rig.pick(512, 16)
    x = torch.randn(*rig.pick((256, 256), (2, 3)), width)
    return _compared(rig, _Recurrent(width), lambda model, x: model(x).square().mean(), x)


@check(limit_s=90)
def predict_mlp(rig):
    width = rig.pick(4096, 64)
    layers = [each for _ in range(rig.pick(4, 2)) for each in (nn.Linear(width, width), nn.GELU())]
    x = torch.randn(rig.pick(16384, 64), width)
    return _compared(rig, nn.Sequential(*layers), lambda model, x: model(x).square().mean(), x)


class _Attention(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, self.n_heads, -1))
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


@check(limit_s=90)
def predict_attention(rig):
    width = rig.pick(1024, 32)
    model = nn.Sequential(*[_Attention(width, rig.pick(16, 2)) for _ in range(rig.pick(4, 1))])
    x = torch.randn(*rig.pick((16, 2048), (2, 16)), width).to(torch.bfloat16)
    model = model.to(torch.bfloat16)
    return _compared(rig, model, lambda model, x: model(x).float().square().mean(), x)
