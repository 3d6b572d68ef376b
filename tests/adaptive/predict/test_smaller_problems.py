"""Kernels that are too large to be run: what smaller problems tell of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tenure.adaptive import predict_peak
from tests.true_peak import true_peak_bytes


def a_convolution_without_padding(x):
    return F.conv2d(x, torch.ones(16, 3, 5, 5)).sum()


def a_map_that_is_made_larger(x):
    return F.interpolate(x, size=(512, 512), mode="bilinear").sum()


@pytest.mark.parametrize(
    ("work", "shape"),
    [
        # a result of n - 4 pixels grows faster than n, and yet along a line
        (a_convolution_without_padding, (4, 3, 224, 224)),
        # images of up to 64 pixels are resized by another kernel
        (a_map_that_is_made_larger, (2, 21, 65, 65)),
    ],
)
def test_the_whole_takes_what_is_predicted_however_kernels_are_chosen(work, shape):
    x = torch.ones(shape)
    report = predict_peak(work, x)
    true_bytes = true_peak_bytes(lambda: work(x))
    assert not report.approximate
    assert true_bytes <= report.peak_bytes - report.baseline_bytes <= 1.01 * true_bytes


@pytest.mark.parametrize("shape", [(64, 16, 96, 96), (128, 8, 100, 100)])
def test_maps_of_no_more_than_127_pixels_are_measured(shape):
    net = nn.Sequential(nn.BatchNorm2d(shape[1]), nn.ReLU(), nn.MaxPool2d(2))
    report = predict_peak(lambda x: net(x).sum(), torch.ones(shape))
    assert report.reasons == ()
    assert not report.approximate
