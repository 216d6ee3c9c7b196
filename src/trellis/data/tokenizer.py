"""Text to token ids and back: bytes, a `tokenizer.json`, or a tokenizer of the Hugging Face hub."""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..files import write_whole
from .pieces import cut, safe_place

try:
    import tokenizers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "trellis.data needs tokenizers: pip install 'trellis-memory[models]'", name=error.name
    ) from error

END_OF_DOCUMENT = "<|endoftext|>"
_END_OF_DOCUMENT_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
FILE_NAME = "tokenizer.json"

_PIECE_CHARACTERS = 1 << 15
#: Text in one call of the library. It needs some 50 times as much memory, so it is bounded.
_CALL_CHARACTERS = (1 << 19) * min(os.cpu_count() or 1, 32)


def token_dtype(vocab_size: int) -> np.dtype:
    """The type that holds every id of a vocabulary: little-endian uint16 or uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class TextTokenizer:
    """A `tokenizers.Tokenizer`, with the end of a document and fast encoding of long texts.

    Special tokens are neither added nor recognised: a text that spells out `<|endoftext|>` is text.
    """

    def __init__(self, source: str, name: str) -> None:
        """`source` is the content of a tokenizer.json.

        Raises ValueError if it is not one.
        """
        try:
            self.json: dict[str, Any] = json.loads(source)
            inner = tokenizers.Tokenizer.from_str(source)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(
                f"tokenizer {name!r} is not a valid tokenizer.json: {error}"
            ) from error
        # Text goes in whole and alone, whatever the file was saved with.
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        self.name = name
        self.inner = inner
        self.sha256 = hashlib.sha256(canonical(self.json)).hexdigest()
        vocabulary = inner.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"tokenizer {name!r} has an empty vocabulary")
        self.vocab_size = max(vocabulary.values()) + 1
        self.dtype = token_dtype(self.vocab_size)
        ids = [inner.token_to_id(token) for token in _END_OF_DOCUMENT_NAMES]
        self.end_of_document: int | None = next((i for i in ids if i is not None), None)
        self._bytes = self.sha256 == bytes_sha256()

    def __reduce__(self) -> tuple[Any, ...]:
        return TextTokenizer, (json.dumps(self.json), self.name)

    def __repr__(self) -> str:
        return f"TextTokenizer({self.name!r}, vocab_size={self.vocab_size})"

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, as `dtype` [T]."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, as `dtype` [T]; long texts use all cores."""
        if self._bytes:
            return [np.frombuffer(t.encode(), np.uint8).astype(self.dtype) for t in texts]
        place = self._place
        if place is None:
            return self._encode_whole(texts)
        pieces: list[str] = []
        counts = []
        for text in texts:
            before = len(pieces)
            pieces.extend(cut(text, place, _PIECE_CHARACTERS))
            counts.append(len(pieces) - before)
        encoded = iter(self._encode_whole(pieces))
        parts = ([next(encoded) for _ in range(count)] for count in counts)
        return [p[0] if len(p) == 1 else np.concatenate(p) for p in parts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def stream_decoder(self) -> StreamDecoder:
        """A decoder for ids that arrive one by one."""
        return StreamDecoder(self)

    def save(self, folder: str | Path) -> Path:
        """Writes `tokenizer.json` into a folder, which is made if need be."""
        path = Path(folder) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(self.json, ensure_ascii=False).encode())
        return path

    @functools.cached_property
    def token_bytes(self) -> list[bytes] | None:
        """The bytes of each id (special tokens: none), for byte-level tokenizers; else None."""
        if (self.json.get("decoder") or {}).get("type") != "ByteLevel":
            return None
        value = {character: byte for byte, character in enumerate(_byte_alphabet())}
        table = [b""] * self.vocab_size
        for token, i in self.inner.get_vocab(with_added_tokens=False).items():
            # A character that stands for no byte is itself, as in the library's decoder.
            table[i] = b"".join(bytes([value[c]]) if c in value else c.encode() for c in token)
        for i, added in self.inner.get_added_tokens_decoder().items():
            table[i] = b"" if added.special else added.content.encode()
        return table

    @functools.cached_property
    def _place(self) -> Any:
        vocabulary = self.token_bytes
        if vocabulary is None:
            tokens = self.inner.get_vocab(with_added_tokens=False)
            vocabulary = [t.replace("\u2581", " ").encode(errors="replace") for t in tokens]
        return safe_place(self._encode_whole, vocabulary)

    def _encode_whole(self, texts: Sequence[str]) -> list[np.ndarray]:
        out: list[np.ndarray] = []
        group: list[str] = []
        size = 0
        for i, text in enumerate(texts):
            group.append(text)
            size += len(text)
            if size >= _CALL_CHARACTERS or i == len(texts) - 1:
                encoded = self.inner.encode_batch_fast(group, add_special_tokens=False)
                out += [np.array(e.ids, dtype=self.dtype) for e in encoded]
                group, size = [], 0
        return out


class StreamDecoder:
    """Fed with ids, returns text as soon as it is complete: a character may span several tokens."""

    #: Ids that are held back for one character; what has not become one by then never will.
    _HELD = 8

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []  # ids whose text was returned, for what depends on neighbours
        self._pending: list[int] = []

    def feed(self, ids: int | Iterable[int]) -> str:
        """The text that these ids complete; may be empty."""
        new = [ids] if isinstance(ids, (int, np.integer)) else ids
        if self._table is not None:
            table = self._table
            return self._utf8.decode(b"".join([table[i] for i in new]))
        return "".join(self._step(int(i)) for i in new)

    def finish(self) -> str:
        """What is left, with U+FFFD for an incomplete character."""
        if self._table is not None:
            return self._utf8.decode(b"", final=True)
        text = self._pending_text()
        self._context, self._pending = [], []
        return text

    def _step(self, i: int) -> str:
        self._pending.append(i)
        text = self._pending_text()
        if text.endswith("\ufffd") and len(self._pending) < self._HELD:
            return ""
        if text:
            self._context, self._pending = self._pending, []
        return text

    def _pending_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(before) :]


def load_tokenizer(name: str | Path) -> TextTokenizer:
    """`bytes`, the path of a tokenizer.json or of a folder that has one, or a name on the hub.

    Raises FileNotFoundError if a path has no tokenizer, and ValueError if what is found is not a
    tokenizer or the hub does not give one.
    """
    name = str(name)
    if name == "bytes":
        return TextTokenizer(json.dumps(_bytes_json()), name)
    path = Path(name)
    if path.is_dir():
        path = path / FILE_NAME
        if not path.is_file():
            raise FileNotFoundError(f"tokenizer {name!r}: the folder has no {FILE_NAME}")
    if path.is_file():
        try:
            return TextTokenizer(path.read_text(encoding="utf-8"), name)
        except UnicodeDecodeError as error:
            raise ValueError(f"tokenizer {name!r} is not a tokenizer.json: {error}") from error
    if path.is_absolute() or name.startswith(".") or name.endswith(".json") or name.count("/") > 1:
        raise FileNotFoundError(
            f"tokenizer {name!r} does not exist: give bytes, a tokenizer.json, a folder with one, "
            "or a name on the Hugging Face hub"
        )
    try:
        inner = tokenizers.Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f"tokenizer {name!r} is neither bytes nor a file here, and the Hugging Face hub did "
            f"not give it: {error}"
        ) from error
    return TextTokenizer(inner.to_str(), name)


def canonical(content: Any) -> bytes:
    """JSON whose bytes depend on the content alone, for hashes."""
    return json.dumps(
        content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


@functools.cache
def bytes_sha256() -> str:
    return hashlib.sha256(canonical(_bytes_json())).hexdigest()


def _bytes_json() -> dict[str, Any]:
    """Byte values as ids, as a tokenizer.json: BPE without merges. Written out, not saved by the
    library, so that its hash stays the same in every version of it."""
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    end = {"id": 256, "content": END_OF_DOCUMENT, "single_word": False, "lstrip": False,
           "rstrip": False, "normalized": False, "special": True}  # fmt: skip
    vocabulary = {character: byte for byte, character in enumerate(_byte_alphabet())}
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False, "vocab": vocabulary, "merges": [],
    }  # fmt: skip
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end],
            "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
            "model": model}  # fmt: skip


@functools.cache
def _byte_alphabet() -> list[str]:
    """GPT-2's printable character of each byte: itself if it is printable, else one from U+0100."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(256 + n) for n in range(256))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]
