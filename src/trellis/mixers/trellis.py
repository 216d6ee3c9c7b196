"""The Trellis mixer: two passes of a memory that learns while it reads.

    x -> q, k, v (short convolution and SiLU on some) -> unit length per head
      -> alpha, the code of each token; gamma, the step size; beta, the forget gate
      -> trellis_memory -> RMSNorm per head -> * GELU(gate) -> output projection

Paper: "Trellis: Learning to Compress Key-Value Memory in Attention Models". The equations of the
memory are in ops/memory/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..ops import MemoryState, trellis_memory, trellis_memory_step, unit_length
from ..ops.memory import BACKENDS, MODES, VALUE_PASSES
from ..ops.memory.activations import F_NAMES, NORMALISING_PHI, PHI_NAMES, PSI_NAMES
from .base import Mixer, head_size
from .layers import (
    DecayGate,
    GatedNorm,
    RMSNorm,
    StreamConvolutions,
    blank_state,
    sequences,
    wide,
)

STEPS = ("sigmoid", "softplus", "constant")
DECAYS = ("softplus", "sigmoid")
#: Beside |k|^2 and |v|^2 in the normalised-LMS step.
LMS_EPSILON = 1e-6


@dataclass
class TrellisMixerConfig:
    """Every choice of the mixer. The defaults are the paper's, in exact mode.

    heads: number of heads; None takes the model's `num_attention_heads`.
    slots: memory slots per head (m); None takes the head size.
    phi: non-linearity of the compression (identity is the paper's "linear").
    f: non-linearity between the passes. psi: non-linearity of the output.
    mode: "exact", or "stale" with the gradient taken once per mini-batch.
    minibatch: tokens per mini-batch in stale mode; the step size is divided by it there.
    value_pass: "encode" (the paper's) regresses the code from the value and reads with the
        transpose; "decode" regresses the value from the code.
    conv_width: width of the causal convolution; 0 leaves it out.
    conv_on: the streams it acts on, of "q", "k" and "v". SiLU follows it.
    normalize: the streams scaled to unit length per head; None means q, k and v, and with
        value_pass="decode", where v is a target, q and k.
    lms_step: divide the step size by |k|^2 in the key pass and by |v|^2 in the value pass
        (normalised LMS), instead of normalising k and v.
    step: gamma = step_max * sigmoid(.), softplus(.) without a bound, or the constant step_max.
    step_max: upper end of gamma's range. step_bias: the bias that gamma's projection starts at.
    forget_gate: False keeps everything (beta = 1).
    decay: "softplus": log_beta = -exp(A_log) softplus(. + dt_bias), or
        "sigmoid": log_beta = logsigmoid(.) / decay_temperature.
    decay_rate, decay_step: ranges that exp(A_log) and softplus(dt_bias) start in.
    separate_gates: one gamma and one beta for each pass, instead of one for both.
    normalize_alpha: an RMS norm, with a learnable scale, on each head's code.
    learn_initial_memory: start from learned memories instead of zeros; None means only where
        phi is degenerate at zero (layernorm, l2norm, ln_silu).
    initial_memory_std: spread of the learned memories at initialisation.
    norm_eps: epsilon of the RMS norms. backend: the op's backend.
    """

    heads: int | None = None
    slots: int | None = None
    phi: str = "silu"
    f: str = "ln_silu"
    psi: str = "identity"
    mode: str = "exact"
    minibatch: int = 16
    value_pass: str = "encode"
    conv_width: int = 4
    conv_on: tuple[str, ...] = ("q", "k")
    normalize: tuple[str, ...] | None = None
    lms_step: bool = False
    step: str = "sigmoid"
    step_max: float = 1.0
    step_bias: float = 0.0
    forget_gate: bool = True
    decay: str = "softplus"
    decay_rate: tuple[float, float] = (1.0, 16.0)
    decay_step: tuple[float, float] = (1e-3, 0.1)
    decay_temperature: float = 16.0
    separate_gates: bool = False
    normalize_alpha: bool = False
    learn_initial_memory: bool | None = None
    initial_memory_std: float = 1.0
    norm_eps: float = 1e-6
    backend: str = "auto"

    def __post_init__(self) -> None:
        checks.choice("phi", self.phi, PHI_NAMES)
        checks.choice("f", self.f, F_NAMES)
        checks.choice("psi", self.psi, PSI_NAMES)
        checks.choice("mode", self.mode, MODES)
        checks.choice("value_pass", self.value_pass, VALUE_PASSES)
        checks.choice("step", self.step, STEPS)
        checks.choice("decay", self.decay, DECAYS)
        checks.choice("backend", self.backend, BACKENDS)
        checks.at_least("minibatch", self.minibatch, 1)
        checks.at_least("conv_width", self.conv_width, 0)
        checks.at_least("step_max", self.step_max, 0, whole=False)
        checks.at_least("initial_memory_std", self.initial_memory_std, 0, whole=False)
        checks.at_least("slots", self.slots, 1, optional=True)
        checks.at_least("heads", self.heads, 1, optional=True)
        self.conv_on = checks.streams("conv_on", self.conv_on) if self.conv_width else ()
        if self.normalize is None:
            encode = self.value_pass == "encode"
            self.normalize = ("q",) if self.lms_step else ("q", "k", "v") if encode else ("q", "k")
        self.normalize = checks.streams("normalize", self.normalize)
        if self.learn_initial_memory is None:
            self.learn_initial_memory = self.phi in NORMALISING_PHI
        self.decay_rate = checks.number_range("decay_rate", self.decay_rate, 0)
        self.decay_step = checks.number_range("decay_step", self.decay_step, 0)
        checks.positive("decay_temperature", self.decay_temperature)


class MemoryInputs(NamedTuple):
    """What the memory reads of T tokens, as `trellis_memory` takes it.

    q, k, v: [B, T, H, head]. alpha: [B, T, H, slots]. log_beta, gamma: [B, T, H] for each pass.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    log_beta: tuple[Tensor, Tensor]
    gamma: tuple[Tensor, Tensor]

    def at(self, t: int | slice) -> MemoryInputs:
        """One token, without its dimension, or some."""
        q, k, v, alpha, log_beta, gamma = self
        return MemoryInputs(
            q[:, t], k[:, t], v[:, t], alpha[:, t],
            (log_beta[0][:, t], log_beta[1][:, t]), (gamma[0][:, t], gamma[1][:, t]),
        )  # fmt: skip


class TrellisState(NamedTuple):
    """The two memories and the last inputs of each convolution."""

    memory: MemoryState
    q_tail: Tensor | None = None
    k_tail: Tensor | None = None
    v_tail: Tensor | None = None


class TrellisMixer(Mixer):
    #: The gates of the memory; the output's gate is a map like the others.
    no_weight_decay = ("gamma_proj.weight", "beta_proj.weight")

    def __init__(self, dim: int, heads: int, config: TrellisMixerConfig):
        super().__init__()
        self.config = config
        self.heads = config.heads or heads
        self.head = head_size(dim, self.heads)
        self.slots = config.slots or self.head
        self.normalized = config.normalize or ()
        gates = self.heads * (2 if config.separate_gates else 1)

        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.g_proj = nn.Linear(dim, dim, bias=False)
        self.alpha_proj = nn.Linear(dim, self.heads * self.slots, bias=False)
        self.gamma_proj = nn.Linear(dim, gates) if config.step != "constant" else None
        self.beta_proj: nn.Linear | None = None
        self.decay: DecayGate | None = None
        if config.forget_gate:
            # The decay gate brings a bias of its own.
            self.beta_proj = nn.Linear(dim, gates, bias=config.decay == "sigmoid")
            if config.decay == "softplus":
                self.decay = DecayGate(gates, config.decay_rate, config.decay_step)
        self.convolutions = StreamConvolutions(
            dict.fromkeys(config.conv_on, dim), config.conv_width
        )
        norm_alpha = config.normalize_alpha
        self.alpha_norm = RMSNorm(self.slots, config.norm_eps) if norm_alpha else None
        self.initial_keys: nn.Parameter | None = None
        self.initial_values: nn.Parameter | None = None
        if config.learn_initial_memory:
            self.initial_keys = nn.Parameter(torch.empty(self._key_shape))
            self.initial_values = nn.Parameter(torch.empty(self._value_shape))
        self.out_norm = GatedNorm(self.head, config.norm_eps)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """What is this mixer's own; its linear maps are the model's to initialise."""
        if self.gamma_proj is not None:
            nn.init.constant_(self.gamma_proj.bias, self.config.step_bias)
        if self.initial_keys is not None and self.initial_values is not None:
            nn.init.normal_(self.initial_keys, std=self.config.initial_memory_std)
            nn.init.normal_(self.initial_values, std=self.config.initial_memory_std)

    @property
    def _key_shape(self) -> tuple[int, int, int]:
        return self.heads, self.slots, self.head

    @property
    def _value_shape(self) -> tuple[int, int, int]:
        if self.config.value_pass == "encode":
            return self.heads, self.slots, self.head
        return self.heads, self.head, self.slots

    def forward(
        self, x: Tensor, state: TrellisState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, TrellisState]:
        if state is None:
            state = self.init_state(sequences(x, cu_seqlens))
        inputs, tails = self.project(x, state, cu_seqlens)
        options: dict[str, Any] = {
            **self.choices,
            "initial_state": state.memory,
            "backend": self.config.backend,
        }
        if x.shape[1] == 1 and cu_seqlens is None:
            y, memory = trellis_memory_step(*inputs.at(0), **options)
            y = y[:, None]
        else:
            y, final = trellis_memory(
                *inputs, output_final_state=True, cu_seqlens=cu_seqlens, **options
            )
            assert final is not None
            memory = final
        return self.project_out(x, y), TrellisState(memory, **tails)

    def project(
        self, x: Tensor, state: TrellisState, cu_seqlens: Tensor | None = None
    ) -> tuple[MemoryInputs, dict[str, Tensor]]:
        """What the memory reads of x [B, T, dim], and the convolutions' tails after it."""
        projected = {"q": self.q_proj(x), "k": self.k_proj(x), "v": self.v_proj(x)}
        streams, tails = self.convolutions(projected, state, cu_seqlens)
        q, k, v = (self._heads(name, streams[name]) for name in ("q", "k", "v"))
        alpha = self._split(self.alpha_proj(x))
        if self.alpha_norm is not None:
            alpha = self.alpha_norm(alpha)
        return MemoryInputs(q, k, v, alpha, self._decays(x), self._steps(x, k, v)), tails

    def project_out(self, x: Tensor, y: Tensor) -> Tensor:
        """The mixer's output from what the memory answers, y [B, T, H, head]."""
        y = self.out_norm(y.to(x.dtype), self._split(self.g_proj(x)))
        return self.o_proj(y.flatten(2))

    @property
    def choices(self) -> dict[str, Any]:
        """The options of `trellis_memory` that say what it computes."""
        names = ("phi", "f", "psi", "value_pass", "mode", "minibatch")
        return {name: getattr(self.config, name) for name in names}

    def init_state(self, batch: int) -> TrellisState:
        memory = MemoryState(
            self._initial(self.initial_keys, self._key_shape, batch),
            self._initial(self.initial_values, self._value_shape, batch),
        )
        if self.config.mode == "stale" and self.config.minibatch > 1:
            offset = torch.zeros(batch, dtype=torch.long, device=memory.keys.device)
            memory = MemoryState(memory.keys, memory.values, memory.keys, memory.values, offset)
        return TrellisState(memory, **self.convolutions.init_tails(batch))

    def state_size(self, tokens: int | None = None) -> float:
        memories = self.heads * self.slots * self.head * 2
        if self.config.mode == "stale" and self.config.minibatch > 1:
            memories = 2 * memories + 1  # the anchors and the offset
        return memories + self.convolutions.state_size()

    def flops(self, context: int) -> float:
        # Either pass multiplies its memory by two vectors (the key, the query) and adds an outer
        # product, after scaling the memory by the forget gate.
        passes = 2 * self.heads * self.slots * self.head * (3 * 2 + 1)
        return passes + self.convolutions.flops()

    def _initial(
        self, learned: nn.Parameter | None, shape: tuple[int, int, int], batch: int
    ) -> Tensor:
        if learned is None:
            return blank_state(self.o_proj.weight, batch, *shape)
        return wide(learned).expand(batch, *shape)

    def _heads(self, name: str, stream: Tensor) -> Tensor:
        stream = wide(self._split(stream))
        return unit_length(stream) if name in self.normalized else stream

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, H * size] -> [B, T, H, size]"""
        return x.unflatten(-1, (self.heads, -1))

    def _steps(self, x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """gamma of the key pass and of the value pass, [B, T, H] each."""
        config = self.config
        if self.gamma_proj is None:
            gates = self.heads * (2 if config.separate_gates else 1)
            gamma = k.new_full((*x.shape[:2], gates), config.step_max)
        elif config.step == "sigmoid":
            gamma = config.step_max * wide(self.gamma_proj(x)).sigmoid()
        else:
            gamma = F.softplus(wide(self.gamma_proj(x)))
        if config.mode == "stale":
            gamma = gamma / config.minibatch  # b equal tokens must not act as one step of b
        keys, values = self._per_pass(gamma)
        if config.lms_step:
            keys = keys / (k.square().sum(-1) + LMS_EPSILON)
            if config.value_pass == "encode":  # decoding writes codes of unit length
                values = values / (v.square().sum(-1) + LMS_EPSILON)
        return keys, values

    def _decays(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """log_beta of the key pass and of the value pass, [B, T, H] each."""
        if self.beta_proj is None:
            zeros = wide(x).new_zeros(*x.shape[:2], self.heads)
            return zeros, zeros
        gate = wide(self.beta_proj(x))
        if self.decay is not None:
            return self._per_pass(self.decay(gate))
        return self._per_pass(F.logsigmoid(gate) / self.config.decay_temperature)

    def _per_pass(self, gate: Tensor) -> tuple[Tensor, Tensor]:
        if not self.config.separate_gates:
            return gate, gate
        keys, values = gate.chunk(2, dim=-1)
        return keys, values
