"""Opens a model to measure: a run of `trellis train`, a folder of `trellis export`, or a causal
model of transformers by its folder or its name on the hub.

Files are looked at before weights are loaded, so that an error names the model and the file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..data.tokenizer import TextTokenizer, load_tokenizer
from ..files import parse_json
from ..models.cache import TrellisCache, hash_weights
from ..models.modeling import TrellisForCausalLM
from ..training.checkpoint import open_checkpoint
from ..training.run import RECIPE, TOKENIZER, load_run, recipe_of

#: One of our models reads about this many tokens at a time.
SEGMENT_TOKENS = 4096
#: Fields of a configuration that may change when a model is copied, but not what it computes.
_NOISE = ("_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype",
          "torch_dtype")  # fmt: skip
#: Names that configurations of transformers give to the longest input of an attention model.
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
#: Any of these files can hold the tokenizer of a model of transformers.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
#: Errors that libraries raise for files which they cannot read.
_UNREADABLE = (
    OSError, ValueError, AttributeError, TypeError, KeyError, RuntimeError, SafetensorError,
)  # fmt: skip


class EvaluatedModel:
    """A network with its tokenizer, and the facts that a result must state about both.

    network: the torch module: `ours` (TrellisForCausalLM), or a causal model of transformers.
    max_context: the most tokens that the network can read; None means any number.
    bos: the token that begins texts, where the tokenizer of a model of transformers, or the
        configuration of an imported one of ours, names one.
    prefix, suffix: the tokens that such a tokenizer puts around every text; ours adds none.
    about: the part of a record that describes the model.
    """

    def __init__(
        self,
        name: str,
        network: Any,
        tokenizer: TextTokenizer,
        about: dict[str, Any],
        bos: int | None = None,
    ):
        self.name = name
        self.network = network.eval()
        self.tokenizer = tokenizer
        self.ours = isinstance(network, TrellisForCausalLM)
        self.bos = network.config.bos_token_id if self.ours else bos
        self.prefix, self.suffix = ([], []) if self.ours else _around(tokenizer)
        self.max_context = None if self.ours else _limit_of(network.config)
        digest = hashlib.sha256()
        hash_weights(digest, network)
        self.about = {
            "name": name,
            "parameters": sum(p.numel() for p in network.parameters()),
            "weights_sha256": digest.hexdigest(),
            "config_sha256": _hash_config(network.config),
            "tokenizer_sha256": tokenizer.sha256,
            "start": self.start,
            "end": tokenizer.end_of_document,
            **about,
        }

    @property
    def identity(self) -> dict[str, Any]:
        """The facts that a result depends on; a model's name and place are not among them."""
        names = ("weights_sha256", "config_sha256", "tokenizer_sha256", "start", "end")
        return {name: self.about[name] for name in names}

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def start(self) -> list[int]:
        """The tokens before a text that nothing precedes, as the model saw it in training.

        For our models this is the token that ends documents, or the token that begins them where a
        pretrained model that was imported has one. For a model of transformers it is what
        its tokenizer puts before every text; failing that, its token that begins texts; failing
        that, its token that ends them.
        """
        if self.prefix:
            return self.prefix
        first = self.tokenizer.end_of_document if self.bos is None else self.bos
        return [] if first is None else [first]

    def check_context(self, tokens: int, what: str) -> None:
        """Raises ValueError if `what`, a text of `tokens` tokens, is more than the model reads."""
        if self.max_context is not None and tokens > self.max_context:
            raise ValueError(
                f"{what} has {tokens:,} tokens, but {self.name} reads at most "
                f"{self.max_context:,}: take a shorter one"
            )

    @torch.no_grad()
    def logits(
        self, rows: Sequence[Sequence[int]], cache: TrellisCache | None = None
    ) -> list[Tensor]:
        """Logits [T, V] of every row; rows of different lengths share a batch.

        cache: what our models have read before the rows; it is updated.
        """
        ids, mask = self._batch(rows)
        past = {"use_cache": False} if cache is None else {"past_key_values": cache}
        out = self.network(ids, attention_mask=mask, logits_to_keep=0, **past).logits
        return [logits[: len(row)] for logits, row in zip(out, rows)]

    @torch.no_grad()
    def read(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, TrellisCache]:
        """Logits [N, V] after the last token of each row, and the states (our models only).

        Rows are read in segments, so that a row of any length takes the memory of one segment.
        """
        ids, mask = self._batch(rows)
        cache = self.network.init_cache(len(rows))
        last = mask.sum(1) - 1
        found = [torch.empty(0)] * len(rows)
        size = max(1, SEGMENT_TOKENS // len(rows))
        for begin in range(0, ids.shape[1], size):
            part = slice(begin, begin + size)
            # A row that has ended is all padding, which changes no state.
            out = self.network.model(
                ids[:, part], attention_mask=mask[:, part], past_key_values=cache
            )
            for n, place in enumerate((last - begin).tolist()):
                if 0 <= place < size:
                    found[n] = out.last_hidden_state[n, place].clone()
        return self.network.lm_head(torch.stack(found)), cache

    def _batch(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Rows with padding on the right, which a causal model never sees, and their mask."""
        ids = [torch.tensor(row, dtype=torch.long, device=self.device) for row in rows]
        mask = [torch.ones_like(row) for row in ids]
        return pad_sequence(ids, batch_first=True), pad_sequence(mask, batch_first=True)


class Unreachable(OSError):
    """A model is not on this machine, and the hub does not answer."""


def open_models(
    models: Sequence[str],
    device: str = "cpu",
    context: int = 0,
    left_out: list[str] | None = None,
) -> Iterator[EvaluatedModel]:
    """Opens one model after the other, so that one at a time is in memory.

    The files of all models are checked before the first is loaded. Raises ValueError, too, if a
    model cannot read `context` tokens.

    left_out: takes a line about each model that the hub would have to send while it does not
        answer, and the others are opened; without the list, or another model, that is an error.
    """
    found = dict(zip(models, names_of(models)))
    unreachable = []
    for model in models:
        try:
            limit = look_up(model)
        except Unreachable as error:
            unreachable.append(str(error))
            del found[model]
            if left_out is None or not found:
                raise
            continue
        if limit is not None and context > limit:
            raise ValueError(
                f"{model} reads at most {limit:,} tokens, but {context:,} are asked for"
            )
    if left_out is not None:
        left_out += unreachable
    for model, name in found.items():
        yield open_model(model, device, name=name)


def open_model(
    model: str, device: str = "cpu", *, name: str | None = None, step: int | None = None
) -> EvaluatedModel:
    """Loads one model. step: the checkpoint of a run; None takes the newest.

    Raises:
        FileNotFoundError: there is nothing of that name.
        ValueError: a file of the model cannot be read.
    """
    look_up(model)
    path = Path(model)
    about: dict[str, Any] = {"path": model}
    bos = None
    with _naming(model):
        kind = _kind_of(path)
        if kind == "transformers":
            from transformers import AutoModelForCausalLM

            tokenizer, bos = _tokenizer_of(model)
            here = path.exists() or not _hub_answers()
            loaded = AutoModelForCausalLM.from_pretrained(model, local_files_only=here)
            network = loaded.to(device)
        else:
            if kind == "run":
                about["recipe"] = recipe_of(path).as_dict()
            if step is not None:
                about["step"] = step
            network, tokenizer = load_run(path, step, device)
    return EvaluatedModel(name or name_of(model), network, tokenizer, about, bos)


def name_of(model: str) -> str:
    """The name of a model in tables: the last part of its path, or of its name on the hub."""
    path = Path(model)
    return path.resolve().name if path.exists() else path.name


def names_of(models: Sequence[str]) -> list[str]:
    """The names of models in one table; their paths where two have the same name."""
    names = [name_of(model) for model in models]
    return [model if names.count(name) > 1 else name for model, name in zip(models, names)]


def look_up(model: str) -> int | None:
    """Checks a model without loading its weights. Returns the most tokens that it reads, or None
    for any number.

    Raises:
        FileNotFoundError: there is nothing of that name.
        ValueError: a file of the model cannot be read.
    """
    path = Path(model)
    check_exists(model)
    with _naming(model):
        kind = _kind_of(path)
        if kind == "run":
            recipe_of(path)
            if not (path / "config.json").is_file():
                open_checkpoint(path, verify=False)
        elif path.exists():
            files = list(path.glob("*.safetensors"))
            for file in files:
                with safe_open(file, framework="pt"):  # raises at a truncated file
                    pass
            if not files and not any(path.glob("*.bin")):
                raise FileNotFoundError(f"{path} has no weights: no model.safetensors")
        if kind != "transformers":
            load_tokenizer(path / TOKENIZER)
            return None
        from transformers import AutoConfig

        here = path.exists() or not _hub_answers()
        try:
            config = AutoConfig.from_pretrained(model, local_files_only=here)
        except OSError as error:
            if here and not path.exists():
                raise Unreachable(
                    f"{model} was not measured: it is not on this machine, and the hub does not "
                    "answer"
                ) from error
            raise FileNotFoundError(f"there is no model {model}: {error}") from error
        tokenizer, _ = _tokenizer_of(model)
        known = getattr(config, "vocab_size", None) or tokenizer.vocab_size
        if known < tokenizer.vocab_size:
            raise ValueError(
                f"its tokenizer has {tokenizer.vocab_size:,} tokens, but the model {known:,}: "
                "it is not the one that the model was trained with"
            )
        return _limit_of(config)


def check_exists(model: str) -> None:
    """Raises FileNotFoundError at a path that holds no model; names on the hub are let through."""
    path = Path(model)
    if path.exists():
        if not (path / RECIPE).is_file() and not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"{model} is neither a run nor a model: it has no {RECIPE} and no config.json"
            )
    elif model.count("/") > 1 or model.startswith((".", "/")):
        raise FileNotFoundError(f"there is no run and no model at {model}")


@contextlib.contextmanager
def _naming(model: str) -> Iterator[None]:
    """Turns errors of libraries that read a model's files into errors that name the model."""
    try:
        yield
    except (FileNotFoundError, Unreachable):
        raise
    except _UNREADABLE as error:
        raise ValueError(f"the model {model} cannot be loaded: {error}") from error


@functools.cache
def _hub_answers() -> bool:
    """Whether the Hugging Face hub can be reached: asked once, since libraries ask many times."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # of whichever library the hub's package is made with
        return False
    return True


def _kind_of(path: Path) -> str:
    """A "run", an "exported" folder of ours, or a model of "transformers", here or on the hub."""
    if (path / RECIPE).is_file():
        return "run"
    if not path.exists():
        return "transformers"
    config = parse_json((path / "config.json").read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{path / 'config.json'} must hold an object; got {config!r:.40}")
    return "exported" if config.get("model_type") == "trellis" else "transformers"


def _tokenizer_of(name: str) -> tuple[TextTokenizer, int | None]:
    """The tokenizer of a model of transformers, and the token that begins texts."""
    from transformers import AutoTokenizer

    path = Path(name)
    # Where there is no file, transformers makes an empty tokenizer without saying so.
    if path.exists() and not any((path / file).is_file() for file in _TOKENIZERS):
        raise FileNotFoundError(f"{path} has no tokenizer: no tokenizer.json")
    try:
        here = path.exists() or not _hub_answers()
        loaded = AutoTokenizer.from_pretrained(name, local_files_only=here)
    except OSError as error:
        raise FileNotFoundError(f"there is no tokenizer of {name}: {error}") from error
    if not getattr(loaded, "backend_tokenizer", None):
        raise ValueError("its tokenizer has no fast form (tokenizer.json)")
    tokenizer = TextTokenizer(loaded.backend_tokenizer.to_str(), name)
    if loaded.eos_token_id is not None:
        tokenizer.end_of_document = loaded.eos_token_id
    return tokenizer, loaded.bos_token_id


def _limit_of(config: Any) -> int | None:
    """The most tokens that a model of transformers reads; None where there is no limit."""
    found = [getattr(config, name, None) for name in _LIMITS]
    return next((limit for limit in found if isinstance(limit, int) and limit > 0), None)


def _around(tokenizer: TextTokenizer) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before and after every text, found with the text "a"."""
    text = tokenizer.inner.encode("a", add_special_tokens=False).ids
    whole = tokenizer.inner.encode("a").ids
    for place in range(len(whole) - len(text) + 1):
        if text and whole[place : place + len(text)] == text:
            return whole[:place], whole[place + len(text) :]
    return [], []


def _hash_config(config: Any) -> str:
    """A hash of the fields that change what a model computes, without names and versions."""
    fields = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    kept = {name: value for name, value in fields.items() if name not in _NOISE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
