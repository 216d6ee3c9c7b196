"""The public functions of the compression memory. Equations in README.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ... import checks
from ..dispatch import no_autocast
from .activations import F_NAMES, FUNCTIONS, PHI_NAMES, PSI_NAMES, l2norm
from .backends import choose
from .library import compress as compress_chunked
from .reference import compress_reference
from .start import VALUE_PASSES, effective_minibatch, pass_state
from .state import MemoryState, PassState, move_on
from .step import compress_token

T = TypeVar("T")


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
        initial_state: PassState or its memory alone, [N, H, M, D]; zeros by default.
        cu_seqlens: [N+1] bounds of N sequences packed into one row (B = 1), each of which
            starts from its own entry of `initial_state`. Without it N = B.
        backend: "auto", "reference" (the definition) or "chunked" (PyTorch, any device).

    Returns:
        y [B, T, H, M] ([B, T, H, D] if transposed) in the dtype of `query`, and the final
        PassState, or None unless `output_final_state`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message says which and why.
    """
    checks.choice("phi", phi, PHI_NAMES)
    checks.floats(query=query, x=x, target=target, log_beta=log_beta, gamma=gamma)
    checks.dimensions("x", x, "[B,T,H,D]")
    checks.dimensions("target", target, "[B,T,H,M]")
    batch, tokens, heads, width = x.shape
    slots = target.shape[3]
    checks.shape("target", target, (batch, tokens, heads, slots), "[B,T,H,M]")
    if transposed:
        checks.shape("query", query, (batch, tokens, heads, slots), "[B,T,H,M]")
    else:
        checks.shape("query", query, (batch, tokens, heads, width), "[B,T,H,D]")
    checks.shape("log_beta", log_beta, (batch, tokens, heads), "[B,T,H]")
    checks.shape("gamma", gamma, (batch, tokens, heads), "[B,T,H]")

    if isinstance(initial_state, Tensor):
        initial_state = PassState(initial_state)
    backend = choose(backend, (query, x, target, log_beta, gamma), two_passes=False)
    y, state = _compress(
        query, x, target, log_beta, gamma, phi, effective_minibatch(mode, minibatch),
        transposed, initial_state, cu_seqlens, backend, "initial_state",
    )  # fmt: skip
    return y.to(query.dtype), state if output_final_state else None


def trellis_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    log_beta: Tensor | tuple[Tensor, Tensor],
    gamma: Tensor | tuple[Tensor, Tensor],
    *,
    phi: str = "silu",
    f: str = "ln_silu",
    psi: str = "identity",
    value_pass: str = "encode",
    mode: str = "exact",
    minibatch: int = 16,
    initial_state: MemoryState | tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, MemoryState | None]:
    """The two-pass compression memory: a key pass, f, and a value pass.

        r = f(compress(q, k, alpha))
        y = psi(compress(r, v, alpha, transposed))             value_pass="encode"
        y = psi(compress(r, alpha / |alpha|, v, identity))     value_pass="decode"

    Args:
        q, k: [B, T, H, K]. v: [B, T, H, V]. alpha: [B, T, H, M], the code of each token.
        log_beta, gamma: [B, T, H], or a pair of these, one for each pass.
        f: ln_silu, l2_silu, softmax, silu or identity. psi: identity, or any phi.
        initial_state: MemoryState, or the pair (keys, values); zeros by default.
        backend: "auto", "reference" (the definition), "chunked" (PyTorch, any device) or
            "native" (a fused CPU kernel, fp32). "auto" takes the native kernel where it can.
        The rest as in `compress`.

    Returns:
        y [B, T, H, V] in the dtype of `q`, and the final MemoryState (fp32, fp64 for fp64
        inputs), or None unless `output_final_state`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message says which and why.
    """
    log_betas, gammas = _pair("log_beta", log_beta), _pair("gamma", gamma)
    _check_memory(q, k, v, alpha, log_betas, gammas, phi, f, psi, value_pass, "[B,T,H")
    count = effective_minibatch(mode, minibatch)
    backend = choose(backend, (q, k, v, alpha, *log_betas, *gammas), two_passes=True)
    state = _memory_state(initial_state)
    if backend == "native":
        y, final = _run_native(
            q, k, v, alpha, log_betas, gammas, phi, f, psi, value_pass, count, state, cu_seqlens
        )
        return y, final if output_final_state else None

    yhat, keys = _compress(
        q, k, alpha, log_betas[0], gammas[0], phi, count, False,
        state and state.key_pass, cu_seqlens, backend, "initial_state.keys",
    )  # fmt: skip
    r = FUNCTIONS[f](yhat)
    write, target, phi, transposed = value_write(v, alpha, phi, value_pass)
    y, values = _compress(
        r, write, target, log_betas[1], gammas[1], phi, count, transposed,
        state and state.value_pass, cu_seqlens, backend, "initial_state.values",
    )  # fmt: skip
    y = FUNCTIONS[psi](y).to(q.dtype)
    return y, MemoryState.join(keys, values) if output_final_state else None


def trellis_memory_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    log_beta: Tensor | tuple[Tensor, Tensor],
    gamma: Tensor | tuple[Tensor, Tensor],
    *,
    phi: str = "silu",
    f: str = "ln_silu",
    psi: str = "identity",
    value_pass: str = "encode",
    mode: str = "exact",
    minibatch: int = 16,
    initial_state: MemoryState | tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, MemoryState]:
    """One token of `trellis_memory`, for decoding: the same arguments without the T dimension.

    Returns y [B, H, V] and the state after the token. The chunked backend has a short path for it
    where no gradients are needed; else it is `trellis_memory` with one token.
    """
    log_betas, gammas = _pair("log_beta", log_beta), _pair("gamma", gamma)
    _check_memory(q, k, v, alpha, log_betas, gammas, phi, f, psi, value_pass, "[B,H")
    count = effective_minibatch(mode, minibatch)
    state = _memory_state(initial_state)
    inputs = (q, k, v, alpha, *log_betas, *gammas)
    backend = choose(backend, (t[:, None] for t in inputs), two_passes=True)
    if backend != "chunked" or _wants_gradients((*inputs, *(state or ()))):
        y, final = trellis_memory(
            q[:, None], k[:, None], v[:, None], alpha[:, None],
            (log_betas[0][:, None], log_betas[1][:, None]),
            (gammas[0][:, None], gammas[1][:, None]),
            phi=phi, f=f, psi=psi, value_pass=value_pass, mode=mode, minibatch=minibatch,
            initial_state=state, output_final_state=True, backend=backend,
        )  # fmt: skip
        assert final is not None
        return y[:, 0], final
    with no_autocast(q.device):
        before = _start(k, alpha, state and state.key_pass, None, count, "initial_state.keys")
        yhat, keys = compress_token(
            q, k, alpha, log_betas[0], gammas[0], before,
            phi=phi, minibatch=count, transposed=False,
        )  # fmt: skip
        r = FUNCTIONS[f](yhat)
        write, target, phi, transposed = value_write(v, alpha, phi, value_pass)
        before = _start(
            write, target, state and state.value_pass, None, count, "initial_state.values"
        )
        y, values = compress_token(
            r, write, target, log_betas[1], gammas[1], before,
            phi=phi, minibatch=count, transposed=transposed,
        )  # fmt: skip
        return FUNCTIONS[psi](y).to(q.dtype), MemoryState.join(keys, values)


def _compress(
    query: Tensor,
    x: Tensor,
    target: Tensor,
    log_beta: Tensor,
    gamma: Tensor,
    phi: str,
    minibatch: int,
    transposed: bool,
    state: PassState | None,
    cu_seqlens: Tensor | None,
    backend: str,
    state_name: str,
) -> tuple[Tensor, PassState]:
    """One checked pass. y comes in the dtype of the computation."""
    start = _start(x, target, state, cu_seqlens, minibatch, state_name)
    if backend == "reference":
        return _run_reference(
            (query, x, target, log_beta, gamma), start, cu_seqlens, phi, minibatch, transposed
        )
    tensors = (query, x, target, log_beta, gamma, start.memory, start.anchor)
    y, memory, anchor, _ = compress_chunked(
        *tensors, start.offset, cu_seqlens, phi, minibatch, transposed, _wants_gradients(tensors)
    )
    if start.offset is None:
        return y, PassState(memory)
    read = x.shape[1] if cu_seqlens is None else cu_seqlens.diff()
    return y, move_on(memory, anchor, start.offset + read, minibatch)


def _run_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    log_betas: tuple[Tensor, Tensor],
    gammas: tuple[Tensor, Tensor],
    phi: str,
    f: str,
    psi: str,
    value_pass: str,
    minibatch: int,
    state: MemoryState | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, MemoryState]:
    """Both passes in the fused kernel. What they share is passed once."""
    from .native.library import memory as memory_native

    x2, target2, phi2, transposed = value_write(v, alpha, phi, value_pass)
    first = _start(k, alpha, state and state.key_pass, cu_seqlens, minibatch, "initial_state.keys")
    second = _start(
        x2, target2, state and state.value_pass, cu_seqlens, minibatch, "initial_state.values"
    )
    tensors = (
        q, k, alpha, x2, None if target2 is alpha else target2,
        log_betas[0], gammas[0],
        None if log_betas[1] is log_betas[0] else log_betas[1],
        None if gammas[1] is gammas[0] else gammas[1],
        first.memory, second.memory, first.anchor, second.anchor,
    )  # fmt: skip
    y, keys, values, key_anchor, value_anchor, _ = memory_native(
        *tensors, first.offset, cu_seqlens, phi, phi2, f, psi, transposed, minibatch,
        _wants_gradients(tensors),
    )  # fmt: skip
    if first.offset is None:
        return y, MemoryState(keys, values)
    read = k.shape[1] if cu_seqlens is None else cu_seqlens.diff()
    offset = first.offset + read
    return y, MemoryState.join(
        move_on(keys, key_anchor, offset, minibatch),
        move_on(values, value_anchor, offset, minibatch),
    )


def _wants_gradients(tensors: Iterable[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _run_reference(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    start: PassState,
    cu_seqlens: Tensor | None,
    phi: str,
    minibatch: int,
    transposed: bool,
) -> tuple[Tensor, PassState]:
    def run(tensors: Sequence[Tensor], state: PassState) -> tuple[Tensor, PassState]:
        q, x, target, log_beta, gamma = tensors
        return compress_reference(
            q, x, target, log_beta, gamma, state,
            phi=phi, minibatch=minibatch, transposed=transposed,
        )  # fmt: skip

    with no_autocast(tensors[0].device):
        if cu_seqlens is None:
            return run(tensors, start)
        bounds = checks.bounds(cu_seqlens, tensors[0].shape[1])
        runs = [
            run([t[:, begin:end] for t in tensors], start.select(slice(n, n + 1)))
            for n, (begin, end) in enumerate(zip(bounds, bounds[1:]))
        ]
        if not runs:
            return run(tensors, start)
        return torch.cat([y for y, _ in runs], dim=1), PassState.cat([s for _, s in runs])


def _start(
    x: Tensor,
    target: Tensor,
    state: PassState | None,
    cu_seqlens: Tensor | None,
    minibatch: int,
    name: str,
) -> PassState:
    """The state to start from, checked against the shapes of x and target."""
    count = checks.sequences(x.shape[0], cu_seqlens, x.device)
    expected = (count, x.shape[-2], target.shape[-1], x.shape[-1])
    dtype = checks.compute_dtype(x, target)
    if state is None:
        state = PassState(torch.zeros(expected, dtype=dtype, device=x.device))
    return pass_state(name, state, expected, minibatch, dtype)


def value_write(
    v: Tensor, alpha: Tensor, phi: str, value_pass: str
) -> tuple[Tensor, Tensor, str, bool]:
    """(x, target, phi, transposed) of the value pass."""
    if value_pass == "encode":
        return v, alpha, phi, True
    return l2norm(alpha.to(checks.compute_dtype(alpha))), v, "identity", False


def _check_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    log_betas: tuple[Tensor, Tensor],
    gammas: tuple[Tensor, Tensor],
    phi: str,
    f: str,
    psi: str,
    value_pass: str,
    leading: str,
) -> None:
    checks.choice("phi", phi, PHI_NAMES)
    checks.choice("f", f, F_NAMES)
    checks.choice("psi", psi, PSI_NAMES)
    checks.choice("value_pass", value_pass, VALUE_PASSES)
    checks.floats(
        q=q, k=k, v=v, alpha=alpha, log_beta=log_betas[0], gamma=gammas[0],
        **{"log_beta[1]": log_betas[1], "gamma[1]": gammas[1]},
    )  # fmt: skip
    checks.dimensions("q", q, f"{leading},K]")
    lead = q.shape[:-1]
    checks.shape("k", k, q.shape, f"{leading},K]")
    for name, tensor, letter in (("v", v, "V"), ("alpha", alpha, "M")):
        checks.dimensions(name, tensor, f"{leading},{letter}]")
        checks.shape(name, tensor, (*lead, tensor.shape[-1]), f"{leading},{letter}]")
    for name, pair in (("log_beta", log_betas), ("gamma", gammas)):
        for tensor in pair:
            checks.shape(name, tensor, lead, f"{leading}]")


def _pair(name: str, given: T | tuple[T, T]) -> tuple[T, T]:
    if isinstance(given, (tuple, list)):
        if len(given) != 2:
            raise ValueError(
                f"{name} must be one tensor or a pair (key pass, value pass); got {len(given)}"
            )
        return given[0], given[1]
    return given, given


def _memory_state(state: MemoryState | tuple[Tensor, Tensor] | None) -> MemoryState | None:
    if state is None or isinstance(state, MemoryState):
        return state
    if not isinstance(state, (tuple, list)) or len(state) not in (2, 5):
        raise ValueError(
            "initial_state must be a MemoryState or the pair (keys, values); "
            f"got {type(state).__name__}"
        )
    return MemoryState(*state)
