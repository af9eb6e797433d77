from __future__ import annotations

import itertools
import math
import sys
from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from holdfast.errors import ConfigError
from holdfast_lab.workloads.iterative import copy_of, lda

ALPHA, BETA = 0.1, 0.01
TOPICS, WORDS = 8, 1000  # of the documents that are made


def program(seed=0, **options):
    return lda.make("lda-documents", None, seed, vocabulary=WORDS, **options)


def after(some, iterations, state=None):
    state = some.start() if state is None else state
    for iteration in range(iterations):
        some.iterate(state, iteration)
    return state


def recounted(some, state):
    """Return the three counts by a way of their own: one token after the other."""
    corpus, found = some.corpus, [np.zeros(state[name].shape, int) for name in ("document_topics", "word_topics")]
    for document, row in enumerate(state["assignments"].tolist()):
        words = corpus.words[corpus.offsets[document] : corpus.offsets[document + 1]]
        assert row[len(words) :] == [-1] * (len(row) - len(words))
        for topic, word in zip(row, words, strict=False):
            found[0][document, topic] += 1
            found[1][word, topic] += 1
    return *found, found[0].sum(0)


def assert_counts_follow(some, state):
    for name, expected in zip(("document_topics", "word_topics", "topics"), recounted(some, state), strict=True):
        assert np.array_equal(state[name].numpy(), expected), name


def perplexity(some, by_document, by_topic):
    lengths = np.diff(some.corpus.offsets)
    likelihoods = (by_document.repeat(lengths, 0) * by_topic[:, some.corpus.words].T).sum(1)
    return math.exp(-np.log(likelihoods).mean())


@pytest.fixture(scope="module")
def converged():
    some = program(seed=1)  # seed 0 finds two of the topics as one: a mode that a chain does not leave
    return some, after(some, 100)


@pytest.fixture(scope="module")
def made():
    """Return what the documents were made of, drawn again: p(k | document), p(word | k)."""
    rng = np.random.default_rng(0)
    by_topic = rng.dirichlet(np.full(WORDS, 0.05), TOPICS)
    return rng.dirichlet(np.full(TOPICS, 0.1), 600)[100:], by_topic


def test_topics_of_tokens_are_drawn_from_the_posterior():
    """Two documents of three and two tokens, of three words: all 32 states can be counted out."""
    corpus = lda.Corpus(np.array([0, 3, 5]), np.array([0, 0, 1, 1, 2], np.int32), 3)
    some = lda.Lda("lda", 0, corpus, topics=2, alpha=0.7, beta=0.4)

    def weight(topics):
        total = 0.0
        for begin, end in itertools.pairwise(corpus.offsets):
            total += sum(math.lgamma(topics[begin:end].count(k) + 0.7) for k in (0, 1))
        for k in (0, 1):
            counts = Counter(word for word, topic in zip(corpus.words.tolist(), topics, strict=True) if topic == k)
            total += sum(math.lgamma(counts[w] + 0.4) for w in range(3)) - math.lgamma(counts.total() + 3 * 0.4)
        return math.exp(total)

    weights = {topics: weight(topics) for topics in itertools.product((0, 1), repeat=5)}
    seen, state, count = Counter(), some.start(), 10_000
    for iteration in range(count):
        some.iterate(state, iteration)
        seen[(*state["assignments"][0].tolist(), *state["assignments"][1, :2].tolist())] += 1

    apart = sum(abs(seen[topics] / count - weight / sum(weights.values())) for topics, weight in weights.items()) / 2
    assert apart < 0.03  # of the uniform distribution over them: 0.37


def test_the_topics_that_made_the_documents_are_found(converged, made):
    from scipy.optimize import linear_sum_assignment

    some, state = converged

    cosines = normed(some.shares(state)[1].numpy()) @ normed(made[1]).T

    assert cosines[linear_sum_assignment(-cosines)].min() > 0.95


def normed(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_the_perplexity_is_that_of_what_made_the_documents_and_at_most_scikit_learns(converged, made):
    from sklearn.decomposition import LatentDirichletAllocation

    some, state = converged
    lengths, matrix = np.diff(some.corpus.offsets), np.zeros((some.blocks, WORDS))
    np.add.at(matrix, (np.arange(some.blocks).repeat(lengths), some.corpus.words), 1)
    reference = LatentDirichletAllocation(TOPICS, doc_topic_prior=ALPHA, topic_word_prior=BETA, random_state=0)
    by_document = reference.fit_transform(matrix)
    by_topic = reference.components_ / reference.components_.sum(1, keepdims=True)

    ours = perplexity(some, *(share.numpy() for share in some.shares(state)))

    assert math.exp(some.loss(state)) == pytest.approx(ours, rel=1e-9)
    assert ours == pytest.approx(perplexity(some, *made), rel=0.05)
    assert 0.8 < ours / perplexity(some, by_document, by_topic) < 1.02


def test_counts_follow_from_the_assignments_whatever_happens():
    some = program(documents=50)
    early = after(some, 1)
    state = after(some, 3, copy_of(early))
    lost = torch.tensor([0, 7, 49])
    assert_counts_follow(some, state)

    some.rows(state)[0][lost] = some.rows(early)[0][lost]
    some.mend(state, lost)
    assert_counts_follow(some, state)
    some.resample(state, lost, 3)
    assert_counts_follow(some, state)


def test_resampling_moves_the_lost_documents_alone_and_towards_the_rest():
    some = program(documents=100)
    state = after(some, 60)
    lost = torch.arange(0, 100, 2)
    some.rows(state)[0][lost] = some.rows(some.start())[0][lost]
    some.mend(state, lost)
    before = copy_of(state)

    some.resample(state, lost, 60)

    moved = (state["assignments"] != before["assignments"]).any(1)
    assert moved[lost].all()
    assert not moved[1::2].any()
    assert some.log_likelihoods(state)[lost].sum() > some.log_likelihoods(before)[lost].sum() + 100


def test_what_a_document_would_lose_is_counted_with_the_topics_as_they_are():
    some = program(documents=40)
    saved = some.rows(some.start())[0]
    state = after(some, 40)
    mixed = saved.clone()
    mixed[:20] = state["assignments"][:20]

    whole, found = some.log_likelihoods(state), some.log_likelihoods(state, mixed)

    assert torch.equal(found[:20], whole[:20])
    assert (whole[20:] - found[20:]).mean() > 10
    by_document, by_topic = some.shares(state)
    begin, end = some.corpus.offsets[3:5]
    assert float(whole[3]) == pytest.approx(
        float((by_document[3] @ by_topic)[some.corpus.words[begin:end]].log().sum())
    )


def test_the_distance_is_the_least_number_of_tokens_that_have_another_topic():
    a = torch.tensor([[0, 0, 1, 2], [3, 3, -1, -1], [1, 0, -1, -1]], dtype=torch.int16)
    b = torch.tensor([[1, 1, 0, 2], [4, 5, -1, -1], [0, 1, -1, -1]], dtype=torch.int16)

    assert program().distance(a, b).tolist() == [1.0, 2.0, 0.0]


def test_saving_a_document_takes_what_its_assignments_take():
    some = program(documents=50)
    (assignments,) = some.rows(some.start())

    assert assignments.shape[0] == some.blocks == len(some.block_bytes) == 50
    assert torch.equal(some.block_bytes, (assignments >= 0).sum(1) * assignments.element_size())


def test_draws_are_uniform_and_a_function_of_seed_iteration_and_token():
    some = program(documents=50)
    draws = np.stack([some.draws(1, iteration) for iteration in range(200)])

    for across in (draws, draws[:, :100].T):  # all of them; few tokens over many iterations
        counts = np.histogram(across, 100, (0, 1))[0]
        expected = across.size / 100
        assert 50 < ((counts - expected) ** 2 / expected).sum() < 160  # chi-square with 99 degrees: 1e-5 on either side
    assert np.array_equal(draws[7], program(documents=50).draws(1, 7))
    for other in (program(1, documents=50).draws(1, 7), some.draws(2, 7), draws[8]):
        assert abs(np.corrcoef(draws[7], other)[0, 1]) < 0.1


def test_an_iteration_does_not_depend_on_those_before_it():
    some, same, other = program(documents=50), program(documents=50), program(1, documents=50)
    state = after(some, 5)
    branch = copy_of(state)

    after(other, 3)
    for run, program_of in ((state, some), (branch, same)):
        program_of.iterate(run, 5)

    assert torch.equal(state["assignments"], branch["assignments"])
    assert not torch.equal(after(other, 6)["assignments"], state["assignments"])


def test_a_reseeded_run_is_the_same_until_then():
    some = program(documents=50)
    other = some.reseeded(3)

    assert torch.equal(after(some, 3)["assignments"], after(other, 3)["assignments"])
    assert not torch.equal(after(some, 4)["assignments"], after(other, 4)["assignments"])
    assert abs(np.corrcoef(some.draws(1, 3), other.draws(1, 3))[0, 1]) < 0.1


def test_documents_that_are_too_long_are_left_out():
    few = program(longest=70)

    assert 0 < few.blocks < program().blocks
    assert few.rows(few.start())[0].shape[1] == 70


def test_without_numba_it_says_what_to_install(monkeypatch):
    lda._compiled.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)

    with pytest.raises(ConfigError, match=r"numba, which is not installed: pip install 'holdfast\[lab\]'"):
        program()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"topics": 1}, "topics must be from 2 to 32768, alpha and beta above 0, got 1, 0.1 and 0.01"),
        ({"beta": 0.0}, "got 8, 0.1 and 0"),
        ({"documents": 0}, "documents and longest must be at least 1, got 0 and 200"),
        ({"longest": 1}, "no document of documents has from 1 to 1 tokens; increase longest"),
    ],
)
def test_what_is_out_of_range_is_answered_with_the_range(options, line):
    with pytest.raises(ConfigError, match=line):
        program(**options)
