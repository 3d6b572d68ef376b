"""What a prediction says, to the letter; and that it is never too sure that something fits."""

import copy
import json
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from tenure import ByteSizeError
from tenure.adaptive import PeakReport, predict_peak

MIB = 2**20
REPORT = PeakReport(
    peak_bytes=10 * MIB,
    baseline_bytes=4 * MIB,
    categories={"activations": 3 * MIB, "temporaries": 3 * MIB, "parameters": 4 * MIB},
    phase="backward",
    operation="aten.mm.default",
    place="layers.3 (train.py:12)",
    device="cpu",
    approximate=False,
    reasons=(),
)
ON_CUDA = replace(
    REPORT,
    device="cuda:0",
    allocated_bytes=11 * MIB,
    reserved_bytes=22 * MIB,
    allowance_bytes=2 * MIB,
    approximate=True,
    reasons=("a mask is taken to select everything at train.py:3", "<b>"),
)


def test_beside_a_budget_it_says_what_is_left_and_what_is_only_assumed():
    assert str(ON_CUDA.against("32MiB")) == (
        "It fits in 32.0 MiB: it needs 24.0 MiB, 8.0 MiB to spare.\n"
        "A step takes about 10.0 MiB of cuda:0 at most: in the backward pass, at layers.3\n"
        "(train.py:12), in aten.mm.\n"
        "4.0 MiB of it were there before.\n"
        "The allocator reserves 22.0 MiB for it, and kernels may take 2.0 MiB more: 24.0\n"
        "MiB in all.\n"
        "\n"
        "category                    bytes   share\n"
        "-----------------------  --------  ------  --------------------------------\n"
        "parameters                4.0 MiB   16.7%  ████\n"
        "activations               3.0 MiB   12.5%      ███\n"
        "temporaries               3.0 MiB   12.5%         ███\n"
        "allocator rounding        1.0 MiB    4.2%            █\n"
        "reserved, not allocated  11.0 MiB   45.8%             ███████████\n"
        "allowance for kernels     2.0 MiB    8.3%                        ██\n"
        "total                    24.0 MiB  100.0%  ████████████████████████\n"
        "budget                   32.0 MiB  133.3%  ████████████████████████████████\n"
        "\n"
        "Approximate, for these reasons:\n"
        "- a mask is taken to select everything at train.py:3\n"
        "- <b>"
    )


def test_a_first_step_that_takes_less_than_later_ones_says_so_above_its_table():
    later = replace(REPORT, place="", later_peak_bytes=12 * MIB)
    assert str(later.against("32MiB")).partition("\ncategory")[0] == (
        "It fits in 32.0 MiB: it needs 12.0 MiB, 20.0 MiB to spare.\n"
        "The first step takes 10.0 MiB of cpu at most: in the backward pass, in aten.mm.\n"
        "4.0 MiB of it were there before.\n"
        "Later steps take 12.0 MiB: they begin with the optimizer's state.\n"
        "\n"
        "The first step (later ones need up to 12.0 MiB):"
    )


def test_what_does_not_fit_says_by_how_much():
    told = "It does not fit in 8.0 MiB: it needs 10.0 MiB, 2.0 MiB too much."
    assert REPORT.against("8MiB").verdict() == told


@pytest.mark.parametrize(
    ("report", "needed"),
    [
        (REPORT, 10 * MIB),
        (replace(REPORT, allowance_bytes=1), 10 * MIB + 1),
        (ON_CUDA, 24 * MIB),
    ],
)
def test_it_fits_only_where_all_of_it_does(report, needed):
    assert report.needed_bytes == needed
    assert report.fits(needed)
    assert not report.fits(needed - 1)
    assert report.fits("1GiB")


def test_a_budget_that_is_no_size_is_refused():
    for ask in (REPORT.fits, REPORT.against):
        with pytest.raises(ByteSizeError, match="is not a number of bytes"):
            ask("24 gigs")


def test_advice_is_asked_for_only_when_it_is_read():
    model = nn.Linear(64, 64)
    report = predict_peak(lambda x: model(x).square().mean(), torch.randn(512, 64))
    assert report.to_dict()["advice"] == []
    assert report.against("1GiB").advice
    assert report.to_dict()["advice"]
    assert REPORT.advice == ()


def test_it_outlives_its_process():
    written = json.loads(json.dumps(ON_CUDA.to_dict()))
    assert written["needed_bytes"] == 24 * MIB
    for again in (
        PeakReport.from_dict(written),
        pickle.loads(pickle.dumps(ON_CUDA)),
        copy.deepcopy(ON_CUDA),
    ):
        assert again == ON_CUDA
        assert str(again) == str(ON_CUDA)
        assert again.advice == ()
