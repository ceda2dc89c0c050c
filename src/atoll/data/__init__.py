"""Text in, samples out: sources, tokenizer, packed documents, and a loader ordered by one global sample index."""

from atoll.data.corpus import Corpus
from atoll.data.documents import TokenSet
from atoll.data.loader import Batch, Sampler, make_batch
from atoll.data.opening import open_corpus
from atoll.data.tokenizer import Tokenizer

__all__ = ["Batch", "Corpus", "Sampler", "TokenSet", "Tokenizer", "make_batch", "open_corpus"]
