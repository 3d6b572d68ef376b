"""Which rule says where the result of an operator has its samples.

Invariant: what has no rule mixes samples, and only elementwise operators need none. Held over
torch's operators by ``tests/sweeps/test_lazy.py``.
"""

from __future__ import annotations

from .._names import names
from ._along import along_dims, pointwise
from ._label import Call, Rule
from ._layers import (
    along_first,
    attention,
    batch_norm,
    bucketized,
    convolved,
    layer_norm,
    leading,
    likelihood,
    linear,
    lossy,
    multiplied,
)
from ._moves import (
    diagonal,
    embedded,
    expanded,
    indexed,
    joined,
    masked_write,
    padded,
    permuted,
    repeated,
    sliced,
    squeezed,
    stacked,
    transposed,
    unsqueezed,
    viewed,
)


def rule_for(call: Call) -> Rule | None:
    """The rule of an operator; None where there is none."""
    rule = _RULES.get(call.name)
    return pointwise if rule is None and call.is_pointwise else rule


def is_like_its_argument(name: str) -> bool:
    """Whether an operator changes nothing of a tensor but its type."""
    return name in _SAME


_SAME = frozenset(names("_to_copy alias clone detach lift_fresh view"))


_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        names("""
        _to_copy copy_ fill_ zero_ detach alias lift_fresh native_dropout _fused_dropout
        bernoulli bernoulli_ normal_ uniform_ exponential_ empty_like zeros_like
        ones_like full_like rand_like randn_like randint_like contiguous dropout
        rrelu_with_noise clamp_ where masked_fill masked_fill_ poisson lerp
        _prelu_kernel nan_to_num binomial
    """),
        pointwise,
    ),
    **dict.fromkeys(
        names("""
        sum mean amax amin max min argmax argmin all any prod var std var_mean std_mean
        logsumexp linalg_vector_norm norm _softmax _log_softmax softmax log_softmax
        _safe_softmax cumsum cumprod logcumsumexp cummax cummin sort argsort topk
        kthvalue median nanmedian mode flip roll select unbind unfold glu index_select
        gather scatter scatter_add scatter_reduce scatter_ scatter_add_ nansum aminmax
        count_nonzero _fft_r2c _fft_c2c _fft_c2r index_fill index_fill_ index_add
        index_copy
    """),
        along_dims,
    ),
    **dict.fromkeys(
        names("""
        max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d upsample_nearest1d
        _upsample_nearest_exact1d upsample_linear1d reflection_pad1d replication_pad1d
        view_as_complex
    """),
        leading(1),
    ),
    **dict.fromkeys(
        names("""
        max_pool2d_with_indices max_pool2d avg_pool2d adaptive_avg_pool2d
        _adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d
        upsample_bicubic2d _upsample_nearest_exact2d _upsample_bilinear2d_aa
        _upsample_bicubic2d_aa reflection_pad2d replication_pad2d mkldnn_max_pool2d triu
        tril inverse linalg_inv_ex linalg_det _linalg_det linalg_cholesky_ex cholesky
        linalg_qr _linalg_svd _linalg_eigh linalg_solve_triangular _linalg_solve_ex
        linalg_matrix_exp _cdist_forward triangular_solve linalg_lu_factor_ex
        _linalg_slogdet max_unpool2d
    """),
        leading(2),
    ),
    **dict.fromkeys(
        names("""
        max_pool3d_with_indices avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d
        adaptive_max_pool3d upsample_nearest3d upsample_trilinear3d reflection_pad3d
        replication_pad3d pixel_shuffle pixel_unshuffle im2col channel_shuffle
        native_channel_shuffle
    """),
        leading(3),
    ),
    **dict.fromkeys(
        names("""
        view _unsafe_view reshape _reshape_alias
    """),
        viewed,
    ),
    **dict.fromkeys(
        names("""
        mm addmm bmm baddbmm mv addmv
    """),
        multiplied,
    ),
    **dict.fromkeys(
        names("""
        convolution mkldnn_convolution convolution_overrideable
    """),
        convolved,
    ),
    **dict.fromkeys(
        names("""
        native_group_norm grid_sampler_2d grid_sampler_3d multinomial
    """),
        along_first,
    ),
    **dict.fromkeys(
        names("""
        native_batch_norm cudnn_batch_norm _native_batch_norm_legit
        _native_batch_norm_legit_no_training _batch_norm_with_update
        _batch_norm_no_update batch_norm_with_update
    """),
        batch_norm,
    ),
    **dict.fromkeys(
        names("""
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
        _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
        _scaled_dot_product_attention_math
        _scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention
    """),
        attention,
    ),
    **dict.fromkeys(
        names("""
        native_layer_norm _fused_rms_norm
    """),
        layer_norm,
    ),
    **dict.fromkeys(
        names("""
        mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss
        binary_cross_entropy_with_logits
    """),
        lossy,
    ),
    **dict.fromkeys(
        names("""
        nll_loss_forward nll_loss2d_forward multi_margin_loss
        multilabel_margin_loss_forward nll_loss nll_loss2d
    """),
        likelihood,
    ),
    "expand": expanded,
    "repeat": repeated,
    "permute": permuted,
    **dict.fromkeys(
        names("""
        transpose t
    """),
        transposed,
    ),
    "unsqueeze": unsqueezed,
    "squeeze": squeezed,
    "diagonal": diagonal,
    "cat": joined,
    **dict.fromkeys(
        names("""
        slice split split_with_sizes unsafe_split
    """),
        sliced,
    ),
    "stack": stacked,
    "view_as_real": leading(0),
    "index": indexed,
    **dict.fromkeys(
        names("""
        index_put index_put_
    """),
        masked_write,
    ),
    "embedding": embedded,
    "linear": linear,
    "constant_pad_nd": padded,
    "bucketize": bucketized,
}
