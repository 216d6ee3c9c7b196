"""The cache: one state per layer. With bounded mixers it does not grow with the tokens read."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor
from transformers.cache_utils import Cache

from ..files import write_whole
from ..mixers.base import State, map_tensors, named_tensors, rebuild

if TYPE_CHECKING:
    from .decoder import Session
    from .modeling import TrellisPreTrainedModel

FORMAT = "trellis-cache"
FORMAT_VERSION = 2
#: The name of `TrellisCache.last` in a file; those of states begin with "layers.".
LAST = "last"


class OtherModel(ValueError):
    """A file of states belongs to a model with another configuration or other weights."""


class TrellisCache(Cache):
    """The states of all layers for a batch of sequences.

    A model makes it (`use_cache=True`, or `model.init_cache(batch)`) and updates it in place. A
    state may be None before the first token.
    """

    def __init__(self, model: TrellisPreTrainedModel, states: list[State]):
        super().__init__(layers=[])
        #: Where the native decoder keeps the states while it updates them in place.
        self.session: Session | None = None
        self._states = states
        #: Tokens read so far by each sequence, padding included. While no sequence has a state, it
        #: is empty.
        self.seen: list[int] = [0] * max(self.batch_size, 0)
        #: What `model.read` saw of the last token [B, dim]: `model.lm_head` predicts the next one
        #: from it. None where something else than `read` has changed the cache.
        self.last: Tensor | None = None
        self._model = weakref.ref(model)  # its weights are large, and it may hold caches itself

    @property
    def states(self) -> list[State]:
        """The states of all layers. No token that is read later changes these tensors."""
        self._states, self.session = self._current(), None
        return self._states

    @states.setter
    def states(self, states: list[State]) -> None:
        self._states, self.session = states, None

    def _current(self) -> list[State]:
        return self._states if self.session is None else self.session.current()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_states": self.states, "session": None}

    @property
    def nbytes(self) -> int:
        """The size of all states in bytes."""
        return sum(t.numel() * t.element_size() for _, t in self._tensors())

    @property
    def batch_size(self) -> int:
        if self.session is not None:
            return self.session.batch
        return next((tensor.shape[0] for _, tensor in self._tensors()), -1)

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [
            (f"layers.{i}.{name}", tensor)
            for i, state in enumerate(self._current())
            for name, tensor in named_tensors(state)
        ]

    def advance(self, tokens: int) -> None:
        """Counts tokens that every sequence has read. They replace what `last` was about."""
        self.seen = [n + tokens for n in self.seen or [0] * self.batch_size]
        self.last = None

    def clone(self) -> TrellisCache:
        """An independent copy: reading more into one does not change the other."""
        return self._map(torch.Tensor.clone)

    def detach(self) -> TrellisCache:
        """The same states cut off from the graph, for truncated back-propagation."""
        return self._map(torch.Tensor.detach)

    def reorder(self, index: Tensor) -> TrellisCache:
        """A cache whose n-th sequence is the index[n]-th of this one; repeats are allowed."""
        other = self._map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))
        other.seen = [self.seen[n] for n in index.tolist()]
        return other

    def select(self, batch: Tensor | list[int] | slice | int) -> TrellisCache:
        """A cache of some of the sequences."""
        return self.reorder(torch.arange(self.batch_size)[batch].reshape(-1))

    @classmethod
    def join(cls, caches: Sequence[TrellisCache]) -> TrellisCache:
        """One cache of all sequences of several caches of one model, in their order.

        What each sequence has read may be of any length. `select` takes a sequence out again;
        joining that alone gives attention's states back their own number of columns.

        Raises:
            ValueError: there is no cache, or they are of different models.
        """
        if not caches:
            raise ValueError("caches must be at least one cache; got none")
        model = caches[0]._owner()
        if any(cache._owner() is not model for cache in caches):
            raise ValueError("caches must all be of one model; got some of another")
        layers = zip(*(cache.states for cache in caches))
        blocks = model.base_model.layers
        joined = cls(model, [b.mixer.join_states(states) for b, states in zip(blocks, layers)])
        joined.seen = [n for cache in caches for n in cache.seen]
        hidden = [cache.last for cache in caches if cache.last is not None]
        joined.last = torch.cat(hidden) if len(hidden) == len(caches) else None
        return joined

    def _map(self, function: Any) -> TrellisCache:
        other = copy.copy(self)
        other.states = [map_tensors(function, state) for state in self.states]
        other.last = map_tensors(function, self.last)
        return other

    def _become(self, other: TrellisCache) -> None:
        self.states, self.seen, self.last = other.states, other.seen, other.last

    def _owner(self) -> TrellisPreTrainedModel:
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this cache is gone")
        return model

    # What generate() asks of a cache.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.seen, default=0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._become(self.reorder(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._become(self.select(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._become(self.reorder(torch.arange(self.batch_size).repeat_interleave(repeats)))

    def reset(self) -> None:
        self._become(self._owner().init_cache(self.batch_size))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError(
                "a memory that has read a token cannot give it back: clone() the cache before "
                "reading what may have to be undone"
            )

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return (
            f"TrellisCache(layers={len(self)}, sequences={self.batch_size}, "
            f"seen={self.seen}, nbytes={self.nbytes})"
        )

    # Files.

    def save(self, path: str | os.PathLike[str], fingerprint: str | None = None) -> None:
        """Write the cache to a safetensors file, whole or not at all.

        The file holds a format version, a checksum of all that it holds, and a fingerprint of the
        model's configuration and present weights: `load` refuses the file for any other model.

        fingerprint: what `model.fingerprint()` has returned, if the weights are still the same:
            hashing those of a large model takes seconds.
        """
        write_whole(Path(path), self.dump(fingerprint))

    def dump(self, fingerprint: str | None = None) -> bytes:
        """The content of the file that `save` writes."""
        equal = len(set(self.seen)) == 1
        found = self._tensors() + ([] if self.last is None else [(LAST, self.last)])
        tensors = {name: t.detach().cpu().contiguous().clone() for name, t in found}
        content = {
            "fingerprint": fingerprint or self._owner().fingerprint(),
            "seen": json.dumps(self.seen[0] if equal else self.seen),
        }
        return pack_tensors(FORMAT, FORMAT_VERSION, tensors, content)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: TrellisPreTrainedModel,
        fingerprint: str | None = None,
    ) -> TrellisCache:
        """Read a cache that `save` wrote for this very model.

        fingerprint: as for `save`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is cut or changed, or of another format.
            OtherModel: a ValueError, too; the file is whole, but of another model.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no cache file at {path}")
        tensors, content = read_tensors(path, FORMAT, FORMAT_VERSION)
        if content.get("fingerprint") != (fingerprint or model.fingerprint()):
            raise OtherModel(
                f"{path} belongs to a model with another configuration or other weights"
            )
        tensors = {name: tensor.to(model.device) for name, tensor in tensors.items()}
        cache = model.init_cache(1)
        template = dict(cache._tensors())
        last = tensors.pop(LAST, None)
        sequences = next((tensor.shape[0] for tensor in tensors.values() if tensor.dim()), 0)
        if template.keys() != tensors.keys() or not all(
            _fits(tensor, template[name], sequences) for name, tensor in tensors.items()
        ):
            raise ValueError(f"{path} does not hold the states of this model's layers")
        states = [rebuild(s, tensors, f"layers.{i}") for i, s in enumerate(cache.states)]
        cache.states, cache.last = states, last
        cache.seen = _counts(content.get("seen", ""), sequences)
        shape = (sequences, model.config.hidden_size)
        if len(cache.seen) != sequences or (last is not None and last.shape != shape):
            raise ValueError(f"{path} does not say what each of its {sequences} sequences has read")
        return cache


def pack_tensors(
    format: str, version: int, tensors: dict[str, Tensor], content: dict[str, str]
) -> bytes:
    """The content of a safetensors file with tensors and texts.

    It also holds its format, the version of the format and a checksum of everything.
    """
    content = {"format": format, "version": str(version), **content}
    content["sha256"] = _checksum(tensors, content)
    return to_safetensors(tensors, metadata=content)


def read_tensors(path: Path, format: str, version: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the texts of a file that holds what `pack_tensors` returned.

    Raises ValueError if the file is cut or changed, or of another format or version.
    """
    try:
        with safe_open(path, framework="pt") as file:
            content = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    if content.get("format") != format:
        raise ValueError(f"{path} is a safetensors file, but not one of a {format}")
    if content.get("version") != str(version):
        raise ValueError(
            f"{path} has format version {content.get('version')}; this version of trellis "
            f"reads {version}"
        )
    if content.pop("sha256", None) != _checksum(tensors, content):
        raise ValueError(f"{path} has been changed: its contents do not match its checksum")
    return tensors, content


def _fits(tensor: Tensor, template: Tensor, sequences: int) -> bool:
    """Whether a tensor is that of a state; where the template has no column yet, it has any."""
    sizes = zip(tensor.shape, (sequences, *template.shape[1:]))
    return (
        tensor.dtype == template.dtype
        and tensor.dim() == template.dim()
        and all(size == wanted or not wanted for size, wanted in sizes)
    )


def _counts(text: str, sequences: int) -> list[int]:
    """The tokens that each sequence has read, from one number or a list; empty if it is neither."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    counts = found if isinstance(found, list) else [found] * sequences
    return counts if all(type(n) is int and n >= 0 for n in counts) else []


def _checksum(tensors: dict[str, Tensor], content: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def hash_weights(digest: Any, model: torch.nn.Module) -> None:
    """Update a hash with every weight of a model."""
    for name, value in sorted(model.state_dict().items()):
        # torch's quantize_dynamic puts tuples of weight and bias, and types, into a state_dict.
        for weight in value if isinstance(value, tuple) else (value,):
            if not isinstance(weight, Tensor):
                digest.update(f"{name} {weight}".encode())
                continue
            digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
            if weight.is_quantized or type(weight.data) is not Tensor:  # of torchao, for one
                weight = weight.dequantize()
            digest.update(tensor_bytes(weight))


def tensor_bytes(tensor: Tensor) -> Any:
    """The tensor's memory as a buffer of bytes."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
