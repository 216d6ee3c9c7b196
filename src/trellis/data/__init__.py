"""From text to token shards: sources, tokenizers, and the corpus that training reads."""

from .prepare import Progress, prepare_corpus
from .shards import Corpus, TokenStream, open_corpus
from .tokenizer import StreamDecoder, TextTokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "Corpus",
    "Progress",
    "StreamDecoder",
    "TextTokenizer",
    "TokenStream",
    "load_tokenizer",
    "open_corpus",
    "prepare_corpus",
    "train_tokenizer",
]
