from concurrent.futures import ThreadPoolExecutor

from . import _parity

N_SAMPLES = 8

# Reviewed. Sparse layouts have dispatch keys of their own, which a Python device cannot serve.
DOES_NOT_RUN = {"sparse.mm.reduce", "sparse.sampled_addmm", "to_sparse"}

# Reviewed. These have no samples that the CPU runs, so there is nothing to compare with.
NOT_COMPARABLE = {
    "broadcast_shapes",
    "jiterator_2inputs_2outputs",
    "jiterator_4inputs_with_extra_args",
    "jiterator_binary",
    "jiterator_binary_return_by_ref",
    "jiterator_unary",
    "nn.functional.batch_norm.without_cudnn",
    "torch._scaled_mm",
    "torch._scaled_mm_v2",
    "torch.ops.aten._efficient_attention_forward",
    "torch.ops.aten._flash_attention_forward",
}


def test_every_operator_gives_what_it_gives_on_the_cpu_or_is_listed_here(sim, capsys):
    from torch.testing._internal.common_methods_invocations import op_db

    # OpInfo inspects the whole stack for its samples: a thread's is short, pytest's is not.
    with ThreadPoolExecutor(1) as executor:
        found = executor.submit(_parity.sweep, op_db, sim.device, N_SAMPLES).result()
    with capsys.disabled():
        print(f"\n{found}")
    assert found.failing.keys() == DOES_NOT_RUN
    assert set(found.not_on_cpu) == NOT_COMPARABLE
    assert len(found.agreeing) > 680
