"""A causal language model to be measured: a run, an exported folder, or any of transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..data.tokenizer import TextTokenizer
from ..models.cache import TrellisCache, hash_weights
from ..models.modeling import TrellisForCausalLM
from ..training.run import RECIPE, load_run, recipe_of

#: Names that configurations give to the longest input of an attention model.
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


class Subject:
    """A model, its tokenizer, and what a result must say of them.

    bounded: its state does not grow with what it reads, so texts of any length can be read in
    segments. max_context: the most tokens that it can read, None where there is no limit.
    bos: the token that begins texts, where the tokenizer of a model of transformers names one.
    prefix, suffix: what such a tokenizer itself puts around every text; ours put nothing there.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: TextTokenizer,
        about: dict[str, Any],
        bos: int | None = None,
    ):
        self.name = name
        self.model = model.eval()
        self.tokenizer = tokenizer
        digest = hashlib.sha256()
        hash_weights(digest, model)
        self.ours = isinstance(model, TrellisForCausalLM)
        self.bos = bos
        self.prefix, self.suffix = ([], []) if self.ours else _around(tokenizer)
        self.max_context = None if self.ours else _limit(model.config)
        #: What a result must say to be repeated.
        self.about = {
            "name": name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "weights_sha256": digest.hexdigest(),
            "tokenizer_sha256": tokenizer.sha256,
            **about,
        }

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def bounded(self) -> bool:
        """Whether what it keeps of a text stops growing."""
        if not self.ours:
            return False
        return all(block.mixer.state_size() < float("inf") for block in self.model.model.layers)

    @property
    def start(self) -> list[int]:
        """What stands before a text that nothing precedes, as models were trained.

        Ours: the token that ends documents. Of transformers: what the tokenizer puts before every
        text; if nothing, the token that begins texts; if there is none, the one that ends them.
        """
        if self.prefix:
            return self.prefix
        first = self.tokenizer.end_of_document if self.bos is None else self.bos
        return [] if first is None else [first]

    def check_context(self, tokens: int, what: str) -> None:
        """Raises ValueError if the model cannot read so many tokens."""
        if self.max_context is not None and tokens > self.max_context:
            raise ValueError(
                f"{what} has {tokens:,} tokens, but {self.name} reads at most "
                f"{self.max_context:,}: take a shorter one"
            )

    @torch.no_grad()
    def logits(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits [T, V] of every row; rows of different lengths share a batch."""
        ids, mask = self._batch(rows)
        out = self.model(ids, attention_mask=mask, use_cache=False, logits_to_keep=0).logits
        return [logits[: len(row)] for logits, row in zip(out, rows)]

    @torch.no_grad()
    def read(self, rows: Sequence[Sequence[int]]) -> tuple[list[Tensor], TrellisCache]:
        """Logits after the last token of every row, and the states: our models only."""
        ids, mask = self._batch(rows)
        cache = self.model.init_cache(len(rows))
        hidden = self.model.model(ids, attention_mask=mask, past_key_values=cache)
        last = mask.sum(1) - 1
        at = hidden.last_hidden_state[torch.arange(len(rows)), last]
        return list(self.model.lm_head(at)), cache

    @torch.no_grad()
    def go_on(self, rows: Sequence[Sequence[int]], cache: TrellisCache) -> list[Tensor]:
        """Logits [T, V] of rows that go on from states, which are moved on: our models only."""
        ids, mask = self._batch(rows)
        out = self.model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=0).logits
        return [logits[: len(row)] for logits, row in zip(out, rows)]

    def _batch(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Rows padded on the right, and their mask. A causal model never sees that padding."""
        tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
        ids = pad_sequence(tensors, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        return ids.to(self.device), mask.to(self.device)


def check_exists(model: str) -> None:
    """Raises FileNotFoundError at a path that holds no model; names of the hub may pass."""
    path = Path(model)
    if path.exists():
        if not (path / RECIPE).is_file() and not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"{model} is neither a run nor a model: it has no {RECIPE} and no config.json"
            )
    elif model.count("/") > 1 or model.startswith((".", "/")):
        raise FileNotFoundError(f"there is no run and no model at {model}")


def load_subject(model: str, device: str = "cpu") -> Subject:
    """A run's folder, a folder that `trellis export` wrote, or a model of transformers.

    Raises:
        FileNotFoundError: there is nothing of that name.
        ValueError: what is there cannot be loaded.
    """
    path = Path(model)
    if (path / RECIPE).is_file():
        ours, tokenizer = load_run(path, device=device)
        recipe = recipe_of(path).as_dict()
        return Subject(path.name, ours, tokenizer, {"path": str(path), "recipe": recipe})
    config = path / "config.json"
    if config.is_file() and json.loads(config.read_text()).get("model_type") == "trellis":
        ours, tokenizer = load_run(path, device=device)
        return Subject(path.name, ours, tokenizer, {"path": str(path)})
    return _from_transformers(model, device)


def _from_transformers(name: str, device: str) -> Subject:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_exists(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(name).to(device)
        loaded = AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise FileNotFoundError(f"there is no model {name}: {error}") from error
    if not getattr(loaded, "backend_tokenizer", None):
        raise ValueError(f"the tokenizer of {name} has no fast form (tokenizer.json)")
    tokenizer = TextTokenizer(loaded.backend_tokenizer.to_str(), name)
    if loaded.eos_token_id is not None:
        tokenizer.end_of_document = loaded.eos_token_id
    return Subject(Path(name).name, model, tokenizer, {"path": name}, loaded.bos_token_id)


def _around(tokenizer: TextTokenizer) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and behind every text: what is around a text that is known."""
    text = tokenizer.inner.encode("a", add_special_tokens=False).ids
    whole = tokenizer.inner.encode("a").ids
    for place in range(len(whole) - len(text) + 1):
        if text and whole[place : place + len(text)] == text:
            return whole[:place], whole[place + len(text) :]
    return [], []


def _limit(config: Any) -> int | None:
    found = [getattr(config, name, None) for name in _LIMITS]
    return next((limit for limit in found if isinstance(limit, int) and limit > 0), None)
