"""Operations as networks, losses and optimizers call them, at sizes that are made smaller."""

import torch
import torch.nn.functional as F
from torch import nn


def _x(*shape, dtype=torch.float32, like=None):
    made = torch.randn(*shape).to(dtype)
    if like == "channels_last":
        made = made.to(memory_format=torch.channels_last)
    elif like == "transposed":
        made = made.transpose(-1, -2)
    return made.requires_grad_()


def _ids(n, *shape):
    return torch.randint(0, n, shape)


def layers(dtype=torch.float32):
    """By name, a call of one layer; each gives a tensor to go backward from."""
    x = lambda *shape, **options: _x(*shape, dtype=dtype, **options)  # noqa: E731
    image, last = (16, 48, 40, 40), {"like": "channels_last"}
    return {
        "batch_norm": lambda: (
            F.batch_norm(x(*image), torch.zeros(48), torch.ones(48), x(48), x(48), True)
            if dtype == torch.float32
            else F.batch_norm(x(*image), None, None, x(48), x(48), True)
        ),
        "batch_norm_channels_last": lambda: F.batch_norm(
            x(*image, **last), None, None, x(48), x(48), True
        ),
        "batch_norm_1d": lambda: F.batch_norm(x(512, 300), None, None, x(300), x(300), True),
        "batch_norm_eval": lambda: F.batch_norm(
            x(*image),
            torch.zeros(48, dtype=dtype),
            torch.ones(48, dtype=dtype),
            x(48),
            x(48),
            False,
        ),
        "group_norm": lambda: F.group_norm(x(*image), 8, x(48), x(48)),
        "group_norm_channels_last": lambda: F.group_norm(x(*image, **last), 8, x(48), x(48)),
        "group_norm_strided_weight": lambda: F.group_norm(
            x(2, 9600, 4), 8, x(9600, 2)[:, 0], x(9600)
        ),
        "layer_norm": lambda: F.layer_norm(x(16, 200, 320), (320,), x(320), x(320)),
        "rms_norm": lambda: F.rms_norm(x(16, 200, 320), (320,), x(320)),
        "instance_norm": lambda: F.instance_norm(x(*image)),
        "max_pool": lambda: F.max_pool2d(x(*image), 2),
        "max_pool_channels_last": lambda: F.max_pool2d(x(*image, **last), 3, 2, 1),
        "avg_pool": lambda: F.avg_pool2d(x(*image), 2),
        "avg_pool_channels_last": lambda: F.avg_pool2d(x(*image, **last), 2),
        "adaptive_avg_pool": lambda: F.adaptive_avg_pool2d(x(*image), 1),
        "adaptive_avg_pool_7": lambda: F.adaptive_avg_pool2d(x(*image), 7),
        "upsample_nearest": lambda: F.interpolate(x(*image), scale_factor=2),
        "upsample_bilinear": lambda: F.interpolate(x(*image), scale_factor=2, mode="bilinear"),
        "upsample_bicubic": lambda: F.interpolate(x(*image), size=(90, 90), mode="bicubic"),
        "upsample_channels_last": lambda: F.interpolate(
            x(*image, **last), scale_factor=2, mode="bilinear"
        ),
        "upsample_linear": lambda: F.interpolate(x(16, 48, 400), scale_factor=2, mode="linear"),
        "pixel_shuffle": lambda: F.pixel_shuffle(x(*image), 2),
        "pad_reflect": lambda: F.pad(x(*image), (3, 3, 3, 3), mode="reflect"),
        "pad_replicate": lambda: F.pad(x(*image), (1, 2, 3, 4), mode="replicate"),
        "pad_constant": lambda: F.pad(x(*image), (1, 2, 3, 4)),
        "grid_sample": lambda: F.grid_sample(
            x(*image), torch.zeros(16, 30, 30, 2, dtype=dtype), align_corners=False
        ),
        "unfold": lambda: F.unfold(x(8, 16, 40, 40), 3, padding=1),
        "linear": lambda: F.linear(x(16, 200, 320), x(640, 320), x(640)),
        "linear_2d": lambda: F.linear(x(3000, 320), x(640, 320), x(640)),
        "matmul_heads": lambda: (
            x(16, 200, 8, 40).transpose(1, 2) @ x(16, 200, 8, 40).permute(0, 2, 3, 1)
        ),
        "matmul_transposed": lambda: x(300, 500, like="transposed") @ x(300, 400),
        "einsum": lambda: torch.einsum("bshd,bthd->bhst", x(8, 130, 4, 64), x(8, 130, 4, 64)),
        "softmax": lambda: F.softmax(x(16, 8, 200, 200), -1),
        "softmax_transposed": lambda: F.softmax(x(16, 8, 200, 210, like="transposed"), -1),
        "log_softmax": lambda: F.log_softmax(x(500, 3000), -1),
        "attention": lambda: F.scaled_dot_product_attention(*(x(4, 8, 300, 64) for _ in range(3))),
        "attention_causal": lambda: F.scaled_dot_product_attention(
            *(x(4, 8, 300, 64) for _ in range(3)), is_causal=True
        ),
        "attention_of_heads": lambda: F.scaled_dot_product_attention(
            *(x(4, 300, 8, 64).transpose(1, 2) for _ in range(3)), dropout_p=0.1
        ),
        "attention_masked": lambda: F.scaled_dot_product_attention(
            *(x(4, 8, 300, 64) for _ in range(3)), attn_mask=torch.zeros(300, 300, dtype=dtype)
        ),
        "embedding": lambda: F.embedding(_ids(3000, 16, 200), x(3000, 100)),
        "embedding_bag": lambda: F.embedding_bag(_ids(3000, 300, 20), x(3000, 100), mode="mean"),
        "embedding_bag_sum": lambda: F.embedding_bag(_ids(3000, 300, 20), x(3000, 100), mode="sum"),
        "embedding_bag_offsets": lambda: F.embedding_bag(
            _ids(3000, 3000), x(3000, 100), torch.arange(0, 3001, 10), include_last_offset=True
        ),
        "embedding_bag_32_bits": lambda: F.embedding_bag(_ids(3000, 300, 20).int(), x(3000, 100)),
        "fold": lambda: F.fold(x(8, 144, 400), (20, 20), 3, padding=1),
        "embedding_bag_max": lambda: F.embedding_bag(_ids(3000, 300, 20), x(3000, 100), mode="max"),
        "dropout": lambda: F.dropout(x(*image), 0.1),
        "gelu": lambda: F.gelu(x(*image)),
        "glu": lambda: F.glu(x(16, 200, 320)),
        "prelu": lambda: F.prelu(x(*image), x(48)),
        "rrelu": lambda: F.rrelu(x(*image), training=True),
        "logsigmoid": lambda: F.logsigmoid(x(*image)),
        "hardswish": lambda: F.hardswish(x(*image)),
        "rotary": lambda: torch.cat([-x(8, 200, 64)[..., 32:], x(8, 200, 64)[..., :32]], -1) * 2.0,
        "roll": lambda: torch.roll(x(16, 56, 56, 48), (-3, -3), (1, 2)),
        "cumsum": lambda: x(200, 3000).cumsum(-1),
        "sort": lambda: x(200, 3000).sort(-1).values,
        "sort_columns": lambda: x(300, 2000).sort(0).values,
        "topk": lambda: x(200, 3000).topk(20, -1).values,
        "norm": lambda: x(200, 3000).norm(dim=-1),
        "normalize": lambda: F.normalize(x(200, 3000), dim=-1),
        "var": lambda: x(200, 3000).var(-1),
        "mean": lambda: x(*image).mean((2, 3)),
        "logsumexp": lambda: x(200, 3000).logsumexp(-1),
        "gather": lambda: x(300, 400).gather(1, _ids(400, 300, 100)),
        "scatter_add": lambda: torch.zeros(300, 400, dtype=dtype).scatter_add(
            1, _ids(400, 300, 300), x(300, 300)
        ),
        "index_add": lambda: torch.zeros(300, 400, dtype=dtype).index_add(
            0, _ids(300, 2000), x(2000, 400)
        ),
        "index": lambda: x(3000, 100)[_ids(3000, 2000)],
        "index_put": lambda: torch.zeros(3000, 100, dtype=dtype).index_put(
            (_ids(3000, 2000),), x(2000, 100), accumulate=True
        ),
        "repeat": lambda: x(16, 1, 3000).repeat(1, 20, 1),
        "repeat_interleave": lambda: x(16, 100, 300).repeat_interleave(4, 1),
        "stack": lambda: torch.stack([x(200, 300) for _ in range(5)]),
        "triu": lambda: x(8, 300, 300).triu(),
        "where": lambda: torch.where(torch.ones(200, 3000, dtype=torch.bool), x(200, 3000), 0.0),
        "masked_fill": lambda: x(200, 3000).masked_fill(torch.ones(200, 3000, dtype=torch.bool), 0),
        "mask_product": lambda: x(200, 3000) * torch.ones(200, 3000, dtype=torch.bool),
        "mask_sum": lambda: torch.ones(200, 3000, dtype=torch.bool).sum(-1) + x(200),
        "mixed_sum": lambda: x(200, 3000) + torch.randn(200, 3000, dtype=torch.float64),
        "cdist": lambda: torch.cdist(x(8, 200, 40), x(8, 300, 40)),
        "inverse": lambda: torch.linalg.inv(torch.eye(300) + 0 * x(300, 300).float()),
        "fft": lambda: torch.fft.rfft(x(200, 3000).float()).abs(),
    }


def losses(dtype=torch.float32):
    """By name, a call of one loss."""
    x = lambda *shape: _x(*shape, dtype=dtype)  # noqa: E731
    image = (16, 3, 120, 120)

    def other():
        return torch.rand(*image).to(dtype)

    def chance():
        return torch.sigmoid(x(*image))

    return {
        "mse": lambda: F.mse_loss(x(*image), other()),
        "mse_sum": lambda: F.mse_loss(x(*image), other(), reduction="sum"),
        "mse_none": lambda: F.mse_loss(x(*image), other(), reduction="none").sum(),
        "l1": lambda: F.l1_loss(x(*image), other()),
        "smooth_l1": lambda: F.smooth_l1_loss(x(*image), other()),
        "huber": lambda: F.huber_loss(x(*image), other()),
        "bce": lambda: F.binary_cross_entropy(chance(), other()),
        "bce_logits": lambda: F.binary_cross_entropy_with_logits(x(*image), other()),
        "bce_weighted": lambda: F.binary_cross_entropy_with_logits(
            x(*image), other(), weight=other(), pos_weight=other()
        ),
        "cross_entropy": lambda: F.cross_entropy(x(2000, 1000), _ids(1000, 2000)),
        "cross_entropy_smooth": lambda: F.cross_entropy(
            x(2000, 1000), _ids(1000, 2000), label_smoothing=0.1
        ),
        "cross_entropy_weighted": lambda: F.cross_entropy(
            x(2000, 1000), _ids(1000, 2000), weight=torch.ones(1000, dtype=dtype)
        ),
        "cross_entropy_pixels": lambda: F.cross_entropy(x(8, 20, 100, 100), _ids(20, 8, 100, 100)),
        "kl": lambda: F.kl_div(
            x(500, 3000), torch.rand(500, 3000).to(dtype), reduction="batchmean"
        ),
        "soft_margin": lambda: F.soft_margin_loss(x(*image), other()),
        "cosine": lambda: F.cosine_similarity(x(500, 300), x(500, 300)).mean(),
        "triplet": lambda: F.triplet_margin_loss(x(500, 300), x(500, 300), x(500, 300)),
        "multi_margin": lambda: F.multi_margin_loss(x(500, 300), _ids(300, 500)),
        "poisson": lambda: F.poisson_nll_loss(x(500, 300), torch.rand(500, 300).to(dtype)),
    }


def sequences(dtype=torch.float32):
    """By name, a call of what goes along a sequence, or compares two."""
    x = lambda *shape, **options: _x(*shape, dtype=dtype, **options)  # noqa: E731

    def lstm(inputs, hidden, steps=32, samples=16, **options):
        layer = nn.LSTM(inputs, hidden, **options).to(dtype)
        return lambda: layer(x(steps, samples, inputs))[0]

    def lstm_without_gradients():
        with torch.no_grad():
            return lstm(256, 256)()

    def ctc(packed=False):
        lengths = torch.randint(5, 30, (16,))
        targets = torch.randint(1, 80, (16, 30))
        if packed:
            targets = torch.cat([row[:n] for row, n in zip(targets, lengths, strict=True)])
        inputs = F.log_softmax(torch.randn(200, 16, 80).requires_grad_(), -1)
        return F.ctc_loss(inputs, targets, torch.full((16,), 200), lengths)

    cases = {
        "lstm": lstm(256, 256),
        "lstm_wide": lstm(512, 128),
        "lstm_narrow": lstm(40, 300, bias=False),
        "lstm_one": lstm(128, 128, 1, 1),
        "lstm_layers": lstm(128, 256, num_layers=2, bidirectional=True),
        "lstm_no_gradients": lstm_without_gradients,
        "ctc": ctc,
        "ctc_packed": lambda: ctc(packed=True),
        "gru": lambda: nn.GRU(64, 128).to(dtype)(x(20, 8, 64))[0],
        "cdist": lambda: torch.cdist(x(4, 300, 40), x(4, 200, 40)),
        "windows": lambda: x(16, 400, 20).unfold(1, 50, 25).sum(),
        "repeats": lambda: torch.repeat_interleave(x(500, 30), torch.randint(1, 5, (500,)), 0),
    }
    if dtype is torch.float32:
        cases["spectrum"] = lambda: torch.fft.irfft(torch.fft.rfft(x(300, 1000)))
        cases["spectrum_2d"] = lambda: torch.fft.irfft2(torch.fft.rfft2(x(8, 200, 240)))
        cases["cholesky"] = lambda: torch.linalg.cholesky(
            x(4, 100, 100) @ x(4, 100, 100).mT * 0 + torch.eye(100)
        )
        cases["solve"] = lambda: torch.linalg.solve(torch.eye(200) + 0 * x(200, 200), x(200, 50))
    return cases


def convolutions(dtype=torch.float32):
    """By name, a call of one convolution."""
    x = lambda *shape, **options: _x(*shape, dtype=dtype, **options)  # noqa: E731
    last = {"like": "channels_last"}
    return {
        "stem": lambda: F.conv2d(x(8, 3, 128, 128), x(64, 3, 7, 7), None, 2, 3),
        "3x3": lambda: F.conv2d(x(8, 64, 56, 56), x(64, 64, 3, 3), x(64), 1, 1),
        "3x3_channels_last": lambda: F.conv2d(
            x(8, 64, 56, 56, **last), x(64, 64, 3, 3), x(64), 1, 1
        ),
        "3x3_one": lambda: F.conv2d(x(1, 64, 56, 56), x(64, 64, 3, 3), x(64), 1, 1),
        "1x1_few": lambda: F.conv2d(x(8, 64, 28, 28), x(256, 64, 1, 1)),
        "1x1": lambda: F.conv2d(x(20, 64, 28, 28), x(256, 64, 1, 1)),
        "strided": lambda: F.conv2d(x(8, 64, 57, 57), x(128, 64, 3, 3), x(128), 2, 1),
        "wide": lambda: F.conv2d(x(6, 512, 7, 7), x(512, 512, 3, 3), None, 1, 1),
        "depthwise": lambda: F.conv2d(x(8, 96, 56, 56), x(96, 1, 3, 3), None, 1, 1, 1, 96),
        "grouped": lambda: F.conv2d(x(8, 64, 28, 28), x(64, 16, 3, 3), None, 1, 1, 1, 4),
        "dilated": lambda: F.conv2d(x(8, 32, 40, 40), x(32, 32, 3, 3), None, 1, 2, 2),
        "transposed": lambda: F.conv_transpose2d(x(8, 64, 28, 28), x(64, 32, 2, 2), x(32), 2),
        "1d": lambda: F.conv1d(x(8, 80, 1000), x(128, 80, 3), x(128), 1, 1),
        "3d": lambda: F.conv3d(x(4, 16, 12, 24, 24), x(16, 16, 3, 3, 3), None, 1, 1),
        "transposed_3d": lambda: F.conv_transpose3d(
            x(4, 16, 8, 12, 12), x(16, 8, 2, 2, 2), None, 2
        ),
        "small": lambda: F.conv2d(x(2, 1, 12, 12), x(4, 1, 3, 3)),
        "patches": lambda: F.conv2d(x(8, 3, 96, 96), x(192, 3, 16, 16), x(192), 16),
    }


def optimizers():
    """By name, the first step of an optimizer on parameters that it has gradients of."""

    def first_step(cls, **options):
        def run():
            parameters = [nn.Parameter(torch.randn(300, 400)), nn.Parameter(torch.randn(500))]
            for each in parameters:
                each.grad = torch.randn_like(each)
            cls(
                [p for p in parameters if p.dim() == 2 or cls is not torch.optim.Muon], **options
            ).step()

        return run

    names = (
        "SGD",
        "Adam",
        "AdamW",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "NAdam",
        "RAdam",
        "Rprop",
        "ASGD",
        "Adafactor",
        "Muon",
    )
    made = {name: first_step(getattr(torch.optim, name)) for name in names}
    made["SGD_momentum"] = first_step(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    made["Adam_fused"] = first_step(torch.optim.Adam, fused=True)
    made["AdamW_foreach"] = first_step(torch.optim.AdamW, foreach=True)

    def clip():
        parameters = [nn.Parameter(torch.randn(300, 400)) for _ in range(3)]
        for each in parameters:
            each.grad = torch.randn_like(each)
        nn.utils.clip_grad_norm_(parameters, 1.0)

    return {**made, "clip": clip}
