"""Autocast for the device: which operators cast their arguments, and to what.

An operator on none of the lists, which are those of torch for CUDA, runs on the types it is given.
Casts of parameters are kept until the outermost `autocast` closes, so that a weight used twice is
cast once.
"""

from collections.abc import Callable
from typing import Any

import torch

from tenure._torch.python_backend import map_only

from .._device._blocks import is_on_device
from .._torch_backend import AUTOCAST_KEY, DEVICE_TYPE, below_autocast, kernel, operator_named

# These run in the lower precision that the user chose.
LOWER = [
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution",
    "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear",
    "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "scaled_dot_product_attention",
]  # fmt: skip

# These run in float32.
FLOAT32 = [
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p",
    "reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar",
    "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim",
    "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div",
    "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", "norm.Scalar",
    "norm.ScalarOpt_dim",
]  # fmt: skip

# These take the result type as an argument; torch sets it to float32 where the caller has not.
FLOAT32_RESULT = [
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum",
    "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum",
    "sum.dim_IntList",
]  # fmt: skip

# These run in the widest type among their arguments.
WIDEST = [
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
    "index_put", "tensordot", "scatter_add",
]  # fmt: skip


# By id, with the parameter beside its cast: it is kept, so that no other object gets the id.
_parameter_casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def _casting(name: str, choose: Callable[..., torch.dtype | None]) -> Callable[..., Any]:
    operator = operator_named(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        with below_autocast():
            dtype = choose(args, kwargs)
            if dtype is not None:
                args, kwargs = _cast((args, kwargs), dtype)
            return operator(*args, **kwargs)

    return run


def _lower_type(args: Any, kwargs: Any) -> torch.dtype:
    return torch.get_autocast_dtype(DEVICE_TYPE)


def _widest_type(args: Any, kwargs: Any) -> torch.dtype | None:
    found: list[torch.dtype] = []
    map_only(torch.Tensor, lambda t: found.append(t.dtype) if _eligible(t) else None, args)
    if not found:
        return None
    return torch.float32 if torch.float32 in found else _lower_type(args, kwargs)


def _eligible(tensor: torch.Tensor) -> bool:
    # As ATen's autocast_mode.h: doubles are never cast.
    is_single = tensor.is_floating_point() and tensor.dtype != torch.float64
    return is_on_device(tensor) and is_single


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if not _eligible(tensor) or tensor.dtype == dtype:
            return tensor
        is_parameter = tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32
        is_lower = dtype == _lower_type((), {})
        if not (is_parameter and is_lower and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        if id(tensor) not in _parameter_casts:
            _parameter_casts[id(tensor)] = (tensor, tensor.to(dtype))
        return _parameter_casts[id(tensor)][1]

    return map_only(torch.Tensor, cast, tree)


def forget_casts_with_autocast() -> None:
    """Let the end of the outermost block, which calls this function of torch's, forget them."""
    plain = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        _parameter_casts.clear()
        plain()

    torch.clear_autocast_cache = clear_autocast_cache


for _names, _choose in (
    (LOWER, _lower_type),
    (FLOAT32, lambda args, kwargs: torch.float32),
    (
        FLOAT32_RESULT,
        lambda args, kwargs: torch.float32 if kwargs.get("dtype") is None else None,
    ),
    (WIDEST, _widest_type),
):
    for _name in _names:
        kernel(_name, keys=[AUTOCAST_KEY])(_casting(_name, _choose))


@kernel("binary_cross_entropy", keys=[AUTOCAST_KEY])
def refuse_binary_cross_entropy(*args: Any, **kwargs: Any) -> None:
    """Raise as on CUDA."""
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast."
        " Use binary_cross_entropy_with_logits or BCEWithLogitsLoss."
    )
