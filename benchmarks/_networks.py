"""Networks written out here: layers that no zoo of models has alone, or hides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._training_steps import (
    Step,
    classes,
    images,
    mean_square,
    next_token,
    step_on,
    with_target,
)


def mlp(batch_size: int, width: int = 512, depth: int = 4) -> Step:
    """Linear layers and ReLU, cross entropy over ten classes."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return classes(model, torch.randn(batch_size, width))


def cnn(batch_size: int, norm: bool = True, side: int = 32) -> Step:
    """Convolutions with BatchNorm between them, then a linear layer."""
    layers: list[nn.Module] = []
    for n_in, n_out in ((3, 32), (32, 64), (64, 64), (64, 128)):
        layers.append(nn.Conv2d(n_in, n_out, 3, padding=1, bias=not norm))
        layers += [nn.BatchNorm2d(n_out)] if norm else []
        layers += [nn.ReLU()]
    head = [nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128 * 16, 10)]
    return classes(nn.Sequential(*layers, *head), torch.randn(batch_size, 3, side, side))


def depthwise(batch_size: int) -> Step:
    """Depthwise, grouped, dilated and strided convolutions."""
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, 2, 1),
        nn.Conv2d(64, 64, 3, 1, 1, groups=64),
        nn.SiLU(),
        nn.Conv2d(64, 128, 3, 1, 2, dilation=2, groups=4),
        nn.GroupNorm(8, 128),
        nn.Hardswish(),
        nn.Conv2d(128, 64, 1),
        nn.Conv2d(64, 10, 5, 4),
        nn.Flatten(),
        nn.LazyLinear(10),
    )
    x = torch.randn(batch_size, 3, 64, 64)
    model(x[:1])
    return classes(model, x)


def conv1d(batch_size: int) -> Step:
    """Dilated convolutions over a sequence, as in WaveNet."""
    layers: list[nn.Module] = [nn.Conv1d(1, 64, 1)]
    for i in range(5):
        layers += [nn.Conv1d(64, 64, 3, padding=2**i, dilation=2**i), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Conv1d(64, 1, 1))
    return step_on(model, mean_square, torch.randn(batch_size, 1, 1024))


def conv3d(batch_size: int) -> Step:
    """Convolutions over a volume."""
    model = nn.Sequential(
        nn.Conv3d(1, 16, 3, padding=1),
        nn.BatchNorm3d(16),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose3d(32, 1, 2, 2),
    )
    return step_on(model, mean_square, torch.randn(batch_size, 1, 16, 32, 32))


class _Double(nn.Sequential):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(
            nn.Conv2d(n_in, n_out, 3, padding=1),
            nn.BatchNorm2d(n_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(n_out, n_out, 3, padding=1),
            nn.BatchNorm2d(n_out),
            nn.ReLU(inplace=True),
        )


class _UNet(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.first = _Double(3, widths[0])
        self.down = nn.ModuleList(_Double(n, 2 * n) for n in widths[:-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * n, n, 2, 2) for n in reversed(widths[:-1]))
        self.merge = nn.ModuleList(_Double(2 * n, n) for n in reversed(widths[:-1]))
        self.last = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skipped = []
        for block in self.down:
            skipped.append(x)
            x = block(F.max_pool2d(x, 2))
        for up, merge, skip in zip(self.up, self.merge, reversed(skipped), strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        logits: Tensor = self.last(x)
        return logits


def unet(batch_size: int) -> Step:
    """A U-Net with three levels, over 64 by 64 pixels."""
    masks = torch.randint(2, (batch_size, 1, 64, 64)).float()
    return with_target(_UNet(), F.binary_cross_entropy_with_logits, images(batch_size), masks)


def upsampling_cnn(batch_size: int, how: str = "nearest") -> Step:
    """A generator: interpolation and convolution by turns."""
    layers: list[nn.Module] = []
    for n_in, n_out in ((64, 64), (64, 32), (32, 16)):
        layers += [nn.Upsample(scale_factor=2, mode=how), nn.Conv2d(n_in, n_out, 3, padding=1)]
        layers += [nn.LeakyReLU(0.2)]
    model = nn.Sequential(*layers, nn.Conv2d(16, 3, 1))
    return step_on(model, mean_square, torch.randn(batch_size, 64, 8, 8))


class _Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 2 * 32))
        self.decoder = nn.Sequential(nn.Linear(32, 400), nn.ReLU(), nn.Linear(400, 784))

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
        loss: Tensor = F.mse_loss(self.decoder(code).sigmoid(), x, reduction="sum") + divergence
        return loss


def vae(batch_size: int) -> Step:
    """A variational autoencoder; the model gives its loss."""
    model = _Vae()
    return Step(model, model, (torch.rand(batch_size, 784),))


def conv_vae(batch_size: int) -> Step:
    """A convolutional autoencoder with transposed convolutions."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 3, 4, 2, 1),
    )
    x = images(batch_size)
    return with_target(model, F.mse_loss, x, x)


class _Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(64, 64, 4, 1, 0, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(True),
            nn.ConvTranspose2d(64, 32, 4, 4, 0, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(True),
            nn.ConvTranspose2d(32, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.critic = nn.Sequential(
            nn.Conv2d(3, 32, 4, 2, 1),
            nn.LeakyReLU(0.2, True),
            nn.Conv2d(32, 64, 4, 2, 1),
            nn.InstanceNorm2d(64),
            nn.LeakyReLU(0.2, True),
            nn.Flatten(),
            nn.Linear(64 * 64, 1),
        )

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        made = self.generator(noise)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        judge = F.binary_cross_entropy_with_logits
        critic_loss = judge(self.critic(real), ones) + judge(self.critic(made.detach()), zeros)
        loss: Tensor = critic_loss + judge(self.critic(made), ones)
        return loss


def gan(batch_size: int) -> Step:
    """A generator and a critic, both losses in one step."""
    model = _Gan()
    noise = torch.randn(batch_size, 64, 1, 1)
    return Step(model, model, (torch.randn(batch_size, 3, 32, 32), noise))


class _Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        made: Any = cell
        self.cells = made(128, 256, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(512 if options.get("bidirectional") else 256, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        found, _ = self.cells(self.embed(tokens))
        logits: Tensor = self.head(found)
        return logits


def recurrent(batch_size: int, cell: type[nn.RNNBase] = nn.LSTM, **options: Any) -> Step:
    """A language model over a recurrent network."""
    return next_token(_Recurrent(cell, **options), batch_size, 1000, 32)


class _Bags(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(5000, 64, mode=mode)
        self.head = nn.Linear(64, 10)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.bag(words))
        return logits


def embedding_bag(batch_size: int, mode: str = "mean") -> Step:
    """A classifier of bags of words."""
    return classes(_Bags(mode), torch.randint(5000, (batch_size, 50)))
