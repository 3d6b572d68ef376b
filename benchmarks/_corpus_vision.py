"""Architectures of torchvision and timm, where these are installed, at small image sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._training_steps import Architecture, Step

_CLASSES = 10
_CLASSIFIERS = {
    "squeezenet1_1": 64, "densenet121": 64, "googlenet": 96,
    "inception_v3": 96, "mobilenet_v2": 64, "mobilenet_v3_small": 64, "mnasnet0_5": 64,
    "shufflenet_v2_x0_5": 64, "resnet18": 64, "resnet50": 64, "resnext50_32x4d": 64,
    "regnet_y_400mf": 64, "regnet_x_400mf": 64, "efficientnet_b0": 64,
    "efficientnet_v2_s": 64, "convnext_tiny": 64, "swin_t": 64, "swin_v2_t": 64, "maxvit_t": 64,
}  # fmt: skip
_SEGMENTERS = ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
_DETECTORS = (
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "ssdlite320_mobilenet_v3_large",
    "retinanet_resnet50_fpn",
    "fcos_resnet50_fpn",
    "maskrcnn_resnet50_fpn",
)
_VIDEO = ("r3d_18", "mc3_18")
_TIMM = {
    "resnet26d": 64, "efficientnet_lite0": 64, "mobilenetv4_conv_small": 64, "mixer_s32_224": 224,
    "resmlp_12_224": 224, "gmixer_12_224": 224, "deit_tiny_patch16_224": 224, "cait_xxs24_224": 224,
    "coat_tiny": 224, "pit_ti_224": 224, "convmixer_768_32": 56, "edgenext_xx_small": 64,
    "ghostnet_100": 64, "hrnet_w18_small": 64, "nfnet_l0": 64, "rexnet_100": 64, "repvgg_a0": 64,
    "tinynet_e": 64, "twins_pcpvt_small": 224, "xcit_nano_12_p16_224": 224, "dpn48b": 64,
    "cspdarknet53": 64, "dla34": 64, "res2net50_26w_4s": 64, "selecsls42": 64, "skresnet18": 64,
    "visformer_tiny": 224, "vovnet39a": 64, "eca_botnext26ts_256": 256, "fastvit_t8": 64,
}  # fmt: skip


def architectures() -> list[Architecture]:
    """Those of the packages that can be imported here."""
    found: list[Architecture] = []
    if _importable("torchvision"):
        found += _torchvision()
    if _importable("timm"):
        found += [
            Architecture(f"timm/{name}", "timm", (2, 4, 8), partial(_timm_step, name, side))
            for name, side in _TIMM.items()
        ]
    return found


def _importable(name: str) -> bool:
    # a torchvision built for another torch raises a RuntimeError
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError):
        return False
    return True


def _torchvision() -> list[Architecture]:
    def all_of(family: str, names: Any, build: Callable[..., Step], sizes: tuple[int, ...]) -> Any:
        return [Architecture(f"torchvision/{n}", family, sizes, partial(build, n)) for n in names]

    return [
        *all_of("torchvision", _CLASSIFIERS, _classifier_step, (2, 4, 8)),
        *all_of("segmentation", _SEGMENTERS, _segmenter_step, (2, 3, 4)),
        # the smallest has BatchNorm over one pixel, which needs two images
        *all_of("detection", _DETECTORS, _detector_step, (2, 3, 4)),
        *all_of("video", _VIDEO, _video_step, (1, 2, 3)),
    ]


def _models(name: str, room: str = "models") -> Any:
    return getattr(importlib.import_module(f"torchvision.{room}"), name)


def _make(name: str, room: str, **options: Any) -> nn.Module:
    model: nn.Module = _models(name, room)(weights=None, **options)
    return model.train()


def _classifier_step(name: str, batch_size: int) -> Step:
    side = _CLASSIFIERS[name]
    options: dict[str, Any] = {"num_classes": _CLASSES}
    if name in {"googlenet", "inception_v3"}:
        options |= {"init_weights": False, "aux_logits": False}
    if name == "maxvit_t":
        # its windows must divide the image: the class takes their size, the function does not
        sizes = ((side, side), 32, 2, [32, 64], [1, 1], 32, 0.2)
        return _classes(
            _models("MaxVit")(*sizes, num_classes=_CLASSES).train(),
            torch.randn(batch_size, 3, side, side),
        )
    model = _models(name)(weights=None, **options).train()
    return _classes(model, torch.randn(batch_size, 3, side, side))


def _segmenter_step(name: str, batch_size: int) -> Step:
    model = _make(name, "models.segmentation", weights_backbone=None, num_classes=4)
    masks = torch.randint(4, (batch_size, 64, 64))

    def fn(images: Tensor, masks: Tensor) -> Tensor:
        return F.cross_entropy(model(images)["out"], masks)

    return Step(model, fn, (torch.randn(batch_size, 3, 64, 64), masks))


def _detector_step(name: str, batch_size: int) -> Step:
    options: dict[str, Any] = {"weights_backbone": None, "num_classes": 4}
    if not name.startswith("ssd"):
        options |= {"min_size": 128, "max_size": 128}
    model = _make(name, "models.detection", **options)
    boxes = torch.tensor([[10.0, 10.0, 60.0, 60.0], [30.0, 20.0, 90.0, 110.0]])
    targets = [{"boxes": boxes.clone(), "labels": torch.tensor([1, 2])} for _ in range(batch_size)]
    if name.startswith("mask"):
        for target in targets:
            target["masks"] = torch.randint(2, (2, 128, 128), dtype=torch.uint8)
    images = [torch.rand(3, 128, 128) for _ in range(batch_size)]

    def fn(images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
        losses: dict[str, Tensor] = model(images, targets)
        return torch.stack([*losses.values()]).sum()

    return Step(model, fn, (images, targets))


def _video_step(name: str, batch_size: int) -> Step:
    model = _make(name, "models.video", num_classes=_CLASSES)
    return _classes(model, torch.randn(batch_size, 3, 8, 32, 32))


def _timm_step(name: str, side: int, batch_size: int) -> Step:
    timm: Any = importlib.import_module("timm")
    model: nn.Module = timm.create_model(name, num_classes=_CLASSES).train()
    return _classes(model, torch.randn(batch_size, 3, side, side))


def _classes(model: nn.Module, images: Tensor) -> Step:
    def fn(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels)

    return Step(model, fn, (images, torch.randint(_CLASSES, (len(images),))))
