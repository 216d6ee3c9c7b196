"""What the memory of a model does while it reads: every quantity per layer, head and token.

The model reads the text as always. From what its Trellis mixers hand to their memories, the
definition of the memory is run again, token after token, and every state is looked at. The
quantities, for the memory of keys and for that of values, in the words of the recurrence

    M_t = beta_t M_{t-1} - gamma_t u_t x_t^T,    u_t the gradient of
    loss_t(M) = 1/2 |phi(M x_t) - target_t|^2    at the point P_t

where P_t is M_{t-1} in exact mode and the memory at the start of the mini-batch in stale mode:

    forget_gate     beta_t                      step_size       gamma_t, as the memory takes it
    write_norm      |gamma_t u_t x_t^T|         memory_norm     |M_t|  (Frobenius)
    error_before    loss_t(P_t), what the step descends from
    error_decayed   loss_t(beta_t M_{t-1}), had the token not been written
    error_after     loss_t(M_t)
    target_power    1/2 |target_t|^2, the loss of a memory that answers zero
    effective_rank  exp(entropy) of the singular values of M_t over their sum

Recall asks the memory at every time t for some tokens i, before and after they are written:

    recall_keys, recall_values   loss_i(M_t) / (1/2 |target_i|^2)
    recall_answer                cosine of v_i and what both passes answer to the query k_i
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.tokenizer import TextTokenizer
from ..mixers.trellis import MemoryInputs, TrellisMixer
from .replay import PASSES, QUANTITIES, RECALLS, Arrays, Heard, Replay, as_numpy
from .scoring import Progress
from .subject import Subject

#: Recall is kept for every layer up to so many entries of one of its arrays (16 MB), else for one.
RECALL_ENTRIES = 2**22


def trellis_layers(subject: Subject) -> dict[int, TrellisMixer]:
    """The mixers to look at, by their place in the model.

    Raises:
        ValueError: there is none.
    """
    if not subject.ours:
        kind = type(subject.model).__name__
        raise ValueError(f"{subject.name} has no Trellis layer to inspect: it is a {kind}")
    mixers = [block.mixer for block in subject.model.model.layers]
    found = {n: mixer for n, mixer in enumerate(mixers) if isinstance(mixer, TrellisMixer)}
    if not found:
        names = dict.fromkeys(name for name, _ in subject.model.config.layer_mixers())
        raise ValueError(
            f"{subject.name} has no Trellis layer to inspect: its mixers are {', '.join(names)}"
        )
    return found


def check_place(subject: Subject, layer: int | None, head: int | None) -> None:
    """Raises ValueError if the model has no such Trellis layer, or the layer no such head."""
    layers = trellis_layers(subject)
    if layer is None:
        if head is not None:
            raise ValueError(f"head {head} needs a layer: give both, or the layer alone")
        return
    if layer not in layers:
        raise ValueError(
            f"layer must be one of the Trellis layers of {subject.name}, "
            f"{', '.join(map(str, layers))}; got {layer}"
        )
    heads = layers[layer].heads
    if head is not None and not 0 <= head < heads:
        raise ValueError(f"head must be from 0 to {heads - 1} in layer {layer}; got {head}")


def recalls_all(subject: Subject, tokens: int, probes: int) -> bool:
    """Whether the recall of every layer is kept for a text of so many tokens."""
    layers = trellis_layers(subject)
    heads = next(iter(layers.values())).heads
    return len(layers) * heads * min(probes, tokens) * tokens <= RECALL_ENTRIES


@torch.no_grad()
def inspect(
    subject: Subject,
    ids: Sequence[int],
    *,
    layer: int | None = None,
    probes: int = 64,
    rank_every: int = 1,
    progress: Progress = lambda done: None,
) -> Arrays:
    """Read `ids` and look at every Trellis layer.

    Args:
        layer: the layer whose recall is measured where it is not kept for all (`recalls_all`);
            None takes the one with the head that forgets most slowly.
        probes: tokens that recall asks for, at most, spread over the text.
        rank_every: the effective rank at every so many tokens (and the last); NaN elsewhere.
        progress: called with tokens done, of tokens times layers.

    Returns:
        `keys_` and `values_` + every quantity, [layers, heads, T]; the recalls [R, heads, P, T] of
        the layers `recall_layers` [R] at the tokens `probes` [P]; `layers`, the places of the
        layers in the model; `mode` and `value_pass` [layers]; `ids`, `tokens` (their texts) [T];
        `replay_error` [layers], the relative RMS difference between the mixer's outputs from this
        replay and the model's own.

    Raises:
        ValueError: no Trellis layer, no such layer, nothing to read.
    """
    check_place(subject, layer, None)
    if not len(ids):
        raise ValueError("there is nothing to inspect: the text has no tokens")
    layers = trellis_layers(subject)
    count = min(probes, len(ids))
    asked = np.unique(np.linspace(0, len(ids) - 1, count).round().astype(int))
    # All layers of one mixer have one configuration, so as many heads.
    shape = (len(layers), next(iter(layers.values())).heads, len(ids))
    arrays: Arrays = {
        f"{memory}_{name}": np.full(shape, np.nan, np.float32)
        for memory in PASSES
        for name in QUANTITIES
    }
    arrays["layers"] = np.array(list(layers))
    asked_inputs: list[list[MemoryInputs]] = [[] for _ in layers]
    _listen(subject, ids, list(layers.values()), partial(_gates, arrays, asked, asked_inputs))
    recalled = list(layers)
    if not recalls_all(subject, len(ids), probes):
        recalled = [slowest(arrays)[0] if layer is None else layer]

    replays = [Replay(mixer, n, arrays, rank_every) for n, mixer in enumerate(layers.values())]
    chosen = [n for n, one in enumerate(layers) if one in recalled]
    for n in chosen:
        replays[n].ask(asked_inputs[n])

    def hear(heard: Heard) -> None:
        replays[heard.place].read(heard)
        progress(heard.x.shape[1])

    _listen(subject, ids, list(layers.values()), hear)
    return {
        **arrays,
        **{
            name: np.stack([np.concatenate(replays[n].recalls[name], -1) for n in chosen])
            for name in RECALLS
        },
        "recall_layers": np.array(recalled),
        "probes": asked,
        "mode": np.array([mode_of(mixer) for mixer in layers.values()]),
        "value_pass": np.array([mixer.config.value_pass for mixer in layers.values()]),
        "replay_error": np.array([replay.difference() for replay in replays]),
        "ids": np.array(ids),
        "tokens": np.array(token_texts(subject.tokenizer, ids)),
    }


def slowest(arrays: Arrays, layer: int | None = None) -> tuple[int, int]:
    """The layer with the head that forgets keys most slowly, and that head; or that of a layer."""
    chosen = slice(None) if layer is None else arrays["layers"] == layer
    with np.errstate(divide="ignore"):
        logs = np.log(arrays["keys_forget_gate"][chosen].astype(np.float64)).mean(-1)
    place, head = np.unravel_index(int(logs.argmax()), logs.shape)
    return int(arrays["layers"][chosen][place]), int(head)


def mode_of(mixer: TrellisMixer) -> str:
    """In words: where the gradient is taken."""
    config = mixer.config
    return "exact" if config.mode == "exact" else f"stale, mini-batches of {config.minibatch}"


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
    subject: Subject,
    ids: Sequence[int],
    mixers: Sequence[TrellisMixer],
    hear: Callable[[Heard], None],
) -> None:
    """Read a text; `hear` every call of every mixer, segment after segment."""
    seen = [0] * len(mixers)

    def hook(place: int, mixer: Any, given: tuple[Any, ...], out: tuple[Tensor, Any]) -> None:
        x, before = given[0], given[1]
        if before is None:
            before = mixer.init_state(1)
        hear(Heard(place, seen[place], x, before, mixer.project(x, before)[0], out[0]))
        seen[place] += x.shape[1]

    handles = [mixer.register_forward_hook(partial(hook, n)) for n, mixer in enumerate(mixers)]
    try:
        subject.model.read(torch.tensor([list(ids)], device=subject.device))
    finally:
        for handle in handles:
            handle.remove()


def _gates(
    arrays: Arrays, asked: np.ndarray, asked_inputs: list[list[MemoryInputs]], heard: Heard
) -> None:
    """Keep the gates of all tokens, and all inputs of those that recall asks for."""
    inputs, start, stop = heard.inputs, heard.start, heard.start + heard.x.shape[1]
    for n, memory in enumerate(PASSES):
        gates = {"forget_gate": inputs.log_beta[n].exp(), "step_size": inputs.gamma[n]}
        for name, gate in gates.items():
            arrays[f"{memory}_{name}"][heard.place, :, start:stop] = as_numpy(gate[0].mT)
    asked_inputs[heard.place] += [
        _copied(inputs.at(t - start)) for t in asked.tolist() if start <= t < stop
    ]


def _copied(inputs: MemoryInputs) -> MemoryInputs:
    """A view of some tokens would keep the inputs of all of them."""
    q, k, v, alpha, log_beta, gamma = inputs
    return MemoryInputs(
        q.clone(), k.clone(), v.clone(), alpha.clone(),
        (log_beta[0].clone(), log_beta[1].clone()), (gamma[0].clone(), gamma[1].clone()),
    )  # fmt: skip
