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
_START, _SWEEP, _RESAMPLE = range(3)  # what is drawn: each has numbers of its own
_OTHER = 3  # added to them after `reseeded`


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents token by token."""

    offsets: _Array
    """int64 (documents + 1): where in ``words`` a document begins."""
    words: _Array
    """int32: the word of each token; equal ones of a document stand together."""
    vocabulary: int
    """How many words there are."""


@cache
def load_corpus(dataset: str, data: Path | None, documents: int, vocabulary: int, longest: int) -> Corpus:
    """Return the first ``documents`` training documents of a dataset that have 1 to ``longest`` tokens.

    Args:
        dataset: ``"reuters"``, ``"newsgroups"`` or ``"documents"``, which are made.
        data: See :func:`~holdfast_lab.workloads.data.load_dataset`.
        documents: At most; ``>= 1``.
        vocabulary: Words that are counted.
        longest: Tokens, ``>= 1``; longer documents are left out.

    Raises:
        ConfigError: if the dataset is not of documents, cannot be read, or has no such document.
    """
    if documents < 1 or longest < 1:
        raise ConfigError(f"documents and longest must be at least 1, got {documents} and {longest}")
    loaded = load_dataset(dataset, data, vocabulary=vocabulary)  # refuses a vocabulary for what has no words
    numbers, words = cast("Documents", loaded.train).tokens()
    lengths = numbers.bincount(minlength=len(loaded.train))
    kept = ((lengths >= 1) & (lengths <= longest)).nonzero().flatten()[:documents]
    if not len(kept):
        raise ConfigError(f"no document of {dataset} has from 1 to {longest} tokens: longest must be greater")
    offsets = np.concatenate([[0], lengths[kept].cumsum(0).numpy()])
    return Corpus(offsets, words[torch.isin(numbers, kept)].to(torch.int32).numpy(), loaded.shape[0])


class Lda:
    """Topics of documents; an iteration draws the topic of each token anew, given those of all the others.

    The state is the topic of every token. How many tokens of a document, of a word and of all are of a topic is kept
    beside it and follows from it.

    Args:
        name: What it is called.
        seed: Of the first topics and of all draws, ``>= 0``.
        corpus: The documents.
        topics: From 2 to 32,768.
        alpha: Of the Dirichlet distribution over the topics of a document, ``> 0``; the same for each topic.
        beta: Of that over the words of a topic, ``> 0``.

    Raises:
        ConfigError: if a number is out of its range, or numba is not installed.
    """

    live = None

    def __init__(self, name: str, seed: int, corpus: Corpus, *, topics: int, alpha: float, beta: float) -> None:
        if not (2 <= topics <= _MOST_TOPICS and alpha > 0 and beta > 0):
            raise ConfigError(
                f"topics must be from 2 to {_MOST_TOPICS}, alpha and beta above 0, got {topics}, {alpha:g} and {beta:g}"
            )
        _compiled(_sweep)  # without numba nothing goes: say so now
        self.name, self.seed = name, seed
        self.corpus, self.topics = corpus, topics
        self._alpha, self._beta = alpha, beta
        self._other_from: int | None = None
        lengths = np.diff(self.corpus.offsets)
        self.blocks = len(lengths)
        self.block_bytes = torch.from_numpy(lengths * np.dtype(np.int16).itemsize)
        self._filled = torch.arange(int(lengths.max())) < torch.from_numpy(lengths)[:, None]

    def reseeded(self, iteration: int) -> Lda:
        """Return the same program whose draws from ``iteration`` on are others: what noise alone does to a run."""
        other = copy.copy(self)
        other._other_from = iteration
        return other

    def start(self) -> State:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`; every topic is as likely for every token."""
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
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`; goes through all tokens once."""
        self._sweep(state, torch.arange(self.blocks), self.draws(_SWEEP, iteration))

    def resample(self, state: State, lost: Tensor, iteration: int) -> None:
        """Go through the tokens of the documents ``lost`` once, with draws of their own.

        Args:
            state: Of the program, mended.
            lost: Numbers of blocks; int64.
            iteration: Of which the draws are a function; not those of :meth:`iterate`.
        """
        self._sweep(state, lost, self.draws(_RESAMPLE, iteration))

    def rows(self, state: State) -> tuple[Tensor, ...]:
        """Return the topic of each token, int16 of shape (documents, tokens of the longest); -1 where there is none."""
        return (state["assignments"],)

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the total variation between the topic counts of each document: tokens, not shares of them.

        It is half the sum of the differences: the least number of tokens that have another topic. So a long document
        weighs as much as it does in the counts of words, which all the others read.
        """
        return torch.from_numpy(_compiled(_moved)(a.numpy(), b.numpy(), self.topics))

    def mend(self, state: State, written: Tensor) -> None:
        """See :class:`~holdfast_lab.workloads.iterative.base.Program`; counts all tokens, which costs little of a sweep.

        Counting those of ``written`` alone would take what they were before.
        """
        self._count(state)

    def loss(self, state: State) -> float:
        """Return minus the log-likelihood of a token, in nats, given the topics as they are: log of the perplexity."""
        return -float(self.log_likelihoods(state).sum()) / len(self.corpus.words)

    def log_likelihoods(self, state: State, assignments: Tensor | None = None) -> Tensor:
        """Return the log-likelihood of each document, in nats: the sum over tokens of log sum_k p(k | document) p(word | k).

        Args:
            state: Of the program.
            assignments: Topics of the tokens from which the p(k | document) are taken, as :meth:`rows` returns them;
                None: the state's. The p(word | k) are the state's. With what was saved, the difference is what the
                document would lose if it were restored now.

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
        """Return a number from 0 (with) to 1 (without) for each token: a function of (seed, kind, iteration, token)."""
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
    """Return an :class:`Lda` on the dataset that ``name`` ends with; ``topics`` None is 20, of made-up documents their 8."""
    dataset = name.removeprefix("lda-")
    corpus = load_corpus(dataset, data, documents, vocabulary, longest)
    some = (8 if dataset == "documents" else 20) if topics is None else topics
    return Lda(name, seed, corpus, topics=some, alpha=alpha, beta=beta)


def _arrays(state: State) -> tuple[_Array, ...]:
    return tuple(state[name].numpy() for name in ("assignments", "document_topics", "word_topics", "topics"))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` compiled, when it is first called, for what it is called with."""
    try:
        import numba
    except ImportError:
        raise ConfigError(
            "latent Dirichlet allocation is compiled by numba, which is not installed: pip install 'holdfast[lab]'"
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
            aim = draws[token] * weights[-1]  # less than weights[-1], since the draw is less than 1: the search ends
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
