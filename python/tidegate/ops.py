"""The ops as functions: ``torch.ops.tidegate.*`` with keyword arguments and offsets from the CPU.

Every recurrent op returns ``(output, final_state)``. The state is float32 (float64 for float64
inputs, complex for complex ones) and can be passed back as ``h0`` to go on. A step's ``state`` is
one that its op returned, or of any dtype that ``h0`` may have, and is overwritten (in another dtype
than the op's own it is converted and copied back). Gradients flow through every tensor argument and
both results, once: double backward raises (`rotary` and `linear_cross_entropy` are no recurrences:
see there). `norm`, `add_norm` and `glu` are what lies between them, each in one pass over memory.
Shapes: B batch, T time, D channels, H heads, K key and V value dimension of a head, N sequences (B,
or the number of packed ones). Wrong arguments raise ``RuntimeError`` with op, argument, expected
and given; with ``TIDEGATE_DEBUG=1`` also values that only a synchronisation can show
(``cu_seqlens`` on a GPU, ``gamma`` outside [0, 1), ``log_f`` above 0, ``theta`` or a parameter of
``lru_scan`` not finite, ``w`` of ``wkv4`` below 0, lengths of a cache).

A page an op in docs/ops has its equations, gradients, errors and an example;
:mod:`tidegate.reference` has each op once more in a few lines of torch.
"""

import torch
from torch import Tensor

from . import _library
from ._sharding import fill

__all__ = [
    "add_norm",
    "forgetting_attention",
    "forgetting_attention_step",
    "gated_linear_attention",
    "gated_linear_attention_step",
    "gated_rnn",
    "gated_rnn_step",
    "glu",
    "hgrn2",
    "hgrn2_step",
    "hgru",
    "hgru_step",
    "init_chrono_",
    "init_constant_",
    "init_gumbel_softmax_",
    "init_long_",
    "init_lru_gamma_log_",
    "init_lru_nu_log_",
    "init_lru_theta_log_",
    "init_normal_",
    "init_rope_theta_",
    "init_uniform_",
    "linear_cross_entropy",
    "linear_scan",
    "linear_scan_step",
    "lru_scan",
    "lru_scan_step",
    "norm",
    "rotary",
    "wkv4",
    "wkv4_step",
]


def _offsets_on(
    op: str, cu_seqlens: Tensor | None, data: Tensor, name: str = "cu_seqlens"
) -> Tensor | None:
    """``cu_seqlens``, copied to the data's device when it is on the CPU."""
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        kind = type(cu_seqlens).__name__
        raise RuntimeError(f"{op}: {name} must be a tensor of int32 or int64, got {kind}")
    if cu_seqlens is None or cu_seqlens.device.type != "cpu" or data is None:
        return cu_seqlens  # without data the op says so
    device = data.device
    if device == cu_seqlens.device:
        return cu_seqlens
    # A compiler that traces this cannot ask about capture.
    if device.type == "cuda" and not torch.compiler.is_compiling() and _is_capturing(device):
        raise RuntimeError(
            f"{op}: {name} must be on {device} while a CUDA graph is captured, got it on cpu"
        )
    return cu_seqlens.to(device)


def _check_switch(op: str, name: str, value: object) -> None:
    if value is not True and value is not False:  # torch would take 2, and None for False
        raise RuntimeError(f"{op}: {name} must be True or False, got {value!r}")


def _check_text(op: str, name: str, value: object) -> None:
    if not isinstance(value, str):  # torch would take bytes
        raise RuntimeError(f"{op}: {name} must be a string, got {value!r}")


def _check_number(op: str, name: str, value: object) -> None:
    if isinstance(value, bool):  # torch would take it for 0 or 1
        raise RuntimeError(f"{op}: {name} must be a number, got {value!r}")


def _check_numbers(op: str, p: object, **numbers: object) -> None:
    """Of an initialiser: p is a tensor, the others are numbers."""
    _check_tensor(op, "p", p)
    for name, value in numbers.items():
        _check_number(op, name, value)


def _check_tensor(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise RuntimeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")


def _is_capturing(device: torch.device) -> bool:
    """Whether the current stream of `device`, which may not be the current one, is captured."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def packed_bounds(owner: str, x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The bounds ``[N + 1]`` of the sequences packed into x ``[1, T, ...]``: int64, on x's device.

    For modules that read them outside an op: the checks are the ops', in the name of `owner`.
    """
    cu_seqlens = _offsets_on(owner, cu_seqlens, x)
    return torch.ops.tidegate.packed_bounds(x, cu_seqlens, owner)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """The cross-entropy of a linear layer's logits ``z = x weight^T + bias``, of which a chunk of
    rows exists at a time: a language model's head and loss.

    ``lse = log sum_j exp(z_j)``; with label y and e = label_smoothing a row's loss is
    ``lse - (1 - e) z_y - e mean_j(z_j) + z_loss lse^2``

    Args:
        x: [..., D], at least two-dimensional; float32, float64, bfloat16 or float16.
        weight: [V, D], x's dtype or float32; where it is not x's, one copy in x's dtype is made a
            call, and its gradient stays float32.
        labels: int32 or int64 of x's shape without D, in [0, V) or ignore_index. One elsewhere is
            an error on the CPU, and makes the loss NaN on CUDA.
        bias: [V], x's dtype or float32.
        ignore_index: rows with this label have no loss and no gradient.
        label_smoothing: in [0, 1]; so much of a label's weight goes to all classes evenly.
        z_loss: at least 0; keeps the logarithm of the softmax's sum near zero.
        reduction: "mean" over the labels that are not ignored (zero when there is none), "sum", or
            "none": a loss a label, zeros where it is ignored.

    Returns:
        The loss in float32 (float64 for float64), [] or labels' shape.

    For N labels 6 N D V floating-point operations with gradients, which the forward pass makes
    ("none": 8 N D V, where the backward pass makes the logits anew), and 2 N D V without. No tensor
    of N x V exists: a chunk of logits has at most 512 MiB (CUDA) or 128 MiB (CPU). On CUDA logits
    are rounded to x's dtype; sums are float32 (float64 for float64). Bitwise deterministic.
    """
    _check_text("linear_cross_entropy", "reduction", reduction)
    for name, number in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        _check_number("linear_cross_entropy", name, number)
    return torch.ops.tidegate.linear_cross_entropy(
        x, weight, labels, bias, ignore_index, label_smoothing, z_loss, reduction
    )


def linear_scan(
    x: Tensor,
    a: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Element-wise linear recurrence over time: ``h_t = a_t * h_{t-1} + x_t``.

    The form that HGRN (arXiv 2311.04823, eq. 2), LRU and minimal gated RNNs share.

    Args:
        x: [B, T, D], float32, float64, bfloat16, float16, complex64 or complex128.
        a: [B, T, D] decays, linear (not log), or [D] when constant over batch and time; float32 or
            x's dtype; for complex x also complex64, or float64 beside complex128.
        h0: [N, D], zero when None; float32 (complex64 for complex x) or x's dtype.
        reverse: scan each sequence from its last token, ``h_t = a_t * h_{t+1} + x_t``: h0 enters
            after the last token and the final state is the first token's.
        cu_seqlens: int32 or int64 [N + 1] rising from 0 to T, on x's device or the CPU: N sequences
            packed along time, B = 1. Empty sequences are allowed.

    Returns:
        h [B, T, D] in x's dtype and the final state [N, D] in float32 (float64, complex for such
        x); at T = 0 the state is a copy of h0.

    Cost O(B T D): reads x and a once, writes h once. Accumulates in the state's dtype; bitwise
    deterministic; training keeps a, h0 and h.
    """
    _check_switch("linear_scan", "reverse", reverse)
    cu_seqlens = _offsets_on("linear_scan", cu_seqlens, x)
    return torch.ops.tidegate.linear_scan(x, a, h0, reverse, cu_seqlens)


def linear_scan_step(x: Tensor, a: Tensor, state: Tensor) -> Tensor:
    """One token of :func:`linear_scan`, for decoding: ``state = a * state + x``, in place.

    Args:
        x: [B, D].
        a: [B, D] or [D].
        state: [B, D].

    Returns:
        The new state in x's dtype, [B, D]. Has no gradient: raises when an argument requires one
        and gradients are recorded.
    """
    return torch.ops.tidegate.linear_scan_step(x, a, state)


def gated_rnn(
    z: Tensor,
    x: Tensor,
    w_zh: Tensor,
    h0: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    gamma: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The minimal gated RNN, whose gate reads the state, from the projected input.

    ``g_t = gamma + (1 - gamma) * sigmoid(z_t + W_zh h_{t-1})``
    ``h_t = g_t * h_{t-1} + (1 - g_t) * x_t``

    "Towards Understanding Gated Linear Recurrent Neural Networks", equations 5 to 7; gamma: HGRN's
    (arXiv 2311.04823, section 3.2).

    Args:
        z: [B, T, D], what the input adds to the gate's logits; float32 or x's dtype.
        x: [B, T, D], float32, float64, bfloat16 or float16.
        w_zh: [D, D], row i for channel i of the gate; float32 or x's dtype.
        h0: [N, D], zero when None; float32 or x's dtype.
        cu_seqlens: int32 or int64 [N + 1] rising from 0 to T, on x's device or the CPU: N sequences
            packed along time, B = 1. Empty sequences are allowed.
        gamma: [D] lower bounds of the gate, linear, in [0, 1); zero when None; float32 or x's
            dtype.

    Returns:
        h [B, T, D] in x's dtype and the final state [N, D] in float32 (float64 for float64); at
        T = 0 the state is a copy of h0.

    Products, gates and states have float32's precision (float64's), whatever the data: no TF32, no
    16-bit rounding (on tensor cores a float is the sum of two numbers). Two things are products of
    torch's and follow its settings (TF32 where allow_tf32 is on): the gradient of w_zh, for which
    CUDA rounds the gates' gradients to x's dtype where that is a 16-bit one (sums are fp32), and on
    CUDA the recurrence itself of padded sequences where D is above 256 and no chip takes the
    matrix: float64; D above 512 without clusters of blocks; D above 1024. Bitwise deterministic.
    Training keeps x, w_zh, h0, gamma, h and the gate's logits in the state's dtype. Cost
    O(B T D^2), one token after another.
    """
    cu_seqlens = _offsets_on("gated_rnn", cu_seqlens, x)
    return torch.ops.tidegate.gated_rnn(z, x, w_zh, h0, cu_seqlens, gamma)


def gated_rnn_with_logits(
    z: Tensor,
    x: Tensor,
    w_zh: Tensor,
    h0: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    gamma: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`gated_rnn`, and what its gates are sigmoids of, ``z_t + W_zh h_{t-1}``: [B, T, D] in
    the state's dtype. For those who look into the gate (`tidegate.nn.GatedRNN.gate_logits`)."""
    cu_seqlens = _offsets_on("gated_rnn_with_logits", cu_seqlens, x)
    return torch.ops.tidegate.gated_rnn_with_logits(z, x, w_zh, h0, cu_seqlens, gamma)


def gated_rnn_step(
    z: Tensor, x: Tensor, w_zh: Tensor, state: Tensor, *, gamma: Tensor | None = None
) -> Tensor:
    """One token of :func:`gated_rnn`, for decoding; the state is updated in place.

    Args:
        z: [B, D].
        x: [B, D].
        w_zh: [D, D].
        state: [B, D].
        gamma: [D].

    Returns:
        The new state in x's dtype, [B, D]. Has no gradient: raises when an argument requires one
        and gradients are recorded.
    """
    return torch.ops.tidegate.gated_rnn_step(z, x, w_zh, state, gamma)


def hgru(
    c: Tensor,
    f: Tensor,
    gamma: Tensor | None = None,
    theta: Tensor | None = None,
    h0: Tensor | None = None,
    *,
    activation: str = "silu",
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """HGRN's recurrence from pre-activations (arXiv 2311.04823, eq. 2; gamma: section 3.2).

    ``lambda_t = gamma + (1 - gamma) * sigmoid(f_t)``
    ``h_t = lambda_t * exp(i theta) * h_{t-1} + (1 - lambda_t) * act(c_t)``

    Real when theta is None. With theta it is complex, and c, h and the states hold their real parts
    in the first D channels and their imaginary parts in the last D; act works on each.

    Args:
        c: [B, T, D], complex [B, T, 2D]; float32, float64, bfloat16 or float16.
        f: [B, T, D] logits of the forget gate; float32 or c's dtype.
        gamma: [D] lower bounds of the forget gate, linear, in [0, 1); zero when None; float32 or
            c's dtype.
        theta: [D] phase in radians a step; float32 or c's dtype.
        h0: [N, D], complex [N, 2D]; zero when None; float32 or c's dtype.
        activation: "silu" or "none".
        reverse: scan each sequence from its last token: h0 enters after the last token and the
            final state is the first token's.
        cu_seqlens: int32 or int64 [N + 1] rising from 0 to T, on c's device or the CPU: N sequences
            packed along time, B = 1. Empty sequences are allowed.

    Returns:
        h in c's shape and dtype and the final state, [N, D] or [N, 2D], in float32 (float64 for
        float64); at T = 0 the state is a copy of h0.

    Cost O(B T D): reads c and f once, writes h once. Accumulates in the state's dtype; bitwise
    deterministic; training keeps the inputs and h.
    """
    _check_text("hgru", "activation", activation)
    _check_switch("hgru", "reverse", reverse)
    cu_seqlens = _offsets_on("hgru", cu_seqlens, c)
    return torch.ops.tidegate.hgru(c, f, gamma, theta, h0, activation, reverse, cu_seqlens)


def hgru_step(
    c: Tensor,
    f: Tensor,
    gamma: Tensor | None = None,
    theta: Tensor | None = None,
    state: Tensor | None = None,
    *,
    activation: str = "silu",
) -> Tensor:
    """One token of :func:`hgru`, for decoding; the state is updated in place.

    Args:
        c: [B, D], complex [B, 2D].
        f: [B, D] logits of the forget gate.
        gamma: [D] or None.
        theta: [D], or None for a real recurrence.
        state: [B, D], complex [B, 2D]. Required, though gamma and theta before it are not.
        activation: "silu" or "none".

    Returns:
        The new state in c's dtype and shape. Has no gradient: raises when an argument requires one
        and gradients are recorded.
    """
    _check_text("hgru_step", "activation", activation)
    return torch.ops.tidegate.hgru_step(c, f, gamma, theta, state, activation)


def lru_scan(
    x: Tensor,
    nu_log: Tensor,
    theta_log: Tensor | None,
    gamma_log: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The linear recurrent unit's recurrence (LRU, arXiv 2303.06349), from the projected input.

    ``lambda = exp(-exp(nu_log) + i exp(theta_log))``
    ``h_t = lambda * h_{t-1} + exp(gamma_log) * x_t``

    Real when theta_log is None (SLRU). With theta_log it is complex, and x, h and the states hold
    their real parts in the first D channels and their imaginary parts in the last D.

    Args:
        x: [B, T, D], complex [B, T, 2D]; float32, float64, bfloat16 or float16.
        nu_log: [D], natural logarithm of the decay rate a step, ``-log |lambda|``; float32, or
            float64 beside float64 x.
        theta_log: [D], natural logarithm of the phase in radians a step; dtype as nu_log's.
        gamma_log: [D], natural logarithm of the input's scale; dtype as nu_log's.
        h0: [N, D], complex [N, 2D]; zero when None; float32 or x's dtype.
        reverse: scan each sequence from its last token: h0 enters after the last token and the
            final state is the first token's.
        cu_seqlens: int32 or int64 [N + 1] rising from 0 to T, on x's device or the CPU: N sequences
            packed along time, B = 1. Empty sequences are allowed.

    Returns:
        h in x's shape and dtype and the final state, [N, D] or [N, 2D], in float32 (float64 for
        float64); at T = 0 the state is a copy of h0.

    Cost O(B T D): reads x once, writes h once. Accumulates in the state's dtype, with a lambda that
    keeps more digits than it; bitwise deterministic; training keeps the inputs and h.
    """
    _check_switch("lru_scan", "reverse", reverse)
    cu_seqlens = _offsets_on("lru_scan", cu_seqlens, x)
    return torch.ops.tidegate.lru_scan(x, nu_log, theta_log, gamma_log, h0, reverse, cu_seqlens)


def lru_scan_step(
    x: Tensor, nu_log: Tensor, theta_log: Tensor | None, gamma_log: Tensor, state: Tensor
) -> Tensor:
    """One token of :func:`lru_scan`, for decoding; the state is updated in place.

    Args:
        x: [B, D], complex [B, 2D].
        nu_log: [D].
        theta_log: [D], or None for a real recurrence.
        gamma_log: [D].
        state: [B, D], complex [B, 2D].

    Returns:
        The new state in x's dtype and shape. Has no gradient: raises when an argument requires one
        and gradients are recorded.
    """
    return torch.ops.tidegate.lru_scan_step(x, nu_log, theta_log, gamma_log, state)


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    h0: Tensor | None = None,
    *,
    scale: float = 1.0,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated linear attention (arXiv 2312.06635, eq. 3), of which HGRN2 is a case. For every head:

    ``S_t = diag(exp(log_f_t)) S_{t-1} + k_t v_t^T``
    ``o_t = scale * q_t^T S_t``

    Args:
        q: [B, T, H, K], float32, float64, bfloat16 or float16. K and V from 1 to 512.
        k: [B, T, H, K] in q's dtype.
        v: [B, T, H, V] in q's dtype.
        log_f: [B, T, H, K] natural logarithms of the decays, or [B, T, H, 1] for one gate a head;
            at most 0, down to -inf (a decay of zero); q's dtype, or float32 for 16-bit q.
        h0: [N, H, K, V], zero when None; float32 (float64 for float64) or q's dtype.
        scale: of the output. 1 here; fla's default is K^-0.5.
        reverse: scan each sequence from its last token: h0 enters after the last token and the
            final state is the first token's.
        cu_seqlens: int32 or int64 [N + 1] rising from 0 to T, on q's device or the CPU: N sequences
            packed along time, B = 1. Empty sequences are allowed.

    Returns:
        o [B, T, H, V] in q's dtype and the final state [N, H, K, V] in float32 (float64 for
        float64); at T = 0 the state is a copy of h0.

    Exact for any mixture of decays: no clamp, no overflow. Cost O(B T H K V). Accumulates in the
    state's dtype; bitwise deterministic; training keeps the inputs only and computes the states
    again. Any strides with a unit last one are read in place.
    """
    _check_number("gated_linear_attention", "scale", scale)
    _check_switch("gated_linear_attention", "reverse", reverse)
    cu_seqlens = _offsets_on("gated_linear_attention", cu_seqlens, q)
    return torch.ops.tidegate.gated_linear_attention(q, k, v, log_f, h0, scale, reverse, cu_seqlens)


def gated_linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, state: Tensor, *, scale: float = 1.0
) -> Tensor:
    """One token of :func:`gated_linear_attention`, for decoding; the state is updated in place.

    Args:
        q: [B, H, K].
        k: [B, H, K].
        v: [B, H, V].
        log_f: [B, H, K] or [B, H, 1].
        state: [B, H, K, V].
        scale: of the output.

    Returns:
        o [B, H, V]. Has no gradient: raises when an argument requires one and gradients are
        recorded. Reads and writes the state once.
    """
    _check_number("gated_linear_attention_step", "scale", scale)
    return torch.ops.tidegate.gated_linear_attention_step(q, k, v, log_f, state, scale)


def glu(x: Tensor, activation: str = "silu") -> Tensor:
    """The gated linear unit's product (arXiv 2002.05202), from the projection that makes both
    halves.

    ``y = act(gate) * value``, ``x = [gate | value]``

    Args:
        x: [..., 2F]; float32, float64, bfloat16 or float16. Any strides with a unit last one are
            read in place, where there are up to three dimensions before it.
        activation: "silu", "sigmoid" or "none".

    Returns:
        y [..., F] in x's dtype, rounded once. The gradient flows to x; the backward pass keeps x
        alone. Cost: one pass each way; backward reads x and dy and writes dx.
    """
    _check_tensor("glu", "x", x)
    _check_text("glu", "activation", activation)
    return torch.ops.tidegate.glu(x, activation)


def hgrn2(
    q: Tensor,
    f: Tensor,
    v: Tensor,
    gamma: Tensor | None = None,
    h0: Tensor | None = None,
    *,
    scale: float = 1.0,
    q_activation: str = "none",
    v_activation: str = "none",
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """HGRN2's recurrence from pre-activations (arXiv 2404.07904, eq. 3). For every head:

    ``lambda_t = gamma + (1 - gamma) * sigmoid(f_t)``, ``k_t = 1 - lambda_t``
    ``S_t = diag(lambda_t) S_{t-1} + k_t act_v(v_t)^T``
    ``o_t = scale * act_q(q_t)^T S_t``

    Args:
        q: [B, T, H, K], float32, float64, bfloat16 or float16. K and V from 1 to 512.
        f: [B, T, H, K] logits of the forget gate; q's dtype, or float32 for 16-bit q.
        v: [B, T, H, V] in q's dtype.
        gamma: [H, K] lower bounds of the forget gate, linear, in [0, 1); zero when None. float32 or
            q's dtype (float64 for float64).
        h0: [N, H, K, V], zero when None; float32 (float64 for float64) or q's dtype.
        scale: of the output.
        q_activation: "none", "silu" or "sigmoid", applied to q as it is read.
        v_activation: the same for v.
        reverse: scan each sequence from its last token: h0 enters after the last token and the
            final state is the first token's.
        cu_seqlens: int32 or int64 [N + 1] rising from 0 to T, on q's device or the CPU: N sequences
            packed along time, B = 1. Empty sequences are allowed.

    Returns:
        o [B, T, H, V] in q's dtype and the final state [N, H, K, V] in float32 (float64 for
        float64); at T = 0 the state is a copy of h0.

    q, f and v may be slices of one projection ``[B, T, 3 * H * K]``: any strides with a unit last
    one are read in place, and activations, keys and decays never reach memory, in the backward pass
    either. Exact for any gate. Cost O(B T H K V). Accumulates in the state's dtype; bitwise
    deterministic; training keeps the inputs only and computes the states again.
    """
    _check_number("hgrn2", "scale", scale)
    _check_text("hgrn2", "q_activation", q_activation)
    _check_text("hgrn2", "v_activation", v_activation)
    _check_switch("hgrn2", "reverse", reverse)
    cu_seqlens = _offsets_on("hgrn2", cu_seqlens, q)
    return torch.ops.tidegate.hgrn2(
        q, f, v, gamma, h0, scale, q_activation, v_activation, reverse, cu_seqlens
    )


def hgrn2_step(
    q: Tensor,
    f: Tensor,
    v: Tensor,
    gamma: Tensor | None = None,
    state: Tensor | None = None,
    *,
    scale: float = 1.0,
    q_activation: str = "none",
    v_activation: str = "none",
) -> Tensor:
    """One token of :func:`hgrn2`, for decoding; the state is updated in place.

    Args:
        q: [B, H, K].
        f: [B, H, K] logits of the forget gate.
        v: [B, H, V].
        gamma: [H, K] or None.
        state: [B, H, K, V]. Required, though gamma before it is not.
        scale: of the output.
        q_activation: "none", "silu" or "sigmoid".
        v_activation: the same for v.

    Returns:
        o [B, H, V]. Has no gradient: raises when an argument requires one and gradients are
        recorded. Reads and writes the state once.
    """
    _check_number("hgrn2_step", "scale", scale)
    _check_text("hgrn2_step", "q_activation", q_activation)
    _check_text("hgrn2_step", "v_activation", v_activation)
    return torch.ops.tidegate.hgrn2_step(q, f, v, gamma, state, scale, q_activation, v_activation)


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    kind: str = "rms",
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """A residual connection and the norm that follows it.

    ``residual_out = residual + x``, rounded to residual's dtype
    ``y = norm(residual_out, weight, bias, kind=kind, eps=eps)``

    Args:
        x: [..., D] as in :func:`norm`: what a layer adds.
        residual: like x, in x's dtype or float32 (float64 for float64): a residual stream may be
            wider than what is computed from it.
        weight, bias, kind, eps: as in :func:`norm`.

    Returns:
        (y in x's dtype, residual_out in residual's). Gradients flow through both to x, residual,
        weight and bias. Inside autocast x goes to autocast's dtype, and a float32 residual stays.
        Cost: one pass that reads x and residual and writes both results; the backward pass reads
        residual_out and the gradients of both, and writes one gradient (two where the dtypes
        differ).
    """
    _check_text("add_norm", "kind", kind)
    _check_number("add_norm", "eps", eps)
    return torch.ops.tidegate.add_norm(x, residual, weight, bias, kind, eps)


def forgetting_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    prune: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Forgetting attention (Forgetting Transformer, arXiv 2503.02130, eq. 10-12): causal
    softmax attention whose scores lose what the forget gates between key and query have forgotten.
    For every head, with ``c = cumsum(log_f)`` over time and query i at position p = i + Tk - Tq:

    ``o_i = sum_{j <= p} softmax_j(scale * q_i . k_j + c_p - c_j) v_j``

    Args:
        q: [B, Tq, Hq, D], float32, float64, bfloat16 or float16. D from 1 to 256.
        k: [B, Tk, Hkv, D] in q's dtype; Hkv divides Hq, and query head h reads head
            h // (Hq // Hkv).
        v: like k.
        log_f: [B, Tk, Hq] natural logarithms of the forget gates, at most 0; float32 or q's dtype.
            What is below -1e5, -inf included, counts as -1e5: it shuts any gate. The first token's
            gate is in no sum.
        scale: above 0; ``D ** -0.5`` when None.
        window: a query sees itself and the window - 1 keys before it; all keys when None.
        cu_seqlens: int32 or int64 [N + 1] rising from 0 to Tq, on q's device or the CPU: N
            sequences packed along time, B = 1. Empty sequences are allowed.
        cu_seqlens_k: the same for keys, rising to Tk; cu_seqlens when None, and then Tk = Tq.
            Tq <= Tk in every sequence: the last query is on the last key.
        prune: in [0, 1). Leaves out keys whose weights in a row are proven to be below prune
            together: an element of o changes by at most ``2 * prune * max|v|``. Worth it with gates
            that forget.
        return_lse: return (o, lse).

    Returns:
        o [B, Tq, Hq, D] in q's dtype; with return_lse also lse [B, Hq, Tq] in float32 (float64 for
        float64): the natural log of the sum of exponentials of a row's scores, c_p - c_j included.

    Memory is linear in Tq and Tk; cost O(B Hq Tq Tk D), less what window and prune leave out. The
    forward pass is bitwise deterministic; so is the backward pass on the CPU, and on CUDA under
    ``torch.use_deterministic_algorithms(True)``, while its default may add up dq and the row sums
    behind dlog_f with atomics. Training keeps the inputs, o and lse. Any strides with a unit last
    one are read in place.
    """
    _check_number("forgetting_attention", "scale", scale)
    _check_number("forgetting_attention", "window", window)
    _check_number("forgetting_attention", "prune", prune)
    _check_switch("forgetting_attention", "return_lse", return_lse)
    cu_seqlens = _offsets_on("forgetting_attention", cu_seqlens, q)
    cu_seqlens_k = _offsets_on("forgetting_attention", cu_seqlens_k, q, "cu_seqlens_k")
    o, lse = torch.ops.tidegate.forgetting_attention(
        q, k, v, log_f, scale, window, cu_seqlens, cu_seqlens_k, prune
    )
    return (o, lse) if return_lse else o


def forgetting_attention_step(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    gate_cache: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """The newest token of :func:`forgetting_attention` against a cache, for decoding.

    Args:
        q: [B, Hq, D].
        k_cache: [B, Tmax, Hkv, D] in q's dtype.
        v_cache: like k_cache.
        gate_cache: [B, Tmax, Hq], each token's own log_f, in float32 (float64 for float64). Sums
            are taken here, from the newest token backwards, so that they keep their digits however
            long the cache is.
        lengths: int32 [B], the number of tokens in each row of the cache, the current one included;
            0 gives o = 0. What lies behind them is never read. Below 0 counts as 0 and above Tmax
            as Tmax; with TIDEGATE_DEBUG=1 they raise, and so does a gate above 0.
        scale: above 0; ``D ** -0.5`` when None.
        window: as in :func:`forgetting_attention`.

    Returns:
        o [B, Hq, D]. Has no gradient: raises when an argument requires one and gradients are
        recorded. On CUDA, reads the cache once for up to eight query heads a key head (four on CUDA
        cores).
    """
    _check_number("forgetting_attention_step", "scale", scale)
    _check_number("forgetting_attention_step", "window", window)
    return torch.ops.tidegate.forgetting_attention_step(
        q, k_cache, v_cache, gate_cache, lengths, scale, window
    )


def norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    kind: str = "rms",
    gate_activation: str = "silu",
    gate_first: bool = False,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A norm of every row of x (LayerNorm, arXiv 1607.06450; RMSNorm, arXiv 1910.07467), with an
    optional gate before or after it.

    ``u = x``, or ``act(gate) * x`` with gate_first
    ``y = (u - mean(u)) / sqrt(var(u) + eps) * weight + bias`` (kind="layer")
    ``y = u / sqrt(mean(u^2) + eps) * weight + bias`` (kind="rms")
    ``y = act(gate) * y``, without gate_first

    Args:
        x: [..., D]; float32, float64, bfloat16 or float16. Any strides with a unit last one are
            read in place, where there are up to three dimensions before it.
        weight, bias: [D]; or [H, D] beside x [..., H, D], each head with its own; both of one
            shape. In x's dtype, y's or float32. None: one, and zero.
        gate: logits like x, or None.
        kind: "layer" or "rms".
        gate_activation: "silu" or "sigmoid".
        gate_first: the gate before the norm, instead of after it.
        eps: 0 or more.
        dtype: of y; None is x's, and inside autocast autocast's. Beside a float32 x without a gate
            it may be bfloat16 or float16.

    Returns:
        y [..., D]. Computed in float32 (float64 for float64), rounded once. Gradients flow to x,
        weight, bias and gate. Inside autocast, x and weights that are float32 stay so without a
        gate. Cost: one pass that reads x and gate and writes y; the backward pass reads these and
        dy and writes dx and dgate, and keeps nothing but them.
    """
    _check_tensor("norm", "x", x)
    _check_text("norm", "kind", kind)
    _check_text("norm", "gate_activation", gate_activation)
    _check_switch("norm", "gate_first", gate_first)
    _check_number("norm", "eps", eps)
    return torch.ops.tidegate.norm(
        x, weight, bias, gate, kind, gate_activation, gate_first, eps, dtype
    )


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotary positions (arXiv 2104.09864): channels i < D/2 and i + D/2 of every head turned by an
    angle.

    ``y_i = x_i cos_i - x_{i+D/2} sin_i``, ``y_{i+D/2} = x_{i+D/2} cos_i + x_i sin_i``

    Args:
        x: [B, T, H, D], D even; float32, float64, bfloat16 or float16. Any strides with a unit last
            one are read in place.
        cos, sin: [1, T, D/2] or [B, T, D/2], float32 (float64 for float64), of the angles in
            radians; constants: no gradient flows to them.
        inverse: turn by the angles' negatives, which is also the gradient.

    Returns:
        y [B, T, H, D] in x's dtype, rounded once. Differentiable as often as asked. Cost O(BTHD);
        one pass that reads x and writes y.
    """
    _check_switch("rotary", "inverse", inverse)
    return torch.ops.tidegate.rotary(x, cos, sin, inverse)


def wkv4(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """RWKV-4's token mixing (arXiv 2305.13048, eq. 16): a mean of the values so far, whose weights
    decay, with a bonus for the newest one.

    ``y_t = exp(-w) y_{t-1} + exp(k_t) v_t``, ``z_t = exp(-w) z_{t-1} + exp(k_t)``
    ``o_t = (y_{t-1} + exp(u + k_t) v_t) / (z_{t-1} + exp(u + k_t))``

    Args:
        w: [D] rates of decay a step, in natural logarithms, w >= 0; float32 or k's dtype.
        u: [D] the bonus, a natural logarithm; float32 or k's dtype.
        k: [B, T, D] natural logarithms of the weights, of any size; float32, float64, bfloat16 or
            float16.
        v: [B, T, D] in k's dtype.
        state: [N, 3, D]: y and z, scaled by exp(-m), and m; empty when None, as is one of zeros;
            float32 or k's dtype. m is a scaling exponent: its gradient is zero.
        cu_seqlens: int32 or int64 [N + 1] rising from 0 to T, on k's device or the CPU: N sequences
            packed along time, B = 1. Empty sequences are allowed.

    Returns:
        o [B, T, D] in k's dtype and the final state [N, 3, D] in float32 (float64 for float64); at
        T = 0 the state is a copy of the given one, zeros when there is none.

    Weights are taken relative to a running scaling exponent (on CUDA within a factor of 2^40 of
    it), so k may span any range; on CUDA values v up to about 2^60 in size stay finite. Cost
    O(B T D): reads k and v once, writes o once. Accumulates in the state's dtype; bitwise
    deterministic; training keeps the inputs and, for every eighth token, the state that enters it.
    """
    cu_seqlens = _offsets_on("wkv4", cu_seqlens, k)
    return torch.ops.tidegate.wkv4(w, u, k, v, state, cu_seqlens)


def wkv4_step(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
    """One token of :func:`wkv4`, for decoding; the state is updated in place.

    Args:
        w: [D].
        u: [D].
        k: [B, D].
        v: [B, D].
        state: [B, 3, D].

    Returns:
        o in k's dtype, [B, D]. Has no gradient: raises when an argument requires one and gradients
        are recorded.
    """
    return torch.ops.tidegate.wkv4_step(w, u, k, v, state)


def init_uniform_(p: Tensor, low: float, high: float) -> Tensor:
    """``p ~ U[low, high)``. Like all of these: drawn in float32 from torch's default CPU generator,
    then cast and copied to p; nothing drawn on the meta device; not recorded by autograd. The same
    draws as the C++ function's. A sharded p (a DTensor) gets its share of what one process would
    have drawn; the bare operator takes plain tensors only. Returns p.
    """
    _check_numbers("init_uniform_", p, low=low, high=high)
    fill(p, lambda t: torch.ops.tidegate.init_uniform_(t, low, high))
    return p


def init_normal_(p: Tensor, mean: float, std: float) -> Tensor:
    """``p ~ N(mean, std^2)``; see :func:`init_uniform_`."""
    _check_numbers("init_normal_", p, mean=mean, std=std)
    fill(p, lambda t: torch.ops.tidegate.init_normal_(t, mean, std))
    return p


def init_constant_(p: Tensor, value: float) -> Tensor:
    """``p = value``; see :func:`init_uniform_`."""
    _check_numbers("init_constant_", p, value=value)
    fill(p, lambda t: torch.ops.tidegate.init_constant_(t, value))
    return p


def init_chrono_(p: Tensor, t_max: int) -> Tensor:
    """``p = log u, u ~ U[1, t_max - 1)``, t_max of 2 or more; see :func:`init_uniform_`, and
    `tidegate.nn.init` for what it is for."""
    _check_numbers("init_chrono_", p, t_max=t_max)
    fill(p, lambda t: torch.ops.tidegate.init_chrono_(t, t_max))
    return p


def init_gumbel_softmax_(p: Tensor, d: int, alpha: float, tau: float) -> Tensor:
    """``p = (alpha + log u - log(1 - u)) / tau, u ~ U[1/d, 1 - 1/d)``, d of 2 or more, tau above 0;
    see :func:`init_uniform_`, and `tidegate.nn.init` for what it is for."""
    _check_numbers("init_gumbel_softmax_", p, d=d, alpha=alpha, tau=tau)
    fill(p, lambda t: torch.ops.tidegate.init_gumbel_softmax_(t, d, alpha, tau))
    return p


def init_lru_nu_log_(p: Tensor, r_min: float, r_max: float) -> Tensor:
    """``p = log(-log r), r^2 ~ U[r_min^2, r_max^2)``: ``exp(-exp(p))`` is the modulus of a number
    uniform on a ring (LRU, arXiv 2303.06349). 0 <= r_min <= r_max <= 1, not both 0 nor both 1; see
    :func:`init_uniform_`."""
    _check_numbers("init_lru_nu_log_", p, r_min=r_min, r_max=r_max)
    fill(p, lambda t: torch.ops.tidegate.init_lru_nu_log_(t, r_min, r_max))
    return p


def init_lru_theta_log_(p: Tensor, max_phase: float) -> Tensor:
    """``p = log theta, theta ~ U(0, max_phase)``, in radians a step; see :func:`init_uniform_`."""
    _check_numbers("init_lru_theta_log_", p, max_phase=max_phase)
    fill(p, lambda t: torch.ops.tidegate.init_lru_theta_log_(t, max_phase))
    return p


def init_lru_gamma_log_(p: Tensor, nu_log: Tensor) -> Tensor:
    """``p = log sqrt(1 - r^2), r = exp(-exp(nu_log))``: keeps the size of a state whose inputs are
    independent; nu_log has p's shape; see :func:`init_uniform_`."""
    _check_numbers("init_lru_gamma_log_", p)
    _check_tensor("init_lru_gamma_log_", "nu_log", nu_log)
    with torch.no_grad():
        rates = nu_log.full_tensor() if hasattr(nu_log, "device_mesh") else nu_log.detach()
    fill(p, lambda t: torch.ops.tidegate.init_lru_gamma_log_(t, rates))
    return p


def init_long_(p: Tensor, t_min: float, t_max: float) -> Tensor:
    """``p_h = -log(exp(1 / T_h) - 1)`` for p [H], T_h from t_min to t_max, both above 0, in equal
    steps of log T (one head: t_min): a gate sigmoid(p_h) forgets over T_h tokens,
    ``sigmoid(p_h)^T_h = 1 / e`` (Forgetting Transformer, section 4.5); see :func:`init_uniform_`.
    """
    _check_numbers("init_long_", p, t_min=t_min, t_max=t_max)
    fill(p, lambda t: torch.ops.tidegate.init_long_(t, t_min, t_max))
    return p


def init_rope_theta_(p: Tensor) -> Tensor:
    """``p_j = 10000^(-2 j / d)`` for p [d]: HGRN's phases, in radians a step, which spread like the
    frequencies of rotary embeddings (arXiv 2104.09864); see :func:`init_uniform_`.
    """
    _check_numbers("init_rope_theta_", p)
    fill(p, torch.ops.tidegate.init_rope_theta_)
    return p


globals().update(_library.stand_ins([*__all__, "gated_rnn_with_logits", "packed_bounds"]))
