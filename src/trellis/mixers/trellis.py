"""The Trellis mixer: two passes of a memory that learns while it reads.

    x -> q, k, v and alpha, the code of each token (short convolution and SiLU on some)
      -> q and k at unit length per head, codes at a root mean square of 1
      -> with gamma, the step size, and beta, the forget gate:
         trellis_memory (+ skip * v) -> RMSNorm per head -> * GELU(gate) -> output projection

Paper: "Trellis: Learning to Compress Key-Value Memory in Attention Models". The equations of the
memory are in ops/memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..ops import MemoryState, rms_norm, trellis_memory, trellis_memory_step, unit_length
from ..ops.memory import BACKENDS, ERROR_AT, MODES, VALUE_PASSES
from ..ops.memory.activations import F_NAMES, NORMALISING_PHI, PHI_NAMES, PSI_NAMES
from .base import Mixer, Shapes, head_sizes
from .layers import (
    DecayGate,
    GatedNorm,
    StreamConvolutions,
    as_projected,
    assign_,
    blank_state,
    places,
    sequences,
    wide,
)

STEPS = ("sigmoid", "softplus", "constant")
DECAYS = ("softplus", "sigmoid")
STALE_STEPS = ("minibatch", "position", "none")
#: Streams that may have a convolution.
CONVOLVED = ("q", "k", "v", "alpha")
#: Added to |k|^2 and |v|^2 where the normalised-LMS step divides by them.
LMS_EPSILON = 1e-6


SHAPES: Shapes = {"wide": (1.0, 2.0, 64), "model": None}

#: The default of a field that `form` sets.
FROM_FORM: Any = None
#: form -> what it sets; docs/decisions.md has the reasons.
FORMS: dict[str, dict[str, Any]] = {
    "recommended": {
        "phi": "silu", "f": "silu", "psi": "identity", "value_pass": "decode",
        "conv_on": CONVOLVED, "conv_bias": True, "skip": 1.0, "separate_gates": True,
        "half_life": (8.0, 256.0), "normalize_alpha": True, "shape": "wide",
    },
    "paper": {
        "phi": "silu", "f": "ln_silu", "psi": "silu", "value_pass": "encode",
        "conv_on": ("q", "k"), "conv_bias": True, "skip": False, "separate_gates": False,
        "half_life": False, "normalize_alpha": False, "shape": "model",
    },
}  # fmt: skip


@dataclass
class TrellisMixerConfig:
    """Every choice of the mixer.

    form: sets those of shape, phi, f, psi, value_pass, conv_on, conv_bias, skip, separate_gates,
        half_life and normalize_alpha that are None. "recommended" is the form that did best in our
        comparisons (docs/results.md). "paper" has the equations of the paper: one target code for
        two passes that both encode, f = ln_silu, and the readout phi(M^T q). What the paper leaves
        open is our choice in both: phi, how gamma and beta are computed and start, the unit length
        of q, k and v, the width of the convolution, its bias and the SiLU behind it, memories that
        start at zero. Both take mode="exact", the row "b = 1" of the paper's ablation; its default
        is stale gradients with a mini-batch that it does not give.
    shape: sets those of the next four fields that are None.
        "wide": values that are twice as wide as keys. The keys of all heads together are as wide as
        the model, and there are as many slots as a key has channels. The number of heads is the
        smallest one, 1 or even, that makes keys of at most 64: 2 heads with 64 keys, 64 slots and
        128 values at width 128, 12 such heads at 768.
        "model": the model's `num_attention_heads`; keys, values and slots of width / heads.
    heads: number of heads.
    head_dim: size of a head's queries and keys.
    expand_v: size of a head's values as a multiple of the size of its keys.
    slots: memory slots per head (m).
    phi: non-linearity of the compression (identity is the paper's "linear").
    f: non-linearity between the passes. psi: non-linearity of the output.
    mode: "exact" takes the gradient at the memory before each token, "stale" at the memory before
        each mini-batch.
    minibatch: tokens per mini-batch in stale mode.
    error_at: "before" takes the error of a write at that memory as it is (the paper's order),
        "after" at that memory times the token's forget gate, as Gated DeltaNet does.
    stale_step: the factor of the step size in stale mode: "minibatch" (1 / minibatch, so that equal
        tokens never overshoot), "position" (1 for the first token of a mini-batch, 1/2 for the
        second, 1/3 for the third, ...) or "none".
    value_pass: "encode" (the paper's) regresses the code from the value and reads with the
        transpose; "decode" regresses the value from the code.
    conv_width: width of the causal convolution; 0 leaves it out.
    conv_on: the convolved streams, some of "q", "k", "v" and "alpha". SiLU follows the convolution.
        On v and alpha it hands the order of the last tokens on, which matters the more, the longer
        a model is trained (docs/lab-notebook.md); the paper has it on q and k.
    conv_bias: whether the convolutions have a bias. It starts uniform like their weights, which
        gives all keys and queries a common part: the memory starts as a running average.
    tie_queries: q's map and convolution start equal to k's, with the same effect.
    skip: the start of a factor D for each head with which v is added to what the memory answers,
        y + D v, as in Mamba2; False leaves it out.
    normalize: the streams scaled to unit length per head; None means q, k and v, and with
        value_pass="decode", where v is a target, q and k.
    lms_step: divide the step size by |k|^2 in the key pass and by |v|^2 in the value pass
        (normalised LMS), instead of normalising k and v.
    step: gamma = step_max * sigmoid(.) ("sigmoid"), softplus(.) without a bound ("softplus"), or
        step_max itself ("constant").
    step_max: upper end of gamma's range, one number or a pair for the key pass and the value pass.
    step_bias: the bias that gamma's projection starts at.
    forget_gate: False means that the memories do not decay (beta = 1).
    decay: "softplus": log_beta = -exp(A_log) softplus(. + dt_bias), or
        "sigmoid": log_beta = logsigmoid(.) / decay_temperature.
    decay_rate, decay_step: ranges in which exp(A_log) and softplus(dt_bias) start.
    half_life: with decay="softplus" and in place of these two ranges, the half-lives in tokens that
        the heads start with: (8, 256) spreads them evenly over the logarithm; a single head gets
        the longest. False takes the ranges.
    separate_gates: one gamma and one beta for each pass, instead of one for both.
    normalize_alpha: each head's code is scaled to a root mean square of 1. Codes that are free to
        grow do so until a write overshoots: its curvature grows with the code, and the step does
        not know of it. Gradients then jump (docs/lab-notebook.md).
    learn_initial_memory: start from learned memories instead of zeros; None means only where
        phi is degenerate at zero (layernorm, l2norm, ln_silu).
    initial_memory_std: standard deviation from which learned memories are drawn.
    norm_eps: epsilon of the RMS norms.
    recompute: on a GPU, the memory keeps its inputs alone for the backward and computes the rest
        again, which takes less memory and more time.
    backend: which implementation of the memory runs, such as "auto" or "reference".
    """

    form: str = "recommended"
    shape: str = FROM_FORM
    heads: int | None = None
    head_dim: int | None = None
    expand_v: float | None = None
    slots: int | None = None
    phi: str = FROM_FORM
    f: str = FROM_FORM
    psi: str = FROM_FORM
    mode: str = "exact"
    minibatch: int = 16
    error_at: str = "before"
    stale_step: str = "minibatch"
    value_pass: str = FROM_FORM
    conv_width: int = 4
    conv_on: tuple[str, ...] = FROM_FORM
    conv_bias: bool = FROM_FORM
    tie_queries: bool = False
    skip: float | Literal[False] = FROM_FORM
    normalize: tuple[str, ...] | None = None
    lms_step: bool = False
    step: str = "sigmoid"
    step_max: float | tuple[float, float] = 1.0
    step_bias: float = 0.0
    forget_gate: bool = True
    decay: str = "softplus"
    decay_rate: tuple[float, float] = (1.0, 16.0)
    decay_step: tuple[float, float] = (1e-3, 0.1)
    half_life: tuple[float, float] | Literal[False] = FROM_FORM
    decay_temperature: float = 16.0
    separate_gates: bool = FROM_FORM
    normalize_alpha: bool = FROM_FORM
    learn_initial_memory: bool | None = None
    initial_memory_std: float = 1.0
    norm_eps: float = 1e-6
    recompute: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        checks.choice("form", self.form, tuple(FORMS))
        softplus = self.forget_gate and self.decay == "softplus"
        if self.half_life is None and not softplus:
            self.half_life = False
        for name, value in FORMS[self.form].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        checks.choice("shape", self.shape, tuple(SHAPES))
        checks.choice("phi", self.phi, PHI_NAMES)
        checks.choice("f", self.f, F_NAMES)
        checks.choice("psi", self.psi, PSI_NAMES)
        checks.choice("mode", self.mode, MODES)
        checks.choice("error_at", self.error_at, ERROR_AT)
        checks.choice("value_pass", self.value_pass, VALUE_PASSES)
        checks.choice("stale_step", self.stale_step, STALE_STEPS)
        checks.choice("step", self.step, STEPS)
        checks.choice("decay", self.decay, DECAYS)
        checks.choice("backend", self.backend, BACKENDS)
        checks.at_least("minibatch", self.minibatch, 1)
        checks.at_least("conv_width", self.conv_width, 0)
        self._check_step_max()
        checks.flag("recompute", self.recompute)
        checks.flag("conv_bias", self.conv_bias)
        checks.flag("tie_queries", self.tie_queries)
        checks.flag("normalize_alpha", self.normalize_alpha)
        if self.skip is not False:
            checks.number("skip", self.skip)
        checks.at_least("initial_memory_std", self.initial_memory_std, 0, whole=False)
        checks.at_least("slots", self.slots, 1, optional=True)
        checks.at_least("head_dim", self.head_dim, 1, optional=True)
        checks.at_least("expand_v", self.expand_v, 0, whole=False, optional=True)
        checks.at_least("heads", self.heads, 1, optional=True)
        self.conv_on = checks.streams("conv_on", self.conv_on, CONVOLVED) if self.conv_width else ()
        if self.normalize is None:
            encode = self.value_pass == "encode"
            self.normalize = ("q",) if self.lms_step else ("q", "k", "v") if encode else ("q", "k")
        self.normalize = checks.streams("normalize", self.normalize)
        if self.learn_initial_memory is None:
            self.learn_initial_memory = self.phi in NORMALISING_PHI
        self.decay_rate = checks.number_range("decay_rate", self.decay_rate, 0)
        self.decay_step = checks.number_range("decay_step", self.decay_step, 0)
        checks.positive("decay_temperature", self.decay_temperature)
        if self.half_life is not False:
            self.half_life = checks.number_range("half_life", self.half_life, 0)
            if not softplus:
                raise ValueError(
                    "half_life needs forget_gate=True and decay='softplus'; got "
                    f"forget_gate={self.forget_gate!r}, decay={self.decay!r}"
                )

    def _check_step_max(self) -> None:
        if isinstance(self.step_max, (tuple, list)):
            if len(self.step_max) != 2:
                raise ValueError(
                    "step_max must be a number, or a pair for the key pass and the value pass; "
                    f"got {self.step_max!r}"
                )
            self.step_max = (self.step_max[0], self.step_max[1])
        for step_max in self.step_maxima:
            checks.at_least("step_max", step_max, 0, whole=False)

    @property
    def step_maxima(self) -> tuple[float, float]:
        """step_max of the key pass and of the value pass."""
        both = self.step_max
        return both if isinstance(both, tuple) else (both, both)


class MemoryInputs(NamedTuple):
    """The first arguments of `trellis_memory` for T tokens.

    q, k: [B, T, H, key_dim]. v: [B, T, H, value_dim]. alpha: [B, T, H, slots].
    log_beta, gamma: [B, T, H] for each pass.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    log_beta: tuple[Tensor, Tensor]
    gamma: tuple[Tensor, Tensor]

    def at(self, t: int | slice) -> MemoryInputs:
        """The inputs of token t, without the dimension T, or those of a slice of tokens."""
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
    alpha_tail: Tensor | None = None


class TrellisMixer(Mixer):
    #: Exempt from weight decay: the maps that make the memory's gates, not the output's gate.
    no_weight_decay = ("gamma_proj.weight", "beta_proj.weight")
    #: Attention neither adds its values to what it returns nor puts them through SiLU.
    like_attention: ClassVar[dict[str, Any]] = {
        "shape": "model", "skip": False, "conv_on": ("q", "k"),
    }  # fmt: skip

    def __init__(self, dim: int, heads: int, config: TrellisMixerConfig):
        super().__init__()
        self.config = config
        self.heads, self.key_dim, self.value_dim = head_sizes(dim, heads, config, SHAPES)
        self.slots = config.slots or self.key_dim
        keys, values = self.heads * self.key_dim, self.heads * self.value_dim
        codes = self.heads * self.slots
        self.normalized = config.normalize or ()
        passes = 2 if config.separate_gates else 1
        gates = self.heads * passes

        self.q_proj = nn.Linear(dim, keys, bias=False)
        self.k_proj = nn.Linear(dim, keys, bias=False)
        self.v_proj = nn.Linear(dim, values, bias=False)
        self.g_proj = nn.Linear(dim, values, bias=False)
        self.alpha_proj = nn.Linear(dim, codes, bias=False)
        self.gamma_proj = nn.Linear(dim, gates) if config.step != "constant" else None
        self.beta_proj: nn.Linear | None = None
        self.decay: DecayGate | None = None
        if config.forget_gate:
            # DecayGate has a bias of its own, dt_bias.
            self.beta_proj = nn.Linear(dim, gates, bias=config.decay == "sigmoid")
            if config.decay == "softplus":
                self.decay = DecayGate(
                    gates, config.decay_rate, config.decay_step,
                    half_life=config.half_life or None, groups=passes,
                )  # fmt: skip
        widths = {"q": keys, "k": keys, "v": values, "alpha": codes}
        self.convolutions = StreamConvolutions(
            {name: widths[name] for name in config.conv_on},
            config.conv_width,
            bias=config.conv_bias,
        )
        self.skip = None if config.skip is False else nn.Parameter(torch.empty(self.heads))
        self.initial_keys: nn.Parameter | None = None
        self.initial_values: nn.Parameter | None = None
        if config.learn_initial_memory:
            self.initial_keys = nn.Parameter(torch.empty(self._key_shape))
            self.initial_values = nn.Parameter(torch.empty(self._value_shape))
        self.out_norm = GatedNorm(self.value_dim, config.norm_eps)
        self.o_proj = nn.Linear(values, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise this mixer's own parameters; the model initialises the linear maps."""
        if self.gamma_proj is not None:
            nn.init.constant_(self.gamma_proj.bias, self.config.step_bias)
        if self.skip is not None:
            nn.init.constant_(self.skip, float(self.config.skip))
        if self.config.tie_queries:
            self._tie_queries()
        if self.initial_keys is not None and self.initial_values is not None:
            nn.init.normal_(self.initial_keys, std=self.config.initial_memory_std)
            nn.init.normal_(self.initial_values, std=self.config.initial_memory_std)

    @torch.no_grad()
    def _tie_queries(self) -> None:
        assign_(self.q_proj.weight, self.k_proj.weight)
        if "q" in self.convolutions and "k" in self.convolutions:
            queries, keys = self.convolutions["q"], self.convolutions["k"]
            for query, key in zip(queries.parameters(), keys.parameters()):
                assign_(query, key)

    @property
    def _key_shape(self) -> tuple[int, int, int]:
        return self.heads, self.slots, self.key_dim

    @property
    def _value_shape(self) -> tuple[int, int, int]:
        if self.config.value_pass == "encode":
            return self.heads, self.slots, self.value_dim
        return self.heads, self.value_dim, self.slots

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
                *inputs, output_final_state=True, cu_seqlens=cu_seqlens,
                recompute=self.config.recompute, **options,
            )  # fmt: skip
            assert final is not None
            memory = final
        return self.project_out(x, y, inputs.v), TrellisState(memory, **tails)

    def project(
        self, x: Tensor, state: TrellisState, cu_seqlens: Tensor | None = None
    ) -> tuple[MemoryInputs, dict[str, Tensor]]:
        """The memory's inputs for x [B, T, dim], and the tails of the convolutions after x."""
        projected = {
            "q": self.q_proj(x),
            "k": self.k_proj(x),
            "v": self.v_proj(x),
            "alpha": self.alpha_proj(x),
        }
        streams, tails = self.convolutions(projected, state, cu_seqlens)
        q, k, v = (self._heads(name, streams[name]) for name in ("q", "k", "v"))
        alpha = self._split(streams["alpha"])
        if self.config.normalize_alpha:
            alpha = rms_norm(alpha, None, self.config.norm_eps)
        steps = self._steps(x, k, v)
        if self.config.mode == "stale":
            factor = self._stale_factor(state.memory, x.shape[1], cu_seqlens)
            steps = (steps[0] * factor, steps[1] * factor)
        return MemoryInputs(q, k, v, alpha, self._decays(x), steps), tails

    def project_out(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """The mixer's output [B, T, dim], from y and v [B, T, H, value_dim] of the memory."""
        if self.skip is not None:
            y = y + wide(self.skip)[:, None] * v
        y = self.out_norm(y.to(x.dtype), self._split(self.g_proj(x)))
        return self.o_proj(y.flatten(2))

    @property
    def choices(self) -> dict[str, Any]:
        """The options of `trellis_memory` that decide what it computes."""
        names = ("phi", "f", "psi", "value_pass", "mode", "minibatch", "error_at")
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
        memories = self.heads * self.slots * (self.key_dim + self.value_dim)
        if self.config.mode == "stale" and self.config.minibatch > 1:
            memories = 2 * memories + 1  # the anchors and the offset
        return memories + self.convolutions.state_size()

    def flops(self, context: int) -> float:
        # Each of the two passes multiplies its memory by two vectors (the key and the query),
        # scales it by the forget gate and adds an outer product to it.
        passes = self.heads * self.slots * (self.key_dim + self.value_dim) * (3 * 2 + 1)
        return passes + self.convolutions.flops()

    def _initial(
        self, learned: nn.Parameter | None, shape: tuple[int, int, int], batch: int
    ) -> Tensor:
        if learned is None:
            return blank_state(self.o_proj.weight, batch, *shape)
        return wide(learned).expand(batch, *shape)

    def _heads(self, name: str, stream: Tensor) -> Tensor:
        split = self._split(stream)
        heads = unit_length(wide(split)) if name in self.normalized else wide(split)
        return as_projected(heads, split)

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, H * size] -> [B, T, H, size]"""
        return x.unflatten(-1, (self.heads, -1))

    def _steps(self, x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """gamma of the key pass and of the value pass, [B, T, H] each."""
        config = self.config
        largest = (1.0, 1.0) if config.step == "softplus" else config.step_maxima
        if self.gamma_proj is None:
            share = wide(k).new_ones(*x.shape[:2], self.heads)
            shares = (share, share)
        else:
            gate = wide(self.gamma_proj(x))
            shares = self._per_pass(
                F.softplus(gate) if config.step == "softplus" else gate.sigmoid()
            )
        keys = shares[0] * largest[0]
        # One tensor for both passes where they share it: the memory then reads it once.
        same = shares[0] is shares[1] and largest[0] == largest[1]
        values = keys if same else shares[1] * largest[1]
        if config.lms_step:
            keys = keys / (wide(k).square().sum(-1) + LMS_EPSILON)
            if config.value_pass == "encode":  # decoding writes codes of unit length
                values = values / (wide(v).square().sum(-1) + LMS_EPSILON)
        return keys, values

    def _stale_factor(
        self, memory: MemoryState, tokens: int, cu_seqlens: Tensor | None
    ) -> Tensor | float:
        """The factor of the step sizes of `tokens` tokens in stale mode."""
        size = self.config.minibatch
        if self.config.stale_step == "minibatch":
            return 1 / size
        if self.config.stale_step == "none" or memory.offset is None:
            return 1.0
        place = places(memory.offset, tokens, cu_seqlens).remainder(size)
        return 1 / (place[..., None] + 1)

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
