"""Decoding in one compiled call per token: when it is used, and what it is given.

A `Decoder` belongs to a model. It packs the weights once, in the order in which the kernel
(native/decoder.cpp) reads them, and again when they have changed. `TrellisForCausalLM` asks it
first; what it does not take goes through PyTorch as ever. TRELLIS_DECODER=torch switches it off,
TRELLIS_DECODER=bf16 packs the weights of linear maps in half the bytes. `BlockSteps` gives the same
to blocks without tokens, such as a forecaster's.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import operator
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from ctypes import c_char_p, c_int64, c_void_p
from dataclasses import fields
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import checks
from ..mixers.base import map_tensors, named_tensors, rebuild
from ..mixers.delta_net import DeltaNetMixer
from ..mixers.layers import DecayGate, GatedNorm, RMSNorm, ShortConvolution, StreamConvolutions
from ..mixers.transformer import TransformerMixer
from ..mixers.trellis import TrellisMixer
from ..ops.dispatch import asked_backend, under_transform
from ..ops.native import build
from .backbone import Block, SwiGLU
from .cache import TrellisCache

if TYPE_CHECKING:
    from .modeling import TrellisForCausalLM

VARIABLE = "TRELLIS_DECODER"
CHOICES = ("auto", "torch", "bf16")
#: The most sequences of a step.
MOST_ROWS = 16
#: The most sequences whose vectors `BlockSteps` reads.
MOST_SEQUENCES = 4 * MOST_ROWS
#: In the time that PyTorch spends on calling the operators of one layer, the kernel reads about so
#: many bytes of weights: a few tokens at once are faster token by token where a model is small.
BYTES_OF_A_LAYER = 40e6
#: Bytes of weights for which another thread is worth waiting for.
BYTES_OF_A_THREAD = 16e6
#: What the kernel writes to, whatever torch's default dtype and device are.
FP32: Any = {"dtype": torch.float32, "device": "cpu"}
#: Columns that a key-value cache has room for beyond those in use, at least.
COLUMNS = 256

_OPS = "../../ops/memory/native"
SOURCE = build.Source(
    "decoder",
    Path(__file__).parent / "native",
    headers=tuple(f"{_OPS}/{name}.h" for name in ("activations", "call", "step")),
    shared=("simd.h",),
)

log = logging.getLogger("trellis")


@functools.cache
def kernel() -> ctypes.CDLL:
    """The loaded library. Raises build.NoKernel where there is none."""
    return declared(build.load(SOURCE))


def declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    loaded.trellis_slots.restype = c_char_p
    for name in ("slot_count", "panel", "largest"):
        getattr(loaded, f"trellis_{name}").restype = c_int64
    loaded.trellis_free.argtypes = [c_void_p]
    loaded.trellis_step.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64]
    return loaded


missing_kernel = build.missing(kernel, "decoding runs in PyTorch")


@functools.cache
def _optimizer_steps() -> list[int]:
    """How many steps optimizers have taken since the first call, counted on: fused ones change
    weights without changing their versions."""
    count = [0]

    def counted(*_: Any) -> None:
        count[0] += 1

    register_optimizer_step_post_hook(counted)
    return count


_version = operator.attrgetter("_version")


def _values(dictionaries: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    """The values of all dictionaries, one after the other."""
    return chain.from_iterable(map(operator.methodcaller("values"), dictionaries))


class Unfit(Exception):
    """Why a model is decoded in PyTorch."""


def decode(
    model: TrellisForCausalLM, input_ids: Any, mask: Tensor | None, cache: Any, keep: Any
) -> Tensor | None:
    """The logits of `input_ids` [B, T], read into the cache; None if PyTorch is to read them.

    keep: how many of the last tokens the logits are wanted of; 0 or None: of all.
    """
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or not isinstance(input_ids, Tensor)
        or not isinstance(cache, TrellisCache)
        or not (keep is None or isinstance(keep, int))
        or input_ids.dim() != 2
        or input_ids.dtype not in (torch.int32, torch.int64)
        or not 0 < input_ids.shape[0] <= MOST_ROWS
        or input_ids.shape[0] != cache.batch_size
        or not _all_real(mask, input_ids.shape, cache.get_seq_length())
    ):
        return None
    decoder = Decoder.of(model)
    if decoder is None or not 0 < input_ids.shape[1] <= decoder.most_tokens:
        return None
    return decoder.read(input_ids, cache, keep or 0)


def _all_real(mask: Tensor | None, shape: torch.Size, seen: int) -> bool:
    """Whether a mask that fits tokens of this shape, after `seen` others, hides none of them."""
    if mask is None:
        return True
    batch, tokens = shape
    fits = mask.dim() == 2 and mask.shape[0] == batch
    fits = fits and tokens <= mask.shape[1] <= tokens + seen
    return fits and bool((mask[:, mask.shape[1] - tokens :] != 0).all())


def _kind(choice: str) -> str | None:
    """The choice of TRELLIS_DECODER for the dtype of packed weights; None: PyTorch decodes."""
    checks.choice(VARIABLE, choice, CHOICES)
    if (
        choice == "torch"
        or asked_backend() not in ("auto", "native")
        or torch._C._is_any_autocast_enabled()
        or under_transform()
        or missing_kernel()
    ):
        return None
    return choice


class Decoder:
    """The packed weights of a model, and how they are found to be out of date."""

    _of_models: ClassVar[MutableMapping[nn.Module, Decoder]] = weakref.WeakKeyDictionary()
    _told: ClassVar[set[str]] = set()  # reasons that have been logged

    @classmethod
    def of(cls, model: TrellisForCausalLM, exact: bool = False) -> Decoder | None:
        """The decoder of a model as it is now; None, with one line in the log, if it has none.

        exact: packs weights in fp32 whatever TRELLIS_DECODER says.
        """
        choice = _kind(os.environ.get(VARIABLE, "auto"))
        if choice == "bf16" and exact:
            choice = "auto"
        if choice is None:
            return None
        decoder = cls._of_models.get(model)
        if decoder is None or not decoder.valid(choice):
            decoder = cls._of_models[model] = cls(model, choice)
        return None if decoder.reason else decoder

    def __init__(self, model: TrellisForCausalLM, choice: str):
        self.choice, self.library = choice, kernel()
        self.reason = ""
        self.handle = c_void_p()
        self.kept: list[Tensor] = []  # what the kernel has pointers to
        # What is looked at before every token, in lists that C walks. Hooks of the model itself run
        # as ever.
        modules = list(model.modules())
        self.inner = modules[1:]
        self.hooks = [h for m in self.inner for h in (m._forward_hooks, m._forward_pre_hooks)]
        self.attributes = [m.__dict__ for m in self.inner]
        self.children = [m._modules for m in modules if m._modules]
        self.parameters = [m._parameters for m in self.inner if m._parameters]
        self.weights = list(_values(self.parameters))
        self.followed = [w for w in self.weights if w is not None]
        self.found = self.look()
        try:
            self.build(model)
        except Unfit as why:
            self.reason = str(why)
            if self.reason not in self._told:
                self._told.add(self.reason)
                log.warning("decoding runs in PyTorch: %s", self.reason)

    def __del__(self) -> None:
        if self.handle:
            self.library.trellis_free(self.handle)

    def valid(self, choice: str) -> bool:
        """Whether the model is what it was: its modules, hooks and weights."""
        weights = list(_values(self.parameters))
        return (
            choice == self.choice
            and len(weights) == len(self.weights)
            and all(map(operator.is_, weights, self.weights))
            and self.look() == self.found
        )

    def look(self) -> tuple[Any, ...]:
        """What a change of the model changes, other than one through `weight.data`: its modules,
        hooks, forwards of single modules (they are attributes), and the versions of its weights."""
        versions: Any
        try:
            versions = list(map(_version, self.followed)), list(map(Tensor.data_ptr, self.followed))
        except RuntimeError as error:  # inference tensors have no version, fake ones no address
            versions = str(error)
        sizes = sum(map(len, self.hooks)), list(map(len, self.attributes))
        return list(_values(self.children)), *sizes, *_optimizer_steps(), versions

    def build(self, model: TrellisForCausalLM) -> None:
        if torch.nn.modules.module._has_any_global_hook():
            raise Unfit("there are hooks for all modules")
        for module in self.inner:
            own = "forward" in module.__dict__ or module._compiled_call_impl
            if module._forward_hooks or module._forward_pre_hooks or own:
                raise Unfit(f"{type(module).__name__} has a hook or a forward of its own")
        if isinstance(self.found[-1], str):
            raise Unfit(f"a weight cannot be followed: {self.found[-1]}")
        for name, weight in model.named_parameters():
            plain = type(weight) in (nn.Parameter, Tensor) and weight.device.type == "cpu"
            if not plain or weight.dtype != torch.float32:
                raise Unfit(f"{name} is not a plain fp32 tensor on the CPU")
        for module in list(model.modules())[1:]:
            if type(module) not in PLAIN and module is not model.model:
                raise Unfit(f"it does not know {type(module).__name__}")
        backbone = model.model
        blocks = [cast(Any, block) for block in backbone.layers]
        mixers = [block.mixer for block in blocks]
        described = [_describe(mixer) for mixer in mixers]
        self.kinds = [options["kind"] for options, _, _ in described]
        self.slots = {
            kind: kernel().trellis_slots(kind.encode()).decode().split() for kind in self.kinds
        }
        #: What the state of one sequence is made of, for each layer.
        self.templates = [_shapes(mixer.init_state(1)) for mixer in mixers]
        head = {"head": [model.lm_head.weight]}
        tensors = {"embedding": backbone.embed_tokens.weight, "norm": backbone.norm.weight}
        self.vocabulary, self.tokens = model.lm_head.out_features, model.config.vocab_size
        self.bytes = 0
        self.hand("model", {"eps": model.config.norm_eps}, tensors, head, ctypes.byref(self.handle))
        for block, (options, more, maps) in zip(blocks, described):
            mlp = block.mlp
            norms = {"mixer_norm": block.mixer_norm.weight, "mlp_norm": block.mlp_norm.weight}
            maps |= {"out": [block.mixer.o_proj.weight], "down": [mlp.down_proj.weight],
                     "up": [mlp.gate_proj.weight, mlp.up_proj.weight]}  # fmt: skip
            self.hand("block", {"block_eps": block.mixer_norm.eps, **options}, norms | more, maps,
                      self.handle)  # fmt: skip
        self.most_tokens = 1 + int(len(mixers) * BYTES_OF_A_LAYER / self.bytes)

    def hand(
        self,
        function: str,
        options: dict[str, Any],
        tensors: dict[str, Tensor],
        maps: dict[str, list[Tensor]],
        handle: Any,
    ) -> None:
        """Give the kernel options, tensors and packed maps, all by name."""
        given = {name: t.detach().contiguous() for name, t in tensors.items()}
        for name, weights in maps.items():
            given[name] = self.packed(weights, interleaved=name == "up")
            options = {**options, name: sum(len(w) for w in weights)}
        self.kept += given.values()
        numbers: list[int] = []
        for t in given.values():
            padding = (1,) * (4 - t.dim())
            letter = ord("b") if t.dtype == torch.bfloat16 else ord("f")
            numbers += (t.data_ptr(), letter, *t.shape, *padding, *t.stride(), *padding)
        text = " ".join(f"{name}={value}" for name, value in options.items())
        table = (c_int64 * len(numbers))(*numbers)
        if getattr(kernel(), f"trellis_{function}")(
            text.encode(), " ".join(given).encode(), table, handle
        ):
            raise RuntimeError(f"the decoder does not know all of the options {text!r}")

    def packed(self, weights: list[Tensor], interleaved: bool) -> Tensor:
        """Maps of one input, [outputs, inputs] each, as panels [count, inputs, outputs of a panel].

        interleaved: of two maps, with half a panel from each in turn; else one behind the other.
        """
        size = kernel().trellis_panel() // (2 if interleaved else 1)
        if not interleaved:
            weights = [torch.cat([w.detach() for w in weights])]
        panels = [F.pad(w.detach(), (0, 0, 0, -len(w) % size)).unflatten(0, (-1, size))
                  for w in weights]  # fmt: skip
        rows = torch.cat(panels, dim=1).mT
        dtype = torch.bfloat16 if self.choice == "bf16" else torch.float32
        self.bytes += rows.numel() * dtype.itemsize
        return build.in_large_pages(torch.empty(rows.shape, dtype=dtype)).copy_(rows)

    def read(self, ids: Tensor, cache: TrellisCache, keep: int) -> Tensor | None:
        """The logits [B, T, V] of ids [B, T], or of the last `keep` tokens; updates the cache.

        None, and nothing is read, if tokens or states are not those of this model.
        """
        columns = ids.T.tolist()
        if min(map(min, columns)) < 0 or max(map(max, columns)) >= self.tokens:
            return None
        session = cache.session
        if session is None or session.decoder is not self:
            states = cache.states
            if [_shapes(state) for state in states] != self.templates:
                return None
            session = Session(self, states, len(ids))
        rows, tokens = ids.shape
        first = max(tokens - keep, 0) if keep else 0
        logits = torch.empty(rows, tokens - first, self.vocabulary, **FP32)
        for t, column in enumerate(columns):
            place = logits if tokens - first == 1 else torch.empty(rows, self.vocabulary, **FP32)
            session.step(column, place if t >= first else None)
            if t >= first and place is not logits:
                logits[:, t - first] = place
        cache.session = session
        cache.advance(tokens)
        return logits


class Session:
    """The states of a cache in buffers that the kernel updates in place, for this cache alone."""

    def __init__(self, decoder: Decoder, states: list[Any], batch: int):
        self.decoder, self.batch = decoder, batch
        self.states = states
        self.tensors: list[dict[str, Tensor]] = []
        self.width = kernel().trellis_slot_count()
        self.table = (c_int64 * (self.width * len(states)))()
        self.room = -1  # columns that are left in key-value caches; -1: there are none
        for i, state in enumerate(self.states):
            found = {name: t.detach() for name, t in named_tensors(state)}
            self.tensors.append(found)
            if decoder.kinds[i] == "attention":
                self._grow(i, found["keys"], found["values"])
                found["length"] = found["length"].clone()
            else:  # fresh and contiguous: nobody else sees what the kernel writes
                found |= {name: t.clone(memory_format=torch.contiguous_format)
                          for name, t in found.items()}  # fmt: skip
            for slot, name in enumerate(decoder.slots[decoder.kinds[i]]):
                if name in found:
                    self.table[i * self.width + slot] = found[name].data_ptr()
        threads = 1 + int(decoder.bytes / BYTES_OF_A_THREAD)
        self.threads = min(threads, torch.get_num_threads())
        self.weights = decoder.handle

    def step(self, ids: list[int], logits: Tensor | None) -> None:
        """Reads one token of each sequence, B ids, and fills the logits [B, V] if given."""
        if self.room == 0:
            self.room = -1
            for i, kind in enumerate(self.decoder.kinds):
                if kind == "attention":
                    self._grow(i, *self._columns(i))
        failed = kernel().trellis_step(
            self.weights, (c_int64 * self.batch)(*ids), self.batch, self.table,
            None if logits is None else logits.data_ptr(), self.threads,
        )  # fmt: skip
        if failed:
            raise MemoryError("the decoder could not allocate its buffers")
        self.room -= self.room > 0

    def current(self) -> list[Any]:
        """The states after the last step; the next one changes their tensors."""
        made = []
        for i, (state, found) in enumerate(zip(self.states, self.tensors)):
            if self.decoder.kinds[i] == "attention":
                keys, values = self._columns(i)
                found = {**found, "keys": keys, "values": values}
            made.append(rebuild(state, found))
        return made

    def _slot(self, i: int, name: str) -> int:
        return i * self.width + self.decoder.slots[self.decoder.kinds[i]].index(name)

    def _columns(self, i: int) -> tuple[Tensor, Tensor]:
        """The filled columns of layer i's keys and values."""
        used = slice(self.table[self._slot(i, "begin")], self.table[self._slot(i, "end")])
        return self.tensors[i]["keys"][:, :, used], self.tensors[i]["values"][:, :, used]

    def _grow(self, i: int, keys: Tensor, values: Tensor) -> None:
        """Move the columns of layer i to buffers with room for as many again."""
        filled = keys.shape[2]
        room = filled + max(filled, COLUMNS)
        for name, old in (("keys", keys), ("values", values)):
            shape = (*old.shape[:2], room, old.shape[3])
            new = build.in_large_pages(torch.empty(shape, dtype=torch.float32))
            new[:, :, :filled] = old
            self.tensors[i][name] = new
            self.table[self._slot(i, name)] = new.data_ptr()
        for name, value in (("room", room), ("begin", 0), ("end", filled)):
            self.table[self._slot(i, name)] = value
        left = room - filled
        self.room = left if self.room < 0 else min(self.room, left)


class BlockSteps(nn.Module):
    """Blocks and the norm behind them, which read one vector of every sequence in a compiled call.

    To the decoder it is a language model: the vectors are the rows of its embedding, and its head
    leaves what the norm gives as it is.
    """

    @torch.inference_mode(False)  # else its tensors would have no versions for the decoder to see
    def __init__(self, blocks: nn.ModuleList, norm: RMSNorm):
        super().__init__()
        dim = len(norm.weight)
        self.model = nn.Module()
        self.model.layers, self.model.norm = blocks, norm
        rows = torch.zeros(MOST_ROWS, dim, **FP32)
        self.model.embed_tokens = nn.Embedding.from_pretrained(rows)
        with torch.device("meta"):
            self.lm_head = nn.Linear(dim, dim, bias=False)
        self.lm_head.weight = nn.Parameter(torch.eye(dim, **FP32), requires_grad=False)
        self.known = all(isinstance(cast(Any, b).mixer, STEPPED) for b in blocks)
        self.config = SimpleNamespace(norm_eps=norm.eps, vocab_size=MOST_ROWS)

    def reads(self, blocks: nn.ModuleList, norm: RMSNorm) -> bool:
        """Whether these are its own."""
        return self.model.layers is blocks and self.model.norm is norm

    def read(self, x: Tensor, states: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]] | None:
        """The hidden vectors after the vectors x [S, dim] of S sequences, and the states behind
        them, one for each block. The states that are given stay as they are.

        None, and nothing is read, if PyTorch is to do it, as for mixers other than STEPPED, and for
        so many sequences that PyTorch is as fast.
        """
        if (
            not self.known
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or x.dtype != torch.float32
            or x.device.type != "cpu"
            or not 0 < len(x) <= MOST_SEQUENCES
        ):
            return None
        decoder = Decoder.of(cast(Any, self), exact=True)
        if decoder is None or [_shapes(state) for state in states] != decoder.templates:
            return None
        out = torch.empty(x.shape, **FP32)
        # By `data` the rows get no new version: a new one would have all weights packed again.
        rows = cast(Any, self.model).embed_tokens.weight.data
        found = []
        for at in range(0, len(x), MOST_ROWS):
            part = slice(at, at + MOST_ROWS)
            here = [map_tensors(operator.itemgetter(part), state) for state in states]
            count = min(MOST_ROWS, len(x) - at)
            session = Session(decoder, here, count)
            with _ROWS:
                rows[:count] = x[part]
                session.step(list(range(count)), out[part])
            found.append(session.current())
        mixers = [cast(Any, block).mixer for block in cast(Any, self.model.layers)]
        joined = (m.join_states(each) if len(each) > 1 else each[0]
                  for m, each in zip(mixers, zip(*found)))  # fmt: skip
        return out, tuple(joined)


#: Mixers whose states `BlockSteps` reads into; the cache of attention is too large to be copied.
STEPPED = (TrellisMixer, DeltaNetMixer)
#: Held while vectors are in the rows of an embedding, which all threads share.
_ROWS = threading.Lock()

#: Modules whose parameters the kernel reads. Others, such as adapters and quantised maps, do more.
PLAIN = (
    nn.Linear, nn.Embedding, nn.ModuleList, RMSNorm, GatedNorm, ShortConvolution,
    StreamConvolutions, DecayGate, Block, SwiGLU, TrellisMixer, DeltaNetMixer, TransformerMixer,
)  # fmt: skip
#: Fields of a Trellis mixer that the kernel computes, whatever their value, or of which only the
#: start of the weights or of the memories depends.
TRELLIS_FIELDS = {
    "form", "shape", "heads", "head_dim", "expand_v", "slots", "phi", "f", "psi", "mode",
    "minibatch", "error_at", "stale_step", "value_pass", "conv_width", "conv_on", "conv_bias",
    "tie_queries", "skip", "normalize", "lms_step", "step", "step_max", "step_bias", "forget_gate",
    "decay",
    "decay_rate", "decay_step", "half_life", "decay_temperature", "separate_gates",
    "normalize_alpha", "learn_initial_memory", "initial_memory_std", "norm_eps", "backend",
    "recompute",
}  # fmt: skip

Description = tuple[dict[str, Any], dict[str, Tensor], dict[str, list[Tensor]]]


def _shapes(state: Any) -> dict[str, Any]:
    """What the tensors of a state must be like, but for the number of sequences and columns."""
    found = {}
    for name, t in named_tensors(state):
        size = (t.shape[1], t.shape[3]) if name in ("keys", "values") else t.shape[1:]
        found[name] = size, t.dtype, t.device.type
    return found


def _describe(mixer: Any) -> Description:
    """Options, tensors and maps of a mixer, by the names that the kernel looks for."""
    if getattr(mixer.config, "backend", "auto") not in ("auto", "native"):
        raise Unfit(f"the mixer asks for backend={mixer.config.backend!r}")
    if isinstance(mixer, TrellisMixer):
        return _trellis(mixer)
    if isinstance(mixer, DeltaNetMixer):
        return _delta_net(mixer)
    assert isinstance(mixer, TransformerMixer)
    _check_size("attention", mixer.head_dim)
    for name in ("rope_scaling", "qkv_bias", "out_bias", "qk_norm"):
        if getattr(mixer.config, name):
            raise Unfit(f"it does not know attention with {name}")
    # The heads of the kernel are those of keys and values, each read by a group of queries.
    options = {"kind": "attention", "heads": mixer.kv_heads, "size": mixer.head_dim,
               "group": mixer.heads // mixer.kv_heads, "window": mixer.config.window or 0,
               "theta": mixer.config.rope_theta}  # fmt: skip
    return options, {}, {"in": [mixer.q_proj.weight, mixer.k_proj.weight, mixer.v_proj.weight]}


def _trellis(mixer: TrellisMixer) -> Description:
    config = mixer.config
    unknown = {field.name for field in fields(config)} - TRELLIS_FIELDS
    if unknown:
        raise Unfit(f"it does not know the fields {', '.join(sorted(unknown))} of the mixer")
    _check_size("trellis", max(mixer.key_dim, mixer.value_dim, mixer.slots))
    stale = config.mode == "stale" and config.minibatch > 1
    keys, values = config.step_maxima
    parts = {"q": mixer.q_proj, "k": mixer.k_proj, "v": mixer.v_proj, "alpha": mixer.alpha_proj,
             "gate": mixer.g_proj, "step": mixer.gamma_proj, "decay": mixer.beta_proj}  # fmt: skip
    options, tensors, maps = _projections(mixer, parts, config.normalize or ())
    options |= {
        "kind": "trellis", "passes": 2 if config.separate_gates else 1, "step": config.step,
        "minibatch": config.minibatch if stale else 1, "stale_step": config.stale_step,
        "decay": config.decay if config.forget_gate else "none", "lms": int(config.lms_step),
        "step_max1": keys, "step_max2": values, "temperature": config.decay_temperature,
        "eps": config.norm_eps, "alpha_norm": int(config.normalize_alpha),
    }  # fmt: skip
    for name in ("phi", "f", "psi", "value_pass", "error_at"):
        options[name] = getattr(config, name)
    tensors["out_norm"] = mixer.out_norm.weight
    if mixer.skip is not None:
        tensors["skip"] = mixer.skip
    return options, tensors, maps


def _delta_net(mixer: DeltaNetMixer) -> Description:
    _check_size("delta_net", max(mixer.key_dim, mixer.value_dim))
    parts = {"q": mixer.q_proj, "k": mixer.k_proj, "v": mixer.v_proj, "gate": mixer.g_proj,
             "step": mixer.b_proj, "decay": mixer.a_proj}  # fmt: skip
    options, tensors, maps = _projections(mixer, parts, ("q", "k"))
    options |= {
        "kind": "delta_net", "gated": int(mixer.g_proj is not None),
        "decays": int(mixer.decay is not None), "eps": mixer.config.norm_eps,
        "most": 2.0 if mixer.config.allow_neg_eigval else 1.0,
    }  # fmt: skip
    return options, {**tensors, "out_norm": mixer.out_norm.weight}, maps


def _projections(
    mixer: Any, parts: dict[str, nn.Linear | None], unit: tuple[str, ...]
) -> Description:
    """The maps that read a mixer's input, one behind the other, and what follows them."""
    options: dict[str, Any] = {"heads": mixer.heads}
    tensors: dict[str, Tensor] = {}
    at = 0
    for name, part in parts.items():
        options[f"{name}_at"] = at
        if part is None:
            continue
        options |= {f"{name}_size": part.out_features // mixer.heads,
                    f"{name}_unit": int(name in unit)}  # fmt: skip
        at += part.out_features
        if name in ("step", "decay"):
            none = torch.zeros(part.out_features, **FP32)
            tensors[f"{name}_bias"] = none if part.bias is None else part.bias
    for name, convolution in mixer.convolutions.items():
        tensors[f"{name}_conv"] = convolution.weight.T
        if convolution.bias is not None:
            tensors[f"{name}_bias"] = convolution.bias
    if mixer.decay is not None:
        tensors |= {"decay_bias": mixer.decay.dt_bias, "rate": mixer.decay.A_log.exp()}
    return options, tensors, {"in": [part.weight for part in parts.values() if part is not None]}


def _check_size(kind: str, size: int) -> None:
    largest = kernel().trellis_largest(kind.encode())
    if size > largest:
        raise Unfit(f"heads of {size} channels are beyond its {largest}")
