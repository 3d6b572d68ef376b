"""Operations as networks, losses and optimizers call them, at sizes that are made smaller."""

import torch
import torch.nn.functional as F
from torch import nn


def _x(*shape, dtype=torch.float32, like=None):
    made = torch.randn(*shape).to(dtype)
    if like == "channels_last":
        made = made.to(memory_format=torch.channels_last)
    return made.requires_grad_()


def _ids(n, *shape):
    return torch.randint(0, n, shape)


def layers(dtype=torch.float32):
    """By name, a call of a layer, a loss or a convolution, to go backward from."""
    x = lambda *shape, **options: _x(*shape, dtype=dtype, **options)  # noqa: E731
    image, last = (16, 48, 40, 40), {"like": "channels_last"}
    running = torch.zeros(48, dtype=dtype), torch.ones(48, dtype=dtype)
    picture = (16, 3, 120, 120)

    def target():
        return torch.rand(*picture).to(dtype)

    return {
        "batch_norm": lambda: F.batch_norm(x(*image), *running, x(48), x(48), True),
        "batch_norm_channels_last": lambda: F.batch_norm(
            x(*image, **last), None, None, x(48), x(48), True
        ),
        "group_norm": lambda: F.group_norm(x(*image), 8, x(48), x(48)),
        "layer_norm": lambda: F.layer_norm(x(16, 200, 320), (320,), x(320), x(320)),
        "max_pool": lambda: F.max_pool2d(x(*image), 2),
        "upsample_bilinear": lambda: F.interpolate(x(*image), scale_factor=2, mode="bilinear"),
        "pad_reflect": lambda: F.pad(x(*image), (3, 3, 3, 3), mode="reflect"),
        "grid_sample": lambda: F.grid_sample(
            x(*image), torch.zeros(16, 30, 30, 2, dtype=dtype), align_corners=False
        ),
        "linear": lambda: F.linear(x(16, 200, 320), x(640, 320), x(640)),
        "softmax": lambda: F.softmax(x(16, 8, 200, 200), -1),
        "attention": lambda: F.scaled_dot_product_attention(*(x(4, 8, 300, 64) for _ in range(3))),
        "attention_of_heads": lambda: F.scaled_dot_product_attention(
            *(x(4, 300, 8, 64).transpose(1, 2) for _ in range(3)), dropout_p=0.1
        ),
        "embedding": lambda: F.embedding(_ids(3000, 16, 200), x(3000, 100)),
        "embedding_bag": lambda: F.embedding_bag(_ids(3000, 300, 20), x(3000, 100), mode="mean"),
        "dropout": lambda: F.dropout(x(*image), 0.1),
        "logsigmoid": lambda: F.logsigmoid(x(*image)),
        "cumsum": lambda: x(200, 3000).cumsum(-1),
        "sort": lambda: x(200, 3000).sort(-1).values,
        "scatter_add": lambda: torch.zeros(300, 400, dtype=dtype).scatter_add(
            1, _ids(400, 300, 300), x(300, 300)
        ),
        "index": lambda: x(3000, 100)[_ids(3000, 2000)],
        "index_put": lambda: torch.zeros(3000, 100, dtype=dtype).index_put(
            (_ids(3000, 2000),), x(2000, 100), accumulate=True
        ),
        "mask_product": lambda: x(200, 3000) * torch.ones(200, 3000, dtype=torch.bool),
        "cdist": lambda: torch.cdist(x(8, 200, 40), x(8, 300, 40)),
        "mse": lambda: F.mse_loss(x(*picture), target()),
        "bce_logits": lambda: F.binary_cross_entropy_with_logits(x(*picture), target()),
        "cross_entropy": lambda: F.cross_entropy(x(2000, 1000), _ids(1000, 2000)),
        "cross_entropy_weighted": lambda: F.cross_entropy(
            x(2000, 1000), _ids(1000, 2000), weight=torch.ones(1000, dtype=dtype)
        ),
        "kl": lambda: F.kl_div(
            x(500, 3000), torch.rand(500, 3000).to(dtype), reduction="batchmean"
        ),
        "stem": lambda: F.conv2d(x(8, 3, 128, 128), x(64, 3, 7, 7), None, 2, 3),
        "3x3": lambda: F.conv2d(x(8, 64, 56, 56), x(64, 64, 3, 3), x(64), 1, 1),
        "3x3_channels_last": lambda: F.conv2d(
            x(8, 64, 56, 56, **last), x(64, 64, 3, 3), x(64), 1, 1
        ),
        "1x1": lambda: F.conv2d(x(20, 64, 28, 28), x(256, 64, 1, 1)),
        "depthwise": lambda: F.conv2d(x(8, 96, 56, 56), x(96, 1, 3, 3), None, 1, 1, 1, 96),
        "transposed": lambda: F.conv_transpose2d(x(8, 64, 28, 28), x(64, 32, 2, 2), x(32), 2),
        "3d": lambda: F.conv3d(x(4, 16, 12, 24, 24), x(16, 16, 3, 3, 3), None, 1, 1),
    }


def sequences():
    """By name, a call of what goes along a sequence, or solves equations."""

    def lstm(inputs, hidden, steps=32, samples=16, **options):
        layer = nn.LSTM(inputs, hidden, **options)
        return lambda: layer(_x(steps, samples, inputs))[0]

    def ctc():
        lengths = torch.randint(5, 30, (16,))
        targets = torch.randint(1, 80, (16, 30))
        inputs = F.log_softmax(torch.randn(200, 16, 80).requires_grad_(), -1)
        return F.ctc_loss(inputs, targets, torch.full((16,), 200), lengths)

    return {
        "lstm": lstm(256, 256),
        "lstm_layers": lstm(128, 256, num_layers=2, bidirectional=True),
        "ctc": ctc,
        "spectrum": lambda: torch.fft.irfft(torch.fft.rfft(_x(300, 1000))),
        "cholesky": lambda: torch.linalg.cholesky(
            _x(4, 100, 100) @ _x(4, 100, 100).mT * 0 + torch.eye(100)
        ),
        "solve": lambda: torch.linalg.solve(torch.eye(200) + 0 * _x(200, 200), _x(200, 50)),
    }


def _with_gradients(*shapes):
    made = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for each in made:
        each.grad = torch.randn_like(each)
    return made


def optimizers():
    """By name, the first step of an optimizer on parameters that it has gradients of."""

    def first_step(cls, *shapes, **options):
        return lambda: cls(_with_gradients(*shapes), **options).step()

    matrix, vector = (300, 400), (500,)
    names = ("SGD", "Adam", "RMSprop", "NAdam", "Adafactor")
    return {
        **{name: first_step(getattr(torch.optim, name), matrix, vector) for name in names},
        "Muon": first_step(torch.optim.Muon, matrix),
        "Adam_fused": first_step(torch.optim.Adam, matrix, vector, fused=True),
        "AdamW_foreach": first_step(torch.optim.AdamW, matrix, vector, foreach=True),
        "clip": lambda: nn.utils.clip_grad_norm_(_with_gradients(matrix, matrix, matrix), 1.0),
    }
