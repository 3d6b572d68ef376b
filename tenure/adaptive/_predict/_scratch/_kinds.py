"""Operations by when their kernels on the CPU take nothing for themselves.

Found by running every operation of torch's own database, forward and backward, in float32,
bfloat16, complex64 and int64, contiguous and not, small and large, and listening to the allocator;
``tests/sweeps/test_scratch.py`` listens again. Names are those of ``aten``.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FREE = _names(
    """
    _adaptive_avg_pool2d_backward.default _adaptive_avg_pool3d.default
    _adaptive_avg_pool3d_backward.default _conj.default _conj_physical.default
    _efficientzerotensor.default _foreach_abs.default _foreach_acos.default _foreach_add.List
    _foreach_add.Scalar _foreach_add.ScalarList _foreach_addcdiv.Scalar _foreach_addcmul.Scalar
    _foreach_asin.default _foreach_atan.default _foreach_ceil.default _foreach_clamp_max.List
    _foreach_clamp_max.Scalar _foreach_clamp_max.ScalarList _foreach_clamp_min.List
    _foreach_clamp_min.Scalar _foreach_clamp_min.ScalarList _foreach_clone.default
    _foreach_cos.default _foreach_cosh.default _foreach_div.List _foreach_div.Scalar
    _foreach_div.ScalarList _foreach_erf.default _foreach_erfc.default _foreach_exp.default
    _foreach_expm1.default _foreach_floor.default _foreach_frac.default _foreach_lerp.List
    _foreach_lerp.Scalar _foreach_lerp.ScalarList _foreach_lgamma.default _foreach_log.default
    _foreach_log10.default _foreach_log1p.default _foreach_log2.default _foreach_maximum.List
    _foreach_maximum.Scalar _foreach_maximum.ScalarList _foreach_minimum.List
    _foreach_minimum.Scalar _foreach_minimum.ScalarList _foreach_mul.List _foreach_mul.Scalar
    _foreach_mul.ScalarList _foreach_neg.default _foreach_pow.List _foreach_pow.Scalar
    _foreach_pow.ScalarList _foreach_reciprocal.default _foreach_round.default
    _foreach_rsqrt.default _foreach_sigmoid.default _foreach_sign.default _foreach_sin.default
    _foreach_sinh.default _foreach_sqrt.default _foreach_sub.List _foreach_sub.Scalar
    _foreach_sub.ScalarList _foreach_tan.default _foreach_tanh.default _foreach_trunc.default
    _histogramdd_bin_edges.default _local_scalar_dense.default
    _log_softmax_backward_data.default _pdist_backward.default
    _pdist_forward.default _prelu_kernel.default _prelu_kernel_backward.default _to_copy.default
    _to_dense.default _unsafe_view.default _upsample_bilinear2d_aa_backward.default
    _upsample_nearest_exact1d_backward.default _upsample_nearest_exact2d_backward.default
    adaptive_max_pool2d_backward.default adaptive_max_pool3d.default
    adaptive_max_pool3d_backward.default add_.Scalar addcdiv.default addcmul.default
    addr.default alias.default alias_copy.default amax.default amax.out amin.default arange.default
    arange.start arange.start_step argmax.default argmin.default as_strided.default
    as_strided_copy.default as_strided_scatter.default avg_pool2d_backward.default
    avg_pool3d_backward.default bernoulli.default bernoulli_.float bitwise_and.Tensor
    bitwise_and_.Tensor bitwise_left_shift.Tensor bitwise_not.default bitwise_or.Tensor
    bitwise_or_.Tensor bitwise_right_shift.Tensor bitwise_xor.Tensor block_diag.default cat.default
    cauchy_.default ceil.default ceil_.default celu.default clamp.default clamp_.default
    clamp_max.Tensor clamp_min.Tensor clamp_min.default clamp_min_.Tensor clamp_min_.default
    complex.default constant_pad_nd.default copysign.Scalar
    cummax.default cummin.default cumprod.default detach.default diag_embed.default diagonal.default
    diagonal_backward.default diagonal_copy.default diagonal_scatter.default digamma_.default
    div.Tensor_mode div.out div_.Scalar dot.default elu.default elu_backward.default
    empty.memory_format empty_like.default empty_permuted.default empty_strided.default eq.Scalar
    exp_.default expand.default expand_copy.default exponential_.default eye.default eye.m
    fill.Scalar fill_.Scalar flip.default floor.default floor_divide.default fmax.default
    fmin.default fmod.Tensor frac.default fractional_max_pool2d_backward.default
    fractional_max_pool3d_backward.default frexp.Tensor full.default full_like.default gcd.default
    ge.Scalar gelu.default gelu_backward.default geometric_.default glu.default glu_backward.default
    grid_sampler_2d.default grid_sampler_2d_backward.default grid_sampler_3d.default
    grid_sampler_3d_backward.default gt.Scalar hardshrink.default hardshrink_backward.default
    hardsigmoid.default hardsigmoid_backward.default hardswish.default hardswish_backward.default
    hardtanh.default hardtanh_backward.default hash_tensor.default heaviside.default
    huber_loss_backward.default hypot.default i0.default igamma.default igammac.default
    index_add_.default index_copy.default index_fill.int_Scalar index_fill.int_Tensor
    is_coalesced.default isnan.default isneginf.default isposinf.default lcm.default le.Scalar
    leaky_relu.default leaky_relu_backward.default lerp.Scalar lerp.Tensor lerp_.Tensor
    lift_fresh.default linalg_cross.default linalg_lu_factor_ex.default linspace.Scalar_Tensor
    linspace.Tensor_Scalar linspace.Tensor_Tensor linspace.default log_.default log_normal_.default
    log_sigmoid_backward.default logaddexp.default logaddexp2.default logcumsumexp.default
    logical_and.default logical_and_.default logical_not.default logical_not_.default
    logical_or.default logical_or_.default logical_xor.default logit_backward.default
    logspace.Scalar_Tensor logspace.Tensor_Scalar logspace.Tensor_Tensor logspace.default lt.Scalar
    masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar max.dim
    max_pool2d_with_indices_backward.default max_pool3d_with_indices_backward.default
    maximum.default min.dim minimum.default mish.default mish_backward.default mode.default
    mse_loss_backward.default mul.out mul_.Scalar mul_.Tensor nan_to_num.default nansum.default
    ne.Scalar ne.Tensor neg.default neg_.default new_empty.default
    new_empty_strided.default new_full.default new_ones.default new_zeros.default nextafter.default
    norm.ScalarOpt_dim normal.float_float normal_.default ones.default
    ones_like.default permute.default permute_copy.default polar.default pow.Scalar
    pow.Tensor_Scalar pow.Tensor_Tensor pow_.Scalar prod.default prod.dim_int put.default
    rand.default randint.default randint.low randint_like.default randint_like.low_dtype
    randn.default randn_like.default reciprocal_.default reflection_pad1d_backward.default
    reflection_pad2d_backward.default reflection_pad3d_backward.default relu.default relu_.default
    remainder.Scalar remainder.Tensor replication_pad1d_backward.default
    replication_pad2d_backward.default replication_pad3d_backward.default resize_.default
    resize_as_.default rot90.default round.decimals round.default rrelu_with_noise_backward.default
    rsub.Scalar rsub.Tensor scalar_tensor.default scatter_.value searchsorted.Tensor select.int
    select_backward.default select_scatter.default sgn.default sigmoid_backward.default sign.default
    signbit.default silu.default silu_backward.default slice.Tensor slice_backward.default
    slice_scatter.default smooth_l1_loss_backward.default softplus.default softplus_backward.default
    softshrink.default softshrink_backward.default special_i0e.default special_i1.default
    special_i1e.default split.Tensor split_with_sizes.default split_with_sizes_copy.default
    sqrt_.default squeeze.default squeeze.dim squeeze.dims squeeze_.dim squeeze_copy.default
    squeeze_copy.dim stack.default sub.Scalar t.default t_copy.default take.default
    tanh_backward.default threshold.default threshold_backward.default topk.default trace.default
    transpose.int transpose_.default transpose_copy.int triangular_solve.default tril_.default
    tril_indices.default triu_indices.default trunc.default unbind.int unbind_copy.int
    unfold.default unfold_copy.default uniform_.default unsafe_split.Tensor unsqueeze.default
    unsqueeze_.default unsqueeze_copy.default upsample_bicubic2d_backward.default
    upsample_bilinear2d_backward.default upsample_linear1d_backward.default
    upsample_nearest1d_backward.default upsample_nearest2d_backward.default
    upsample_nearest3d_backward.default upsample_trilinear3d_backward.default vdot.default
    view.default view_as_complex.default view_as_real.default view_copy.default where.self
    zero_.default zeros.default zeros_like.default
    """
)
"""Nothing, in whatever layout and of whatever dtype."""

FREE_OF_ONE_DTYPE = _names(
    """
    abs.default acos.default acosh.default add.Scalar add.Tensor angle.default asin.default
    asinh.default atan.default atan2.default atanh.default clamp.Tensor copysign.Tensor cos.default
    cosh.default cumsum.default deg2rad.default digamma.default div.Scalar div.Tensor div_.Tensor
    eq.Tensor erf.default erfc.default erfinv.default exp.default exp2.default expm1.default
    ge.Tensor gt.Tensor le.Tensor lgamma.default log.default log10.default log1p.default
    log2.default logit.default lt.Tensor mean.default mean.dim mul.Scalar mul.Tensor
    polygamma.default rad2deg.default reciprocal.default rsqrt.default sigmoid.default sin.default
    sinc.default sinh.default special_airy_ai.default special_bessel_j0.default
    special_bessel_j1.default special_bessel_y0.default special_bessel_y1.default
    special_chebyshev_polynomial_t.default special_chebyshev_polynomial_u.default
    special_chebyshev_polynomial_v.default special_chebyshev_polynomial_w.default
    special_entr.default special_erfcx.default special_hermite_polynomial_h.default
    special_hermite_polynomial_he.default special_laguerre_polynomial_l.default
    special_legendre_polynomial_p.default special_log_ndtr.default
    special_modified_bessel_i0.default special_modified_bessel_i1.default
    special_modified_bessel_k0.default special_modified_bessel_k1.default special_ndtri.default
    special_scaled_modified_bessel_k0.default special_scaled_modified_bessel_k1.default
    special_shifted_chebyshev_polynomial_t.default special_shifted_chebyshev_polynomial_u.default
    special_shifted_chebyshev_polynomial_v.default special_shifted_chebyshev_polynomial_w.default
    special_spherical_bessel_j0.default special_xlog1py.default special_zeta.default sqrt.default
    std_mean.correction sub.Tensor sub_.Tensor sum.default sum.dim_IntList tan.default tanh.default
    var_mean.correction xlogy.Tensor
    """
)
"""Nothing where inputs and outputs are real numbers of one dtype; others are converted whole."""

FREE_CONTIGUOUS = _names(
    """
    _adaptive_avg_pool2d.default _cdist_backward.default _cdist_forward.default _foreach_max.default
    _foreach_mm.default _log_softmax.default _segment_reduce_backward.default _softmax.default
    _softmax_backward_data.default adaptive_max_pool2d.default addbmm.default addmm.out
    addmm_.default addmv.default aminmax.default avg_pool2d.default avg_pool3d.default
    baddbmm.default bucketize.Tensor channel_shuffle.default clone.default embedding.default
    embedding_dense_backward.default fractional_max_pool2d.default fractional_max_pool3d.default
    index_select.default linalg_cholesky_ex.default linalg_solve_triangular.default
    log_sigmoid_forward.default masked_scatter.default max.default max_pool2d_with_indices.default
    max_pool3d_with_indices.default max_unpool2d.default max_unpool3d.default min.default mm.out
    multi_margin_loss.default multi_margin_loss_backward.default mv.default narrow_copy.default
    native_layer_norm.default nll_loss2d_backward.default nll_loss2d_forward.default
    nll_loss_backward.default nll_loss_forward.default pixel_shuffle.default pixel_unshuffle.default
    reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default
    replication_pad1d.default replication_pad2d.default replication_pad3d.default tril.default
    triu.default
    """
)
"""Nothing where inputs are contiguous and of one dtype, indices and masks aside."""

TAKES_NUMBERS = _names(
    """
    add.Scalar add.Tensor add_.Scalar add_.Tensor copysign.Scalar deg2rad.default div.Scalar
    div.Tensor div_.Scalar div_.Tensor eq.Scalar ge.Scalar gt.Scalar le.Scalar lt.Scalar
    mean.default mean.dim mul.Scalar mul.Tensor mul_.Scalar mul_.Tensor ne.Scalar pow.Scalar
    rad2deg.default remainder.Scalar rsub.Scalar sub.Scalar sub.Tensor sub_.Tensor
    """
)
"""Makes a tensor of each plain number that it gets."""

MEASURED = _names(
    """
    _batch_norm_with_update.default _chunk_cat.default
     _embedding_bag.default
    _embedding_bag_per_sample_weights_backward.default _fft_c2c.default
    _fft_r2c.default _foreach_norm.Scalar _histogramdd_from_bin_cts.default
    _histogramdd_from_bin_tensors.default _linalg_det.default _linalg_eigh.default
    _linalg_slogdet.default _linalg_solve_ex.default _linalg_svd.default
    _native_batch_norm_legit.default _native_batch_norm_legit.no_stats _safe_softmax.default
    _scaled_dot_product_flash_attention_for_cpu.default
    _scaled_dot_product_flash_attention_for_cpu_backward.default _to_sparse.default
    _to_sparse.sparse_dim _trilinear.default _unsafe_masked_index.default
    _unsafe_masked_index_put_accumulate.default _upsample_bilinear2d_aa.default
    _upsample_nearest_exact1d.default _upsample_nearest_exact2d.default addmm.default all.default
    all.dim all.dims any.default any.dim any.dims batch_norm_backward.default
    binary_cross_entropy.default binary_cross_entropy_backward.default
    binary_cross_entropy_with_logits.default bmm.default cholesky.default cholesky_inverse.default
    cholesky_solve.default convolution.default convolution_backward.default count_nonzero.default
    count_nonzero.dim_IntList dist.default gather.default geqrf.default histc.default
    histogram.bin_ct histogram.bins_tensor huber_loss.default index.Tensor index_add.default
    index_put.default index_put_.default index_reduce.default isin.Tensor_Tensor
    isinf.default kthvalue.default
    ldexp.Tensor linalg_eig.default linalg_householder_product.default linalg_inv_ex.default
    linalg_ldl_factor_ex.default linalg_ldl_solve.default linalg_lu.default linalg_lu_solve.default
    linalg_matrix_exp.default linalg_pinv.atol_rtol_tensor linalg_qr.default
    linalg_vector_norm.default logsumexp.default lu_unpack.default masked_scatter_backward.default
    median.default median.dim mm.default mse_loss.default multilabel_margin_loss_backward.default
    multilabel_margin_loss_forward.default multinomial.default mvlgamma.default nanmedian.default
    nanmedian.dim native_batch_norm.default native_batch_norm_backward.default
    native_dropout_backward.default
    native_layer_norm_backward.default normal.Tensor_Tensor normal.Tensor_float ormqr.default
    renorm.default repeat.default  roll.default rrelu_with_noise.default
    scatter.reduce scatter.src scatter.value scatter_add.default scatter_reduce.two
    segment_reduce.default smooth_l1_loss.default soft_margin_loss.default
    soft_margin_loss_backward.default sort.default sort.stable sparse_mask.default std.correction
     upsample_bicubic2d.default upsample_bilinear2d.default
    upsample_linear1d.default upsample_nearest1d.default upsample_nearest2d.default
    upsample_nearest3d.default upsample_trilinear3d.default var.correction
    """
)
"""Takes what is measured when it is met."""
