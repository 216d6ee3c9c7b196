"""The compression memory: its public functions. Equations in README.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ... import checks
from ..dispatch import Backend, Backends
from ..recurrence import run
from . import custom_op, triton
from .activations import F_NAMES, FUNCTIONS, PHI_NAMES, PSI_NAMES, l2norm
from .chunked import Compression
from .state import Call, MemoryState, Pass, PassState, anchored, tokens_read

__all__ = [
    "BACKENDS",
    "ERROR_AT",
    "MODES",
    "VALUE_PASSES",
    "MemoryState",
    "PassState",
    "compress",
    "trellis_memory",
    "trellis_memory_step",
    "value_write",
]

MODES = ("exact", "stale")
ERROR_AT = ("before", "after")
VALUE_PASSES = ("encode", "decode")

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """The options of `trellis_memory` that decide what it computes, with their defaults."""

    phi: str = "silu"
    f: str = "ln_silu"
    psi: str = "identity"
    value_pass: str = "encode"
    mode: str = "exact"
    minibatch: int = 16
    error_at: str = "before"


def compress(
    query: Tensor,
    x: Tensor,
    target: Tensor,
    log_beta: Tensor,
    gamma: Tensor,
    *,
    phi: str = "silu",
    mode: str = "exact",
    minibatch: int = 16,
    error_at: str = "before",
    transposed: bool = False,
    initial_state: PassState | Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, PassState | None]:
    """One pass: write every token into a memory M by one gradient step, then read it.

        M <- beta M - gamma J_phi(Mx)^T (phi(Mx) - target) x^T
        y = M query, or M^T query if `transposed`

    Args:
        query: [B, T, H, D], or [B, T, H, M] if transposed.
        x: [B, T, H, D], what is written. target: [B, T, H, M], the code it is to get.
        log_beta: [B, T, H], the log of the forget gate, at most 0; -inf forgets everything.
        gamma: [B, T, H], the step size, at least 0.
        phi: identity, silu, gelu, tanh, layernorm, l2norm or ln_silu.
        mode: "exact" takes the gradient at the memory of the token before; "stale" at the
            memory at the start of the mini-batch of `minibatch` tokens.
        error_at: "before" takes the error phi(Mx) - target at this memory as it is, as the paper
            does; "after" at this memory times the token's beta, as Gated DeltaNet does.
        initial_state: PassState or its memory alone, [N, H, M, D]; zeros by default.
        cu_seqlens: [N+1] bounds of N sequences packed into one row (B = 1), each of which
            starts from its own entry of `initial_state`. Without it N = B.
        backend: "auto", "reference" (the definition), "chunked" (PyTorch, any device) or "triton"
            (GPUs). "auto" takes Triton's kernels where it can.

    Returns:
        y [B, T, H, M] ([B, T, H, D] if transposed) in the dtype of `query`, and the final
        PassState, or None unless `output_final_state`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message says which and why.
    """
    checks.choice("phi", phi, PHI_NAMES)
    checks.choice("error_at", error_at, ERROR_AT)
    checks.sizes(
        x=(x, "B,T,H,D"), target=(target, "B,T,H,M"),
        query=(query, "B,T,H,M" if transposed else "B,T,H,D"),
        log_beta=(log_beta, "B,T,H"), gamma=(gamma, "B,T,H"),
    )  # fmt: skip
    if backend == "native":
        raise ValueError(
            "backend='native' cannot run here: it computes both passes at once; compress has "
            "'triton', 'chunked' and 'reference'"
        )
    checks.choice("backend", backend, BACKENDS)
    if isinstance(initial_state, Tensor):
        initial_state = PassState(initial_state)
    count = _effective_minibatch(mode, minibatch)
    start = _start("initial_state", x, target, initial_state, count, cu_seqlens)
    one = Pass(x, target, log_beta, gamma, phi, transposed, start)
    call = (one, query, count, error_at, cu_seqlens)
    one_token = cu_seqlens is None and x.shape[1] == 1
    y, state = _PASS_BACKENDS.choose(backend, call, one_token=one_token).run(call)
    return y.to(query.dtype), state if output_final_state else None


def trellis_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    log_beta: Tensor | tuple[Tensor, Tensor],
    gamma: Tensor | tuple[Tensor, Tensor],
    *,
    phi: str = Options.phi,
    f: str = Options.f,
    psi: str = Options.psi,
    value_pass: str = Options.value_pass,
    mode: str = Options.mode,
    minibatch: int = Options.minibatch,
    error_at: str = Options.error_at,
    initial_state: MemoryState | tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    recompute: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, MemoryState | None]:
    """The two-pass compression memory: a key pass, f, and a value pass.

        r = f(compress(q, k, alpha))
        y = psi(compress(r, v, alpha, transposed))             value_pass="encode"
        y = psi(compress(r, alpha / |alpha|, v, identity))     value_pass="decode"

    Args:
        q, k: [B, T, H, K]. v: [B, T, H, V]. alpha: [B, T, H, M], the code of each token.
        log_beta, gamma: [B, T, H], or a pair of these, one for each pass.
        f: ln_silu, soft_ln_silu, l2_silu, softmax, silu or identity. psi: identity, or any phi.
        initial_state: MemoryState, or the pair (keys, values); zeros by default.
        recompute: the triton backend keeps the inputs alone for the backward, and computes the rest
            again, to the same bits. The other backends always do so.
        backend: "auto", "reference" (the definition), "chunked" (PyTorch, any device), "native" (a
            fused CPU kernel, fp32) or "triton" (GPUs). "auto" takes the first of native, triton
            and chunked that can compute the call.
        The rest as in `compress`.

    Returns:
        y [B, T, H, V] in the dtype of `q`, and the final MemoryState (fp32, fp64 for fp64
        inputs), or None unless `output_final_state`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message says which and why.
    """
    options = Options(phi, f, psi, value_pass, mode, minibatch, error_at)
    tensors = (q, k, v, alpha, log_beta, gamma)
    checks.flag("recompute", recompute)
    call = _checked("B,T,H", *tensors, options, initial_state, cu_seqlens)
    call = call._replace(recompute=recompute)
    checks.choice("backend", backend, BACKENDS)
    one_token = cu_seqlens is None and q.shape[1] == 1
    y, state = _BACKENDS.choose(backend, call, one_token=one_token).run(call)
    return y, state if output_final_state else None


def trellis_memory_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    log_beta: Tensor | tuple[Tensor, Tensor],
    gamma: Tensor | tuple[Tensor, Tensor],
    *,
    initial_state: MemoryState | tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
    **options: Any,
) -> tuple[Tensor, MemoryState]:
    """One token of `trellis_memory`, for decoding: the same arguments without the T dimension.

    options: phi, f, psi, value_pass, mode, minibatch and error_at of `trellis_memory`.

    Returns y [B, H, V] and the state after the token. There is nothing to put in chunks: with
    backend="chunked" the definition runs.
    """
    tensors = (q, k, v, alpha, log_beta, gamma)
    call = _checked("B,H", *tensors, Options(**options), initial_state)
    checks.choice("backend", backend, BACKENDS)
    chosen = _BACKENDS.choose(backend, call, one_token=True)
    y, state = chosen.run(call) if chosen.one_token else _run_passes(call, "reference")
    return y[:, 0], state


def value_write(
    v: Tensor, alpha: Tensor, phi: str, value_pass: str
) -> tuple[Tensor, Tensor, str, bool]:
    """(x, target, phi, transposed) of the value pass."""
    if value_pass == "encode":
        return v, alpha, phi, True
    return l2norm(alpha.to(checks.compute_dtype(alpha))), v, "identity", False


def _run_passes(call: Call, backend: str) -> tuple[Tensor, MemoryState]:
    """One pass after the other, with f between them."""
    options = (call.minibatch, call.error_at, call.cu_seqlens, backend)
    yhat, keys = _run_pass(call.keys, call.q, *options)
    y, values = _run_pass(call.values, FUNCTIONS[call.f](yhat), *options)
    return FUNCTIONS[call.psi](y).to(call.q.dtype), MemoryState.join(keys, values)


def _run_pass(
    one: Pass,
    query: Tensor,
    minibatch: int,
    error_at: str,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, PassState]:
    """y is in the dtype of the computation."""
    memory, anchor, offset = one.start
    state: tuple[Tensor, ...] = (memory,)
    if anchor is not None and offset is not None:
        state = (memory, anchor, offset.to(memory.dtype))
    y, final = run(
        Compression.of(one.phi, one.transposed, error_at, minibatch),
        (query, one.x, one.target, one.log_decay, one.step_size), state,
        cu_seqlens=cu_seqlens, offset=offset, backend=backend,
    )  # fmt: skip
    if offset is None:
        return y, PassState(final[0])
    offset = one.start.moved_on(tokens_read(query, cu_seqlens), minibatch)
    return y, PassState(final[0], anchored(final[0], final[1], offset), offset)


def _unpacked(function: Callable[..., Any], *more: str) -> Callable[[Any], Any]:
    return lambda call: function(*call, *more)


_BACKENDS = Backends(
    Backend("native", custom_op.run, custom_op.unfit, custom_op.missing_kernel),
    Backend("triton", triton.run, triton.unfit, triton.missing),
    Backend("chunked", partial(_run_passes, backend="chunked"), one_token=False),
    Backend("reference", partial(_run_passes, backend="reference")),
)
#: What the argument `backend` may be.
BACKENDS = _BACKENDS.names
#: For one pass. A call is the tuple of the arguments of _run_pass, without the last.
_PASS_BACKENDS = Backends(
    Backend("triton", _unpacked(triton.run_pass), _unpacked(triton.unfit_pass), triton.missing),
    Backend("chunked", _unpacked(_run_pass, "chunked"), one_token=False),
    Backend("reference", _unpacked(_run_pass, "reference")),
)


def _checked(
    lead: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    log_beta: Tensor | tuple[Tensor, Tensor],
    gamma: Tensor | tuple[Tensor, Tensor],
    options: Options,
    initial_state: MemoryState | tuple[Tensor, Tensor] | None,
    cu_seqlens: Tensor | None = None,
) -> Call:
    """lead: the first letters of all shapes, "B,T,H", or "B,H" for a single token."""
    checks.choice("phi", options.phi, PHI_NAMES)
    checks.choice("error_at", options.error_at, ERROR_AT)
    checks.choice("f", options.f, F_NAMES)
    checks.choice("psi", options.psi, PSI_NAMES)
    checks.choice("value_pass", options.value_pass, VALUE_PASSES)
    log_betas, gammas = _pair("log_beta", log_beta), _pair("gamma", gamma)
    checks.sizes(
        q=(q, f"{lead},K"), k=(k, f"{lead},K"), v=(v, f"{lead},V"), alpha=(alpha, f"{lead},M"),
        log_beta=(log_betas[0], lead), gamma=(gammas[0], lead),
        **{"log_beta[1]": (log_betas[1], lead), "gamma[1]": (gammas[1], lead)},
    )  # fmt: skip
    if "T" not in lead:
        q, k, v, alpha = (x.unsqueeze(1) for x in (q, k, v, alpha))
        log_betas, gammas = _with_time(log_betas), _with_time(gammas)

    count = _effective_minibatch(options.mode, options.minibatch)
    state = None
    if initial_state is not None:
        what = "a MemoryState or the pair (keys, values)"
        state = MemoryState(*checks.parts("initial_state", initial_state, (2, 5), what))
    start = _start("initial_state.keys", k, alpha, state and state.key_pass, count, cu_seqlens)
    keys = Pass(k, alpha, log_betas[0], gammas[0], options.phi, False, start)
    x, target, phi, transposed = value_write(v, alpha, options.phi, options.value_pass)
    start = _start("initial_state.values", x, target, state and state.value_pass, count, cu_seqlens)
    values = Pass(x, target, log_betas[1], gammas[1], phi, transposed, start)
    return Call(q, keys, values, options.f, options.psi, count, options.error_at, cu_seqlens)


def _effective_minibatch(mode: str, minibatch: int) -> int:
    """1 for exact mode: a mini-batch of one token is the exact recurrence."""
    checks.choice("mode", mode, MODES)
    checks.at_least("minibatch", minibatch, 1)
    return minibatch if mode == "stale" else 1


def _start(
    name: str,
    x: Tensor,
    target: Tensor,
    state: PassState | None,
    minibatch: int,
    cu_seqlens: Tensor | None,
) -> PassState:
    """The state to start from, checked against the shapes of x and target."""
    count = checks.sequences(x.shape[0], cu_seqlens, x.device)
    expected = (count, x.shape[2], target.shape[3], x.shape[3])
    dtype = checks.compute_dtype(x, target)
    if state is None:
        state = PassState(torch.zeros(expected, dtype=dtype, device=x.device))
    return state.checked(name, expected, minibatch, dtype)


def _pair(name: str, given: T | tuple[T, T]) -> tuple[T, T]:
    if isinstance(given, (tuple, list)):
        if len(given) != 2:
            raise ValueError(
                f"{name} must be one tensor or a pair (key pass, value pass); got {len(given)}"
            )
        return given[0], given[1]
    return given, given


def _with_time(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """[B, H] each -> [B, 1, H]. What both passes share stays one tensor."""
    first, second = pair
    with_time = first.unsqueeze(1)
    return with_time, with_time if second is first else second.unsqueeze(1)
