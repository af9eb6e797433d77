"""Latent Dirichlet allocation by collapsed Gibbs sampling; a block is a document with the topics of its tokens.

Source: T. L. Griffiths, M. Steyvers, "Finding scientific topics", PNAS 101, 2004.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.errors import ConfigError
from holdfast_lab.workloads.data import Documents, load_dataset
from holdfast_lab.workloads.iterative.base import State

_Array = npt.NDArray[Any]

_MOST_TOPICS = 1 << 15  # an assignment is an int16
_START, _SWEEP, _RESAMPLE = range(3)  # kinds of draws; each has its own random numbers
_OTHER = 3  # added to them after `reseeded`


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents as sequences of tokens."""

    offsets: _Array
    """int64 (documents + 1): where a document begins in ``words``."""
    words: _Array
    """int32: the word of each token; equal words of a document are adjacent."""
    vocabulary: int
    """Number of words."""


@cache
def load_corpus(dataset: str, data: Path | None, documents: int, vocabulary: int, longest: int) -> Corpus:
    """Return the first ``documents`` training documents of a dataset that have 1 to ``longest`` tokens.

    Args:
        dataset: ``"reuters"``, ``"newsgroups"``, or ``"documents"``, which are generated.
        data: See :func:`~holdfast_lab.workloads.data.load_dataset`.
        documents: Maximum number of documents, ``>= 1``.
        vocabulary: Number of words that are counted.
        longest: Tokens, ``>= 1``; longer documents are left out.

    Raises:
        ConfigError: if the dataset is not of documents, cannot be read, or has no such document.
    """
    if documents < 1 or longest < 1:
        raise ConfigError(f"documents and longest must be at least 1, got {documents} and {longest}")
    loaded = load_dataset(dataset, data, vocabulary=vocabulary)  # refuses a vocabulary for a dataset without words
    numbers, words = cast("Documents", loaded.train).tokens()
    lengths = numbers.bincount(minlength=len(loaded.train))
    kept = ((lengths >= 1) & (lengths <= longest)).nonzero().flatten()[:documents]
    if not len(kept):
        raise ConfigError(f"no document of {dataset} has from 1 to {longest} tokens; increase longest")
    offsets = np.concatenate([[0], lengths[kept].cumsum(0).numpy()])
    return Corpus(offsets, words[torch.isin(numbers, kept)].to(torch.int32).numpy(), loaded.shape[0])


class Lda:
    """Topics of documents; an iteration redraws the topic of each token given the topics of all other tokens.

    The state is the topic of every token. The topic counts of each document, of each word and of all tokens are derived
    from it and stored beside it.

    Args:
        name: The name of the program.
        seed: Seed of the initial topics and of all draws, ``>= 0``.
        corpus: The documents.
        topics: Number of topics, 2 to 32,768.
        alpha: Parameter of the Dirichlet distribution over the topics of a document, ``> 0``; the same for each topic.
        beta: Parameter of the distribution over the words of a topic, ``> 0``.

    Raises:
        ConfigError: if a number is out of range, or numba is not installed.
    """

    live = None

    def __init__(self, name: str, seed: int, corpus: Corpus, *, topics: int, alpha: float, beta: float) -> None:
        if not (2 <= topics <= _MOST_TOPICS and alpha > 0 and beta > 0):
            raise ConfigError(
                f"topics must be from 2 to {_MOST_TOPICS}, alpha and beta above 0, got {topics}, {alpha:g} and {beta:g}"
            )
        _compiled(_sweep)  # fails here if numba is missing
        self.name, self.seed = name, seed
        self.corpus, self.topics = corpus, topics
        self._alpha, self._beta = alpha, beta
        self._other_from: int | None = None
        lengths = np.diff(self.corpus.offsets)
        self.blocks = len(lengths)
        self.block_bytes = torch.from_numpy(lengths * np.dtype(np.int16).itemsize)
        self._filled = torch.arange(int(lengths.max())) < torch.from_numpy(lengths)[:, None]

    def reseeded(self, iteration: int) -> Lda:
        """Return the same program with different draws from ``iteration`` on, which shows the effect of noise alone."""
        other = copy.copy(self)
        other._other_from = iteration
        return other

    def start(self) -> State:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`; initial topics are uniform."""
        drawn = self.draws(_START, 0) * self.topics
        assignments = torch.full(self._filled.shape, -1, dtype=torch.int16)
        assignments[self._filled] = torch.from_numpy(drawn).to(torch.int16)
        state = {
            "assignments": assignments,
            "document_topics": torch.empty(self.blocks, self.topics, dtype=torch.int32),
            "word_topics": torch.empty(self.corpus.vocabulary, self.topics, dtype=torch.int32),
            "topics": torch.empty(self.topics, dtype=torch.int32),
        }
        self._count(state)
        return state

    def iterate(self, state: State, iteration: int) -> None:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`; an iteration is one sweep over all tokens."""
        self._sweep(state, torch.arange(self.blocks), self.draws(_SWEEP, iteration))

    def resample(self, state: State, lost: Tensor, iteration: int) -> None:
        """Sweep once over the tokens of the documents ``lost``, with separate draws.

        Args:
            state: State of the program, mended.
            lost: Numbers of blocks; int64.
            iteration: The draws depend on it, but differ from those of :meth:`iterate`.
        """
        self._sweep(state, lost, self.draws(_RESAMPLE, iteration))

    def rows(self, state: State) -> tuple[Tensor, ...]:
        """Return the topic of each token, int16 of shape (documents, tokens of the longest); padded with -1."""
        return (state["assignments"],)

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the total variation between the topic counts of each document, in tokens and not in shares.

        It is half the sum of the absolute differences: the least number of tokens whose topic differs. So a document
        weighs in proportion to its influence on the word counts, which all documents read.
        """
        return torch.from_numpy(_compiled(_moved)(a.numpy(), b.numpy(), self.topics))

    def mend(self, state: State, written: Tensor) -> None:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`.

        All tokens are recounted, which is cheap compared with a sweep.

        Counting only ``written`` would need the previous topics.
        """
        self._count(state)

    def loss(self, state: State) -> float:
        """Return minus the log-likelihood per token, in nats, given the current topics: the log of the perplexity."""
        return -float(self.log_likelihoods(state).sum()) / len(self.corpus.words)

    def log_likelihoods(self, state: State, assignments: Tensor | None = None) -> Tensor:
        """Return the log-likelihood of each document, in nats: sum over tokens of log sum_k p(k | document) p(word | k).

        Args:
            state: State of the program.
            assignments: Topics of the tokens that give the p(k | document), as returned by :meth:`rows`;
                None: those of the state. The p(word | k) are always the state's. With saved topics, the difference is
                the loss of the document if it were restored now.

        Returns:
            float64 of shape (documents,).
        """
        found = _compiled(_log_likelihoods)(
            (state["assignments"] if assignments is None else assignments).numpy(),
            self.corpus.offsets,
            self.corpus.words,
            state["word_topics"].numpy(),
            state["topics"].numpy(),
            self._alpha,
            self._beta,
        )
        return torch.from_numpy(found)

    def shares(self, state: State) -> tuple[Tensor, Tensor]:
        """Return p(k | document) of shape (documents, topics) and p(word | k) of shape (topics, words); float64."""
        of_documents = state["document_topics"].double() + self._alpha
        of_topics = state["word_topics"].T.double() + self._beta
        return of_documents / of_documents.sum(1, keepdim=True), of_topics / of_topics.sum(1, keepdim=True)

    def draws(self, kind: int, iteration: int) -> _Array:
        """Return a number in [0, 1) for each token: a function of (seed, kind, iteration, token)."""
        other = self._other_from is not None and iteration >= self._other_from
        rng = np.random.default_rng((self.seed, kind + (_OTHER if other else 0), iteration))
        return rng.random(len(self.corpus.words))

    def _sweep(self, state: State, documents: Tensor, draws: _Array) -> None:
        arrays = (self.corpus.offsets, self.corpus.words, draws, *_arrays(state))
        _compiled(_sweep)(documents.numpy(), *arrays, self._alpha, self._beta)

    def _count(self, state: State) -> None:
        _compiled(_count)(self.corpus.offsets, self.corpus.words, *_arrays(state))


def make(
    name: str,
    data: Path | None,
    seed: int,
    *,
    documents: int = 1000,
    topics: int | None = None,
    vocabulary: int = 2000,
    longest: int = 200,
    alpha: float = 0.1,
    beta: float = 0.01,
) -> Lda:
    """Return an :class:`Lda` on the dataset that ``name`` ends with.

    ``topics`` None is 20, or 8 for generated documents.
    """
    dataset = name.removeprefix("lda-")
    corpus = load_corpus(dataset, data, documents, vocabulary, longest)
    some = (8 if dataset == "documents" else 20) if topics is None else topics
    return Lda(name, seed, corpus, topics=some, alpha=alpha, beta=beta)


def _arrays(state: State) -> tuple[_Array, ...]:
    return tuple(state[name].numpy() for name in ("assignments", "document_topics", "word_topics", "topics"))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, compiled on its first call for its argument types."""
    try:
        import numba
    except ImportError:
        raise ConfigError(
            "latent Dirichlet allocation needs numba, which is not installed: pip install 'holdfast[lab]'"
        ) from None
    return cast("Callable[..., Any]", numba.njit(cache=True)(function))


def _sweep(
    documents: _Array,
    offsets: _Array,
    words: _Array,
    draws: _Array,
    assignments: _Array,
    by_document: _Array,
    by_word: _Array,
    totals: _Array,
    alpha: float,
    beta: float,
) -> None:
    topics = len(totals)
    spread = beta * len(by_word)
    inverse = 1.0 / (totals + spread)
    weights = np.empty(topics)
    for document in documents:
        for token in range(offsets[document], offsets[document + 1]):
            place, word = token - offsets[document], words[token]
            old = assignments[document, place]
            by_document[document, old] -= 1
            by_word[word, old] -= 1
            totals[old] -= 1
            inverse[old] = 1.0 / (totals[old] + spread)
            for topic in range(topics):
                weights[topic] = (by_document[document, topic] + alpha) * (by_word[word, topic] + beta) * inverse[topic]
            for topic in range(1, topics):
                weights[topic] += weights[topic - 1]
            aim = (
                draws[token] * weights[-1]
            )  # less than weights[-1], because the draw is less than 1, so the search ends
            new = 0
            while weights[new] <= aim:
                new += 1
            assignments[document, place] = new
            by_document[document, new] += 1
            by_word[word, new] += 1
            totals[new] += 1
            inverse[new] = 1.0 / (totals[new] + spread)


def _count(
    offsets: _Array, words: _Array, assignments: _Array, by_document: _Array, by_word: _Array, totals: _Array
) -> None:
    by_document[:] = 0
    by_word[:] = 0
    totals[:] = 0
    for document in range(len(by_document)):
        for token in range(offsets[document], offsets[document + 1]):
            topic = assignments[document, token - offsets[document]]
            by_document[document, topic] += 1
            by_word[words[token], topic] += 1
            totals[topic] += 1


def _moved(a: _Array, b: _Array, topics: int) -> _Array:
    moved = np.empty(len(a), np.float32)
    more = np.empty(topics, np.int64)
    for document in range(len(a)):
        more[:] = 0
        for place in range(a.shape[1]):
            if a[document, place] < 0:
                break
            more[a[document, place]] += 1
            more[b[document, place]] -= 1
        moved[document] = np.abs(more).sum() / 2
    return moved


def _log_likelihoods(
    assignments: _Array, offsets: _Array, words: _Array, by_word: _Array, totals: _Array, alpha: float, beta: float
) -> _Array:
    topics = len(totals)
    inverse = 1.0 / (totals + beta * len(by_word))
    found = np.zeros(len(assignments))
    weights = np.empty(topics)
    for document in range(len(assignments)):
        begin, end = offsets[document], offsets[document + 1]
        weights[:] = alpha
        for place in range(end - begin):
            weights[assignments[document, place]] += 1
        weights *= inverse / (end - begin + topics * alpha)
        for token in range(begin, end):
            likelihood = 0.0
            for topic in range(topics):
                likelihood += weights[topic] * (by_word[words[token], topic] + beta)
            found[document] += np.log(likelihood)
    return found
