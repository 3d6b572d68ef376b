"""Every module of torch's own database computes and trains paged as it does whole, bit for bit.

Between any two runs all goes from the device and is written over. Here are a few samples of each;
`python -m benchmarks.sweep_paging` runs all of them.
"""

import pytest
from torch import nn

from benchmarks._corpus_modules import differs_in_training, names, samples_of
from benchmarks._paged_cycles import Call, Cycles

# What torch's samples warn of, deprecated arguments and uneven strides, is not of paging.
pytestmark = pytest.mark.filterwarnings("ignore")

N_SAMPLES = 3


def differences(sim, name, *, training, trains):
    samples = samples_of(name, training=training, most=N_SAMPLES)
    if not any(list(sample.module.parameters()) for sample in samples):
        # Without weights there is little to page.
        samples = samples[:1]
    modules = nn.ModuleList([sample.module for sample in samples]).train(training)
    calls = [Call(f"{i}", *sample[1:]) for i, sample in enumerate(samples)]
    return Cycles(sim, modules, trains=trains).differences(calls)


@pytest.mark.parametrize("name", names())
def test_outputs(sim, name):
    for training in (False, True)[: 1 + differs_in_training(name)]:
        assert differences(sim, name, training=training, trains=False) == []


@pytest.mark.parametrize("name", names())
def test_gradients(sim, name):
    assert differences(sim, name, training=True, trains=True) == []


def test_the_database_is_as_large_as_it_was():
    assert len(names()) >= 114
