"""A corpus on disk: memory-mapped token shards, document ends, a manifest.

A corpus is a folder:

    manifest.json               what the corpus is made of; counts and hashes of the files below
    tokenizer.json
    train-00000.bin, ...        token ids, little-endian uint16 (vocabulary <= 65536) or uint32
    train-documents.bin         where each document ends in the split's token stream, uint64
    validation-00000.bin, ...   the same for the validation split
    validation-documents.bin
    skipped.jsonl               every input that was skipped, with the reason

A split is one stream of tokens; documents and reads cross the borders of shards. In a corpus of
format version 2 no document was held out: the validation split is the end of the training stream,
from the token `held_out.start` of the manifest on, and has no shards of its own.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import parse_json, sha256_of, write_json

if TYPE_CHECKING:
    from .tokenizer import TextTokenizer

FORMAT = "trellis-corpus"
#: Documents were held out; the validation split is a range of the training stream.
DOCUMENTS_HELD_OUT, RANGE_HELD_OUT = 1, 2
SPLITS = ("train", "validation")
MANIFEST_FILE = "manifest.json"
#: The record of an unfinished run, in its folder.
PROGRESS_FILE = "progress.json"
END_DTYPE = np.dtype("<u8")
_AGAIN = "prepare the corpus again (`trellis data prepare`)"


class FileName:
    """In a layout: the name of a file in the corpus's own folder, without a path."""


#: The layouts that `check_layout` compares JSON values with.
SPLIT_LAYOUT = {
    "tokens": int,
    "documents": int,
    "bytes": int,
    "shards": [{"file": FileName, "tokens": int, "sha256": str}],
}
_MANIFEST_LAYOUT = {
    "library_version": str,
    "tokenizer": {"name": str, "sha256": str, "vocab_size": int},
    "dtype": str,
    "options": {},
    "sources": [{"source": str, "files": int, "bytes": int}],
    "splits": {split: {**SPLIT_LAYOUT, "documents_sha256": str} for split in SPLITS},
    "held_out": ({"why": str},),
    "skipped": {"count": int, "reasons": {}, "file": FileName, "size": int, "sha256": str},
    "ignored": {},
}
_RANGE_LAYOUT = {"held_out": {"start": int, "tokens": int, "bytes": int}}
_NAMES = {
    dict: "an object", list: "a list", str: "a string", int: "a count", bool: "true or false"
}  # fmt: skip


def check_layout(found: Any, layout: Any, name: str = "the file") -> None:
    """Raises ValueError that names the part of a JSON value that is missing or of another type.

    layout: a type; FileName; {key: layout}, where the value may have other keys too; [layout of
    every item]; or (layout,) if the value may be null. An int must not be negative.
    """
    if isinstance(layout, tuple):
        if found is None:
            return
        layout = layout[0]
    if layout is FileName:
        check_layout(found, str, name)
        # A path would let a manifest name files outside its folder.
        if found in ("", ".", "..") or set(found) & set("/\\:\0"):
            raise ValueError(f"{name} must be the name of a file without a path; got {found!r}")
        return
    kind: Any = layout if isinstance(layout, type) else type(layout)
    if type(found) is not kind or (kind is int and found < 0):
        raise ValueError(f"{name} must be {_NAMES[kind]}; got {found!r}")
    if kind is dict:
        for key, inner in layout.items():
            if key not in found:
                raise ValueError(f"{name} has no {key!r}")
            check_layout(found[key], inner, repr(key))
    elif kind is list:
        for item in found:
            check_layout(item, layout[0], f"an item of {name}")


def ends_name(split: str) -> str:
    return f"{split}-documents.bin"


def is_corpus(folder: str | Path) -> bool:
    """Whether a folder is a corpus, finished or not."""
    for name in (MANIFEST_FILE, PROGRESS_FILE):
        try:
            content = parse_json(Path(folder, name).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and content.get("format") == FORMAT:
            return True
    return False


class TokenStream:
    """The tokens of one split. Cheap to pickle and safe to fork: files are mapped on first use."""

    def __init__(self, folder: Path, split: str, entry: dict[str, Any], dtype: np.dtype) -> None:
        """entry: the split's entry in the manifest. Only the shards it lists are read."""
        self.split = split
        self.tokens: int = entry["tokens"]
        self.documents: int = entry["documents"]
        self.bytes: int = entry["bytes"]  # of the text in UTF-8
        self._dtype = dtype
        self._shard_files = [(folder / s["file"], s["tokens"]) for s in entry["shards"]]
        self._shard_starts = np.cumsum([0, *(tokens for _, tokens in self._shard_files)])
        self._ends_file = folder / ends_name(split), self.documents
        self._first, self._whole = 0, True  # where this stream begins; False after `cut`

    def cut(self, start: int, size: int) -> tuple[TokenStream, TokenStream]:
        """The tokens before `start` as a stream, and the rest, of `size` bytes, as "validation".

        `start` must lie inside the last document: both streams get a part of it.
        """
        before, rest = copy.copy(self), copy.copy(self)
        before._whole = rest._whole = False
        before.tokens, before.bytes = start, self.bytes - size
        rest.split, rest.documents, rest._first = "validation", 1, start
        rest.tokens, rest.bytes = self.tokens - start, size
        return before, rest

    def __len__(self) -> int:
        return self.tokens

    def __repr__(self) -> str:
        return f"TokenStream({self.split!r}, tokens={self.tokens}, documents={self.documents})"

    def __getstate__(self) -> dict[str, Any]:
        # Pickling a memmap would pickle the data itself.
        return {k: v for k, v in vars(self).items() if k not in ("ends", "_shards")}

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Where each document ends in the stream: uint64 [documents], never decreasing."""
        path, count = self._ends_file
        ends = _map(path, END_DTYPE, count)
        if self._whole:
            return ends
        stop = self._first + self.tokens
        inside = ends[(ends > self._first) & (ends < stop)]
        return np.append(inside, np.array(stop, END_DTYPE)) - END_DTYPE.type(self._first)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` as int64 [stop - start].

        Raises IndexError unless 0 <= start <= stop <= tokens.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(
                f"{self.split} tokens {start}:{stop} were asked for; start and stop must be in "
                f"order and within 0:{self.tokens}"
            )
        start, stop = start + self._first, stop + self._first
        first = int(np.searchsorted(self._shard_starts, start, side="right")) - 1
        after = int(np.searchsorted(self._shard_starts, stop, side="left"))
        parts = [np.empty(0, np.int64)]
        for index in range(first, after):
            offset = int(self._shard_starts[index])
            parts.append(self._shards[index][max(start - offset, 0) : stop - offset])
        return np.concatenate(parts)

    @functools.cached_property
    def _shards(self) -> list[np.ndarray]:
        return [_map(path, self._dtype, tokens) for path, tokens in self._shard_files]


class Corpus:
    """A prepared corpus, opened for reading by `open_corpus`."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.path = folder
        self.manifest = manifest
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self._stored = [
            TokenStream(folder, split, manifest["splits"][split], np.dtype(manifest["dtype"]))
            for split in SPLITS
        ]
        self.train, self.validation = self._stored
        if manifest["format_version"] == RANGE_HELD_OUT:
            held_out = manifest["held_out"]
            if not 0 < held_out["start"] == self.train.tokens - held_out["tokens"]:
                raise ValueError(
                    f"'held_out' must be a range that ends with the {self.train.tokens} training "
                    f"tokens; it begins at {held_out['start']} and has {held_out['tokens']}"
                )
            self.train, self.validation = self.train.cut(held_out["start"], held_out["bytes"])

    def __repr__(self) -> str:
        return f"Corpus({str(self.path)!r}, {self.train!r}, {self.validation!r})"

    @property
    def fingerprint(self) -> str:
        """The sha256 of the manifest's content, hence of every token and of the tokenizer."""
        text = json.dumps(self.manifest, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that the corpus was made with.

        Raises FileNotFoundError if its file is missing, ValueError if it is another tokenizer.
        """
        from .tokenizer import FILE_NAME, TextTokenizer

        path = self.path / FILE_NAME
        expected = self.manifest["tokenizer"]
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: put it back, or {_AGAIN}")
        try:
            tokenizer = TextTokenizer(path.read_text(encoding="utf-8"), expected["name"])
        except ValueError as error:
            raise ValueError(f"{path}: {error}; put it back, or {_AGAIN}") from error
        if tokenizer.sha256 != expected["sha256"]:
            raise ValueError(
                f"{path} is not the tokenizer that the tokens were made with: sha256 "
                f"{tokenizer.sha256}, expected {expected['sha256']}; put it back, or {_AGAIN}"
            )
        return tokenizer

    def files(self) -> list[tuple[Path, int, str]]:
        """Every data file: its path, the size in bytes that it must have, its sha256."""
        itemsize = np.dtype(self.manifest["dtype"]).itemsize
        skipped = self.manifest["skipped"]
        found = [(skipped["file"], skipped["size"], skipped["sha256"])]
        for split in SPLITS:
            entry = self.manifest["splits"][split]
            found += [(s["file"], s["tokens"] * itemsize, s["sha256"]) for s in entry["shards"]]
            size = entry["documents"] * END_DTYPE.itemsize
            found.append((ends_name(split), size, entry["documents_sha256"]))
        return [(self.path / name, size, sha256) for name, size, sha256 in found]

    def check(self) -> None:
        """Checks files, sizes, tokenizer and counts, without reading the tokens.

        Raises FileNotFoundError or ValueError, naming the file, what was found and expected.
        """
        tokenizer = self.tokenizer()
        found = self.vocab_size, self.manifest["dtype"]
        if found != (tokenizer.vocab_size, tokenizer.dtype.str):
            raise ValueError(
                f"{self.path / MANIFEST_FILE} has vocab_size {found[0]} and dtype {found[1]!r}, "
                f"expected {tokenizer.vocab_size} and {tokenizer.dtype.str!r} of its tokenizer: "
                f"{_AGAIN}"
            )
        for path, size, _ in self.files():
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} is missing ({size:,} bytes expected): put it back, or {_AGAIN}"
                )
            if path.stat().st_size != size:
                raise ValueError(
                    f"{path} has {path.stat().st_size:,} bytes, expected {size:,}: {_AGAIN}"
                )
        for stream in self._stored:
            last = int(stream.ends[-1]) if stream.documents else 0
            counted = int(stream._shard_starts[-1])
            if not last == stream.tokens == counted:
                raise ValueError(
                    f"{self.path / ends_name(stream.split)} ends at token {last:,} and the shards "
                    f"have {counted:,}, expected {stream.tokens:,}: {_AGAIN}"
                )
        if not self.train._whole and len(self.train.ends) != self.train.documents:
            raise ValueError(
                f"{self.path / MANIFEST_FILE} is damaged: 'held_out' must begin inside the last "
                f"training document; {_AGAIN}"
            )

    def verify(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Reads every file again and compares its hash with the manifest's.

        progress: called after each file with its name, the bytes read so far and those in all.
        Raises ValueError naming every file that differs; FileNotFoundError if one is missing.
        """
        self.check()
        files = self.files()
        done, total = 0, sum(size for _, size, _ in files)
        wrong = []
        for path, size, expected in files:
            if (found := sha256_of(path)) != expected:
                wrong.append(f"{path}: sha256 {found}, expected {expected}")
            done += size
            if progress is not None:
                progress(path.name, done, total)
        if wrong:
            raise ValueError("\n".join([*wrong, f"the content was changed: {_AGAIN}"]))


def open_corpus(path: str | Path) -> Corpus:
    """Opens a prepared corpus and checks that it is whole, without reading its tokens.

    Raises FileNotFoundError if there is no corpus or one of its files is missing, and ValueError if
    it is of another format or a file does not match the manifest.
    """
    folder = Path(path)
    file = folder / MANIFEST_FILE
    if not file.is_file():
        hint = "make a corpus with `trellis data prepare SOURCE --out DIR`"
        for unfinished in (folder, Path(f"{folder}.partial")):
            if (unfinished / PROGRESS_FILE).is_file():
                hint = f"{unfinished} is unfinished: run its `trellis data prepare` again to go on"
        raise FileNotFoundError(f"{folder} is not a corpus: there is no {file.name}; {hint}")
    try:
        manifest = parse_json(file.read_text(encoding="utf-8"))
        form, version = manifest["format"], manifest["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a manifest of a corpus ({error!r}): {_AGAIN}") from error
    if form != FORMAT or version not in (DOCUMENTS_HELD_OUT, RANGE_HELD_OUT):
        raise ValueError(
            f"{file} is of format {form!r}, version {version!r}; this library reads "
            f"{FORMAT!r}, version 1 or 2: use the version of trellis that wrote it "
            f"({manifest.get('library_version')}), or {_AGAIN}"
        )
    try:
        check_layout(manifest, _MANIFEST_LAYOUT)
        if version == RANGE_HELD_OUT:
            check_layout(manifest, _RANGE_LAYOUT)
        corpus = Corpus(folder, manifest)
    except (ValueError, TypeError) as error:  # TypeError: numpy has no such dtype
        raise ValueError(f"{file} is damaged: {error}; {_AGAIN}") from error
    corpus.check()
    return corpus


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Writes the manifest of a corpus. `content` has everything but the format."""
    version = RANGE_HELD_OUT if content["held_out"] else DOCUMENTS_HELD_OUT
    write_json(folder / MANIFEST_FILE, {"format": FORMAT, "format_version": version, **content})


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if count == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r", shape=(count,))
