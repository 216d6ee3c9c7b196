"""The files of a model, looked at before it is loaded: errors that name the model and the file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..data.tokenizer import TextTokenizer, load_tokenizer
from ..training.checkpoint import open_checkpoint
from ..training.run import RECIPE, TOKENIZER, recipe_of

#: Names that configurations give to the longest input of an attention model.
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
#: What libraries raise at files that they cannot read.
_UNREADABLE = (
    OSError, ValueError, AttributeError, TypeError, KeyError, RuntimeError, SafetensorError,
)  # fmt: skip


def name_of(model: str) -> str:
    """What tables call a model: the last part of its path, or of its name on the hub."""
    path = Path(model)
    return path.resolve().name if path.exists() else path.name


def look_up(model: str) -> int | None:
    """The most tokens that a model reads, as far as can be told without loading it.

    Of a folder all files are looked at; of a model of the hub, its configuration.

    Raises:
        FileNotFoundError: there is nothing of that name.
        ValueError: what is there cannot be loaded.
    """
    check_exists(model)
    path = Path(model)
    with named(model):
        if not path.exists():
            return limit_of(_configuration(model))
        if (path / RECIPE).is_file():
            recipe_of(path)
            load_tokenizer(path / TOKENIZER)
            if not (path / "config.json").is_file():
                open_checkpoint(path, verify=False)
            return None
        kind = kind_of(path)
        check_weights(path)
        if kind == "trellis":
            load_tokenizer(path / TOKENIZER)
            return None
        config = _configuration(model)
        tokenizer, _ = tokenizer_of(model)
        check_sizes(tokenizer, getattr(config, "vocab_size", None) or tokenizer.vocab_size)
    return limit_of(config)


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


@contextlib.contextmanager
def named(model: str) -> Iterator[None]:
    """Errors of libraries that read a model's files as ones that name the model."""
    try:
        yield
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        raise ValueError(f"the model {model} cannot be loaded: {error}") from error


def kind_of(path: Path) -> str | None:
    """`model_type` of a folder's configuration; raises ValueError where that cannot be read."""
    config = json.loads((path / "config.json").read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{path / 'config.json'} must hold an object; got {config!r:.40}")
    return config.get("model_type")


def check_weights(path: Path) -> None:
    """Raises at a folder without weights, or with a file that was cut: its head shows that."""
    files = sorted(path.glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="pt"):
            pass
    if not files and not any(path.glob("*.bin")):
        raise FileNotFoundError(f"{path} has no weights: no model.safetensors")


def _check_tokenizer(path: Path) -> None:
    """Of nothing at all transformers makes an empty tokenizer, without a word."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    if not any((path / name).is_file() for name in names):
        raise FileNotFoundError(f"{path} has no tokenizer: no tokenizer.json")


def _configuration(model: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except OSError as error:
        raise FileNotFoundError(f"there is no model {model}: {error}") from error


def tokenizer_of(name: str) -> tuple[TextTokenizer, int | None]:
    """The tokenizer of a model of transformers, and the token that begins texts."""
    from transformers import AutoTokenizer

    if Path(name).exists():
        _check_tokenizer(Path(name))
    try:
        loaded = AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise FileNotFoundError(f"there is no tokenizer of {name}: {error}") from error
    if not getattr(loaded, "backend_tokenizer", None):
        raise ValueError("its tokenizer has no fast form (tokenizer.json)")
    tokenizer = TextTokenizer(loaded.backend_tokenizer.to_str(), name)
    if loaded.eos_token_id is not None:
        tokenizer.end_of_document = loaded.eos_token_id
    return tokenizer, loaded.bos_token_id


def check_sizes(tokenizer: TextTokenizer, known: int) -> None:
    """Raises ValueError where a tokenizer has ids that a model of `known` tokens does not."""
    if known < tokenizer.vocab_size:
        raise ValueError(
            f"its tokenizer has {tokenizer.vocab_size:,} tokens, but the model {known:,}: "
            "it is not the one that the model was trained with"
        )


def limit_of(config: Any) -> int | None:
    """The most tokens that a model of transformers reads, None where that is not limited."""
    found = [getattr(config, name, None) for name in _LIMITS]
    return next((limit for limit in found if isinstance(limit, int) and limit > 0), None)
