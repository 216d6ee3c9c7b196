"""What the memory of one layer and head does with every token: gates, and what slots hold."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.tokenizer import TextTokenizer
from ..evaluation.inspection import token_texts
from ..mixers.trellis import TrellisMixer
from ..models.cache import TrellisCache
from ..models.modeling import TrellisForCausalLM

#: Slots whose values are put into words, the strongest first, and words for each.
SLOTS, WORDS = 6, 3


def trellis_layers(model: TrellisForCausalLM) -> dict[int, int]:
    """The number of heads of every layer that has a Trellis memory, by the layer's number."""
    mixers = [block.mixer for block in model.model.layers]
    return {n: mixer.heads for n, mixer in enumerate(mixers) if isinstance(mixer, TrellisMixer)}


def check_place(model: TrellisForCausalLM, layer: int, head: int) -> None:
    """Raises ValueError if there is no such layer or head to look at."""
    layers = trellis_layers(model)
    if not layers:
        raise ValueError("memory cannot be shown: the model has no Trellis layer")
    if layer not in layers:
        raise ValueError(f"memory.layer must be one of {', '.join(map(str, layers))}; got {layer}")
    if not 0 <= head < layers[layer]:
        raise ValueError(f"memory.head must be from 0 to {layers[layer] - 1}; got {head}")


class Observer:
    """Reads along with one session, up to the layer that is looked at, with states of its own.

    Decoding itself goes on in the batch: the compiled decoder does not show its gates.
    """

    def __init__(
        self, model: TrellisForCausalLM, tokenizer: TextTokenizer, cache: TrellisCache,
        layer: int, head: int,
    ):  # fmt: skip
        self.model, self.tokenizer, self.layer, self.head = model, tokenizer, layer, head
        self.states = list(cache.states[: layer + 1])

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """One entry for every token: `token`, the gates `forget` and `step` of both memories, and
        the norm of every slot's `keys` and `values`. The last entry has the memories as pictures,
        too, and words for the strongest slots."""
        found: list[dict[str, Any]] = []
        for token in ids:
            before = self._memories()
            x = self.model.model.embed_tokens(torch.tensor([[token]], device=self.model.device))
            for i in range(self.layer + 1):
                block: Any = self.model.model.layers[i]
                if i == self.layer:
                    inputs, _ = block.mixer.project(block.mixer_norm(x), self.states[i])
                x, self.states[i] = block(x, self.states[i])
            after = self._memories()
            found.append({
                "token": token_texts(self.tokenizer, [token])[0],
                "forget": _numbers(torch.stack(inputs.log_beta)[:, 0, 0, self.head].exp()),
                "step": _numbers(torch.stack(inputs.gamma)[:, 0, 0, self.head]),
                "keys": _numbers(after[0].norm(dim=-1)),
                "values": _numbers(after[1].norm(dim=-1)),
                "written": _numbers((after[1] - before[1]).norm(dim=-1)),
            })  # fmt: skip
        if found:
            found[-1] |= {
                "picture": {name: picture(m) for name, m in zip(("keys", "values"), after)},
                "words": self._words(after[1]),
            }
        return found

    def _memories(self) -> tuple[Tensor, Tensor]:
        """The keys and the values of the head, [slots, channels] each."""
        memory = self.states[self.layer].memory
        keys, values = memory.keys[0, self.head], memory.values[0, self.head]
        mixer: Any = self.model.model.layers[self.layer].mixer
        return keys, values if mixer.config.value_pass == "encode" else values.mT

    def _words(self, values: Tensor) -> list[dict[str, Any]]:
        """The tokens that the strongest slots' values point to, through the output map alone."""
        mixer: Any = self.model.model.layers[self.layer].mixer
        strongest = values.norm(dim=-1).topk(min(SLOTS, len(values))).indices
        size = mixer.o_proj.in_features // mixer.heads
        columns = mixer.o_proj.weight[:, self.head * size : (self.head + 1) * size]
        stream = (values[strongest] * mixer.out_norm.weight) @ columns.T
        likeliest = self.model.lm_head(self.model.model.norm(stream)).topk(WORDS).indices
        return [
            {"slot": int(slot), "tokens": token_texts(self.tokenizer, ids.tolist())}
            for slot, ids in zip(strongest, likeliest)
        ]


def picture(memory: Tensor) -> dict[str, Any]:
    """A matrix as bytes in base64, row by row: 128 is zero, 1 and 255 the largest magnitude."""
    scale = float(memory.abs().max())
    bytes_ = (memory / (scale or 1.0) * 127 + 128).round().to(torch.uint8).cpu().numpy().tobytes()
    return {"shape": list(memory.shape), "scale": scale, "data": base64.b64encode(bytes_).decode()}


def _numbers(tensor: Tensor) -> list[float]:
    return [round(float(x), 4) for x in tensor.tolist()]
