"""`trellis eval inspect`: what the memory of a model does while it reads a text.

The model reads the text as always. From what its Trellis mixers hand to their memories, the
definition of the memory is run again, token after token, and every state is measured. There are
two memories, of keys and of values. In the words of the recurrence

    M_t = beta_t M_{t-1} - gamma_t u_t x_t^T,    u_t the gradient of
    loss_t(M) = 1/2 |phi(M x_t) - target_t|^2    at the point P_t

where P_t is M_{t-1} in exact mode and the memory at the start of the mini-batch in stale mode, or
beta_t times that with error_at = "after", the quantities of a memory are

    forget_gate     beta_t                      step_size       gamma_t, as the memory takes it
    write_norm      |gamma_t u_t x_t^T|         memory_norm     |M_t|  (Frobenius)
    error_before    loss_t(P_t), from which the step descends
    error_decayed   loss_t(beta_t M_{t-1}), as if the token were not written
    error_after     loss_t(M_t)
    target_power    1/2 |target_t|^2, the loss of a memory that answers zero
    effective_rank  exp(entropy) of the singular values of M_t, divided by their sum

Recall asks the memory at every time t for some tokens i, before and after they are written:

    recall_keys, recall_values   loss_i(M_t) / (1/2 |target_i|^2)
    recall_answer                cosine of v_i and the answer of both memories to the query k_i
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ... import figures
from ...checks import compute_dtype
from ...data.tokenizer import TextTokenizer
from ...files import whole_file
from ...mixers.trellis import MemoryInputs, TrellisMixer
from ...ops import MemoryState, trellis_memory_step
from ...ops.memory import value_write
from ...ops.memory.activations import FUNCTIONS
from ..models import EvaluatedModel
from ..ppl import encode
from ..runner import Job, Record, Records, Report, Table
from ..scoring import Progress
from .picture import PASSES, Arrays, draw, half_life

#: The names of all quantities of a memory.
QUANTITIES = (
    "forget_gate", "step_size", "write_norm", "error_before", "error_decayed", "error_after",
    "target_power", "memory_norm", "effective_rank",
)  # fmt: skip
RECALLS = ("recall_keys", "recall_values", "recall_answer")
#: The most entries of an array of recall (16 MB): of a long text, fewer tokens are asked for.
RECALL_ENTRIES = 2**22
#: The memories of this many tokens exist at a time.
CHUNK = 32


def run(
    model: EvaluatedModel,
    text: str,
    out: Path,
    *,
    source: str = "the command line",
    tokens: int | None = None,
    layer: int | None = None,
    head: int | None = None,
    probes: int = 64,
    rank_every: int = 1,
) -> Report:
    """Inspects the first `tokens` tokens of a text.

    source: where the text came from, for the record. layer, head: what the picture shows; the
    arrays have all layers and heads. The report's files are the arrays and the picture, both named
    like the record. Raises ValueError at an empty text, or where there is no such layer or head.
    """
    check_place(model, layer, head)
    figures.check()
    if not text:
        raise ValueError("there is nothing to inspect: the text is empty")
    ids = encode(model, text).ids[:tokens]
    setting = {
        "ids_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        "tokens": len(ids),
        "layer": None,  # arrays have all layers
        "probes": probes,
        "rank_every": rank_every,
    }
    look = partial(inspect, model, ids, probes=probes, rank_every=rank_every)
    measured: list[Arrays] = []

    def summarised(progress: Progress) -> dict[str, Any]:
        measured.append(look(progress=progress))
        return {"layers": summary(measured[0])}

    total = len(ids) * len(trellis_layers(model))
    job = Job(setting, summarised, f"{len(ids)} tokens", total, {"source": source})
    records = Records(out, "inspect")
    record = records.measured(model, job)
    written = records.file_of(model, setting)
    if written is None:
        raise FileNotFoundError(f"the record is no longer in {records.folder}: it was deleted")
    kept = written.with_suffix(".npz")
    if measured or not kept.is_file():  # the record may be there without its arrays
        arrays = measured[0] if measured else look()
        with whole_file(kept) as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
    place = "" if layer is None else f"-layer-{layer}"
    place += "" if head is None else f"-head-{head}"
    picture = kept.with_name(f"{kept.stem}{place}.png")
    draw(picture, load(kept), model.name, layer=layer, head=head)
    return Report(record, [_table(record, model.name)], [kept, picture])


def load(path: Path) -> Arrays:
    """Reads the arrays that `run` wrote."""
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def summary(arrays: Arrays) -> list[dict[str, Any]]:
    """Means over heads and tokens, for every layer and memory."""
    return [
        {"layer": int(layer), "mode": str(mode), **{m: _summary(arrays, n, m) for m in PASSES}}
        for n, (layer, mode) in enumerate(zip(arrays["layers"], arrays["mode"]))
    ]


def _summary(arrays: Arrays, n: int, memory: str) -> dict[str, Any]:
    def of(name: str) -> np.ndarray:
        return arrays[f"{memory}_{name}"][n]

    gates, power = of("forget_gate"), float(of("target_power").sum())
    lives = sorted(half_life(one) for one in gates)
    # JSON has no infinity: a head that never forgets has a half-life of None.
    fastest, slowest = (lives[n] if math.isfinite(lives[n]) else None for n in (0, -1))
    return {
        "forget_gate": float(gates.mean()),
        "half_life_of_fastest_head": fastest,
        "half_life_of_slowest_head": slowest,
        "step_size": float(of("step_size").mean()),
        "write_norm": float(of("write_norm").mean()),
        **{
            f"error_{when}": float(of(f"error_{when}").sum()) / power if power else None
            for when in ("before", "decayed", "after")
        },
        "memory_norm_at_end": float(of("memory_norm")[:, -1].mean()),
        "effective_rank_at_end": float(of("effective_rank")[:, -1].mean()),
    }


def _table(record: Record, name: str) -> Table:
    rows = []
    for layer in record["result"]["layers"]:
        for memory in PASSES:
            found = layer[memory]
            lives = [found[f"half_life_of_{which}_head"] for which in ("fastest", "slowest")]
            errors = [found[f"error_{when}"] for when in ("before", "after")]
            rows.append([
                layer["layer"], memory, f"{found['forget_gate']:.3f}",
                *("\u221e" if life is None else f"{life:.1f}" for life in lives),
                f"{found['step_size']:.3f}",
                " \u2192 ".join("-" if error is None else f"{error:.3f}" for error in errors),
                f"{found['effective_rank_at_end']:.1f}",
            ])  # fmt: skip
    modes = ", ".join(dict.fromkeys(layer["mode"] for layer in record["result"]["layers"]))
    tokens = record["setting"]["tokens"]
    heads = ["layer", "memory", "forget gate", "half-life of the fastest head", "of the slowest",
             "step size", "error before \u2192 after", "effective rank at the end"]  # fmt: skip
    return Table(
        f"{name} reading {tokens:,} tokens, mode: {modes}; half-lives in tokens", heads, rows
    )


def trellis_layers(model: EvaluatedModel) -> dict[int, TrellisMixer]:
    """The Trellis mixers of a model by the number of their layer; ValueError if there is none."""
    if not model.ours:
        kind = type(model.network).__name__
        raise ValueError(f"{model.name} has no Trellis layer to inspect: it is a {kind}")
    mixers = [block.mixer for block in model.network.model.layers]
    found = {n: mixer for n, mixer in enumerate(mixers) if isinstance(mixer, TrellisMixer)}
    if not found:
        names = dict.fromkeys(name for name, _ in model.network.config.layer_mixers())
        raise ValueError(
            f"{model.name} has no Trellis layer to inspect: its mixers are {', '.join(names)}"
        )
    return found


def check_place(model: EvaluatedModel, layer: int | None, head: int | None) -> None:
    """Raises ValueError if the model has no such Trellis layer, or the layer no such head."""
    layers = trellis_layers(model)
    if layer is None and head is None:
        return
    if layer is None:
        raise ValueError(f"head {head} needs a layer: give both, or the layer alone")
    if layer not in layers:
        raise ValueError(
            f"layer must be one of the Trellis layers of {model.name}, "
            f"{', '.join(map(str, layers))}; got {layer}"
        )
    heads = layers[layer].heads
    if head is not None and not 0 <= head < heads:
        raise ValueError(f"head must be from 0 to {heads - 1} in layer {layer}; got {head}")


@torch.no_grad()
def inspect(
    model: EvaluatedModel,
    ids: Sequence[int],
    *,
    probes: int = 64,
    rank_every: int = 1,
    progress: Progress = lambda done: None,
) -> Arrays:
    """Reads `ids` and measures every Trellis layer.

    Args:
        probes: the number of tokens that recall asks for, at most, spread over the text.
        rank_every: with 10, the effective rank is computed at every tenth token and at the last
            one; it is NaN elsewhere.
        progress: called with the number of tokens that one layer has done.

    Returns:
        `keys_` and `values_` + every quantity, [layers, heads, T]; the recalls of the tokens
        `probes` [P], [layers, heads, P, T]; `layers`, the numbers of the layers, which are also
        `recall_layers`; `mode` and `value_pass` [layers]; `ids`, `tokens` (their texts) [T].
    """
    layers = trellis_layers(model)
    if not len(ids):
        raise ValueError("there is nothing to inspect: the text has no tokens")
    mixers = list(layers.values())
    # All Trellis layers of a model have one configuration, and so the same number of heads.
    shape = (len(layers), mixers[0].heads, len(ids))
    count = max(1, min(probes, len(ids), RECALL_ENTRIES // math.prod(shape)))
    asked = np.unique(np.linspace(0, len(ids) - 1, count).round().astype(int))
    arrays: Arrays = {
        f"{memory}_{name}": np.full(shape, np.nan, np.float32)
        for memory in PASSES
        for name in QUANTITIES
    }
    arrays["layers"] = np.array(list(layers))
    asked_inputs: list[list[MemoryInputs]] = [[] for _ in layers]

    def collect(place: int, start: int, inputs: MemoryInputs) -> None:
        places = asked - start
        inside = places[(places >= 0) & (places < inputs.q.shape[1])].tolist()
        asked_inputs[place] += [_copied(inputs.at(t)) for t in inside]

    _listen(model, ids, mixers, collect)
    replays = [Replay(mixer, n, arrays, rank_every) for n, mixer in enumerate(mixers)]
    for replay, inputs in zip(replays, asked_inputs):
        replay.ask(inputs)

    def measured(place: int, start: int, inputs: MemoryInputs) -> None:
        replays[place].read(start, inputs)
        progress(inputs.q.shape[1])

    _listen(model, ids, mixers, measured)
    config = mixers[0].config
    mode = "exact" if config.mode == "exact" else f"stale, mini-batches of {config.minibatch}"
    return {
        **arrays,
        **{
            name: np.stack([np.concatenate(replay.recalls[name], -1) for replay in replays])
            for name in RECALLS
        },
        "recall_layers": arrays["layers"],
        "probes": asked,
        "mode": np.array([mode] * len(mixers)),
        "value_pass": np.array([config.value_pass] * len(mixers)),
        "ids": np.array(ids),
        "tokens": np.array(token_texts(model.tokenizer, ids)),
    }


def token_texts(tokenizer: TextTokenizer, ids: Sequence[int]) -> list[str]:
    """Every token as text; bytes that are no text as hexadecimals, special tokens by name."""
    table = tokenizer.token_bytes
    found = []
    for i in ids:
        text = tokenizer.decode([i])
        if "\ufffd" in text and table is not None:
            text = table[i].hex()
        found.append(text or tokenizer.inner.id_to_token(i) or "")
    return found


def _listen(
    model: EvaluatedModel,
    ids: Sequence[int],
    mixers: Sequence[TrellisMixer],
    hear: Callable[[int, int, MemoryInputs], None],
) -> None:
    """Lets the model read a text; `hear` gets every call of every mixer, segment by segment: the
    mixer's place in the list, the place of the first token, and what the memory was given."""
    seen = [0] * len(mixers)

    def hook(place: int, mixer: Any, given: tuple[Any, ...], out: Any) -> None:
        x, before = given[0], given[1]
        if before is None:
            before = mixer.init_state(1)
        hear(place, seen[place], mixer.project(x, before)[0])
        seen[place] += x.shape[1]

    handles = [mixer.register_forward_hook(partial(hook, n)) for n, mixer in enumerate(mixers)]
    try:
        model.network.read(torch.tensor([list(ids)], device=model.device))
    finally:
        for handle in handles:
            handle.remove()


def _copied(inputs: MemoryInputs) -> MemoryInputs:
    """A copy, since a view of some tokens would keep the inputs of all of them in memory."""
    q, k, v, alpha, log_beta, gamma = inputs
    return MemoryInputs(
        q.clone(), k.clone(), v.clone(), alpha.clone(),
        (log_beta[0].clone(), log_beta[1].clone()), (gamma[0].clone(), gamma[1].clone()),
    )  # fmt: skip


class Replay:
    """Runs the memory of one layer by its definition and fills the arrays [layers, heads, T].

    place: the layer's place in the arrays. state: the memories after the tokens read so far.
    recalls: parts [heads, P, tokens] of the arrays of recall, in the order of the text.
    """

    def __init__(self, mixer: TrellisMixer, place: int, arrays: Arrays, rank_every: int):
        self.mixer, self.place, self.arrays, self.rank_every = mixer, place, arrays, rank_every
        self.state: MemoryState = mixer.init_state(1).memory
        self.recalls: dict[str, list[np.ndarray]] = {name: [] for name in RECALLS}
        self.asked: tuple[Pair, Pair, Tensor, Tensor] | None = None

    def ask(self, inputs: list[MemoryInputs]) -> None:
        """Measures, from now on, the recall of the tokens with these inputs."""
        # P times [1, H, ...] -> [H, P, ...]: the memory of a head answers all of its probes.
        k, v, alpha = (
            torch.cat([getattr(one, name) for one in inputs]).transpose(0, 1)
            for name in ("k", "v", "alpha")
        )
        keys, values = pairs(self.mixer, inputs[0]._replace(k=k, v=v, alpha=alpha))
        self.asked = keys, values, k, v

    def read(self, start: int, inputs: MemoryInputs) -> None:
        """Reads and measures tokens that follow those read before; `start` is the first's place."""
        for begin in range(0, inputs.q.shape[1], CHUNK):
            chunk = inputs.at(slice(begin, begin + CHUNK))
            states = [self.state]
            for t in range(chunk.q.shape[1]):
                _, self.state = trellis_memory_step(
                    *chunk.at(t), initial_state=self.state, backend="reference",
                    **self.mixer.choices,
                )  # fmt: skip
                states.append(self.state)
            self._measure(chunk, start + begin, states)

    def _measure(self, inputs: MemoryInputs, start: int, states: list[MemoryState]) -> None:
        """states: one before each token and one after the last. start: the first token's place."""
        places = start + np.arange(len(states) - 1)
        last = self.arrays["keys_forget_gate"].shape[-1] - 1
        ranked = np.flatnonzero((places % self.rank_every == 0) | (places == last))
        afters = []
        for n, (x, target, phi) in enumerate(pairs(self.mixer, inputs)):
            pair = Pair(x[0, :, :, None], target[0, :, :, None], phi)  # [C, H, 1, ...]
            passes = [state.value_pass if n else state.key_pass for state in states]
            memory = torch.cat([one.memory for one in passes])  # [C + 1, H, M, D]
            before, after = memory[:-1], memory[1:]
            forget_gate = inputs.log_beta[n][0].to(memory.dtype).exp()[..., None, None]
            decayed = forget_gate * before
            # The points where the gradients of the tokens are taken.
            points = torch.cat(
                [one.memory if one.anchor is None else one.anchor for one in passes[:-1]]
            )
            if self.mixer.config.error_at == "after":
                points = forget_gate * points
            found = {
                "forget_gate": inputs.log_beta[n][0].exp(),
                "step_size": inputs.gamma[n][0],
                "write_norm": (after - decayed).norm(dim=(-2, -1)),
                "error_before": inner_loss(points, pair)[..., 0],
                "error_decayed": inner_loss(decayed, pair)[..., 0],
                "error_after": inner_loss(after, pair)[..., 0],
                "target_power": target_power(pair)[..., 0],
                "memory_norm": after.norm(dim=(-2, -1)),
            }
            found["effective_rank"] = torch.full_like(found["memory_norm"], math.nan)
            found["effective_rank"][ranked] = effective_rank(after[ranked])
            for name, value in found.items():  # [C, H]
                array = self.arrays[f"{PASSES[n]}_{name}"][self.place]
                array[:, places] = _as_numpy(value.mT)
            afters.append(after)
        if self.asked is None:
            return
        keys, values = afters
        key_pairs, value_pairs, k, v = self.asked
        recalled = (
            relative_error(keys, key_pairs),
            relative_error(values, value_pairs),
            answer_cosine(self.mixer, keys, values, k, v),
        )
        for name, value in zip(RECALLS, recalled):  # [C, H, P] -> [H, P, C]
            self.recalls[name].append(_as_numpy(value.permute(1, 2, 0)))


def _as_numpy(tensor: Tensor) -> np.ndarray:
    """fp32, for arrays that are kept."""
    return tensor.float().cpu().numpy()


class Pair(NamedTuple):
    """What a pass must learn of a token: phi(M x) = target. x [..., D], target [..., M]."""

    x: Tensor
    target: Tensor
    phi: str


def pairs(mixer: TrellisMixer, inputs: MemoryInputs) -> tuple[Pair, Pair]:
    """The pairs of the key pass and of the value pass."""
    config = mixer.config
    x, target, phi, _ = value_write(inputs.v, inputs.alpha, config.phi, config.value_pass)
    dtype = compute_dtype(inputs.k, inputs.alpha)  # that of the memories
    return (
        Pair(inputs.k.to(dtype), inputs.alpha.to(dtype), config.phi),
        Pair(x.to(dtype), target.to(dtype), phi),
    )


def inner_loss(memory: Tensor, pair: Pair) -> Tensor:
    """1/2 |phi(M x) - target|^2, which a write descends: memory [..., M, D] -> [..., P].

    Here and below a memory is asked for P tokens: x [..., P, D], target [..., P, M].
    """
    code = FUNCTIONS[pair.phi](pair.x @ memory.mT)
    return (code - pair.target).square().sum(-1) / 2


def target_power(pair: Pair) -> Tensor:
    """1/2 |target|^2, the inner loss of an answer of zeros: [..., P]."""
    return pair.target.square().sum(-1) / 2


def relative_error(memory: Tensor, pair: Pair) -> Tensor:
    """The inner loss over that of zeros: 0 is a perfect answer, 1 is as good as none."""
    return inner_loss(memory, pair) / target_power(pair).clamp_min(1e-30)


def answer_cosine(
    mixer: TrellisMixer, keys: Tensor, values: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Cosine of v [..., P, V] and the answer of both memories to the query k [..., P, K].

    The mixer normalises the answer, so only its direction counts.
    """
    config = mixer.config
    code = FUNCTIONS[config.f](k.to(keys.dtype) @ keys.mT)
    answer = FUNCTIONS[config.psi](code @ (values if config.value_pass == "encode" else values.mT))
    return F.cosine_similarity(answer, v.to(answer.dtype), dim=-1)


def effective_rank(memory: Tensor) -> Tensor:
    """exp(entropy) of the singular values over their sum, [..., M, D] -> [...]; 0 for zeros."""
    values = torch.linalg.svdvals(memory)
    total = values.sum(-1, keepdim=True)
    share = values / total.clamp_min(torch.finfo(values.dtype).tiny)
    return torch.special.entr(share).sum(-1).exp() * (total[..., 0] > 0)
