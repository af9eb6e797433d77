"""Documents as word counts: 20 Newsgroups, Reuters-21578, and generated documents."""

from __future__ import annotations

import html
import lzma
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.errors import ConfigError
from holdfast_lab.workloads.data.base import Dataset, find_folder, opened

VOCABULARY = 5000
"""Default number of words that are counted."""

_NEWSGROUPS_AT = "http://qwone.com/~jason/20Newsgroups/20news-bydate.tar.gz"
_REUTERS_AT = "https://archive.ics.uci.edu/dataset/137/reuters+21578+text+categorization+collection"
_REUTERS_FILES = ("reut2-*.sgm", "reuters21578.tar.gz", "reuters21578.tar.xz")
_MEMBER_BYTES = 1 << 24  # ten times the largest file of Reuters-21578
_WORD = re.compile(r"[a-z]{3,}")
_DOCUMENT = re.compile(r"<REUTERS\b([^>]*)>(.*?)</REUTERS>", re.DOTALL)
_TOPICS = re.compile(r"<TOPICS>(.*?)</TOPICS>", re.DOTALL)
_TEXT = re.compile(r"<TEXT[^>]*>(.*?)</TEXT>", re.DOTALL)
_DATELINE = re.compile(r"<DATELINE>.*?</DATELINE>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Documents as word counts, in compressed sparse rows.

    ``documents[i]`` is the dense row of a document, float32 of shape (words,), and its class; a slice or a list of
    numbers gives several, stacked.
    """

    offsets: torch.Tensor
    """int64 (documents + 1): where a document starts in the two arrays below."""
    words: torch.Tensor
    """int64: numbers of a document's words, ascending."""
    counts: torch.Tensor
    """int64: count of each word in the document, ``>= 1``."""
    labels: torch.Tensor
    """int64 (documents): classes."""
    vocabulary: tuple[str, ...]
    """The words, by number."""

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.labels)

    def __getitem__(self, index: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """See the class."""
        chosen = torch.arange(len(self))[index]
        numbers = chosen.reshape(-1).tolist()
        rows = torch.zeros(len(numbers), len(self.vocabulary))
        for row, number in zip(rows, numbers, strict=True):
            place = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
            row[self.words[place]] = self.counts[place].float()
        return rows.reshape(*chosen.shape, -1), self.labels[chosen]

    def first(self, count: int) -> Documents:
        """Return the first ``count`` documents."""
        count = min(count, len(self))
        end = int(self.offsets[count])
        return Documents(
            offsets=self.offsets[: count + 1],
            words=self.words[:end],
            counts=self.counts[:end],
            labels=self.labels[:count],
            vocabulary=self.vocabulary,
        )

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return document and word of every token, int64, ordered by both, as input of a Gibbs sampler."""
        documents = torch.arange(len(self)).repeat_interleave(self.offsets.diff())
        return documents.repeat_interleave(self.counts), self.words.repeat_interleave(self.counts)


@dataclass(frozen=True, slots=True)
class _Raw:
    """Documents of a part before their words are counted."""

    texts: Sequence[str]
    classes: Sequence[str]


def newsgroups(data: Path, *, vocabulary: int | None = None, seed: int = 0) -> Dataset:
    """Return 20 Newsgroups, the version sorted by date: 11,314 posts for training, 7,532 for testing.

    The header of a post, up to its first empty line, is left out because it names the group. Quotes and signatures
    stay.

    Args:
        data: Directory with ``20news-bydate-train/<group>/<number>`` and ``20news-bydate-test``, or its parent.
        vocabulary: Number of words that are counted, ``>= 1``: those in the most training documents, except words in
            more than half of them; words have at least three letters, in lower case. None: :data:`VOCABULARY`.
        seed: Seed of the order of the posts, which are sorted by group.

    Raises:
        ConfigError: if a directory is missing or empty, or if the two have different groups.
    """
    names = ("20news-bydate-train", "20news-bydate-test")
    folders = ("20news-bydate", "20newsgroups", "20news")
    folder = find_folder(data, folders, (f"{names[0]}/*/*",), "20 Newsgroups", _NEWSGROUPS_AT)
    train, test = (_posts(folder / name) for name in names)
    if set(train.classes) != set(test.classes):
        odd = sorted(set(train.classes) ^ set(test.classes))[0]
        raise ConfigError(
            f"{folder}: {' and '.join(names)} must have posts of the same groups, but {odd} is only in one. It is at "
            f"{_NEWSGROUPS_AT}"
        )
    return _dataset(
        "20 Newsgroups", folder, "published split", _shuffled(train, seed), _shuffled(test, seed), vocabulary
    )


def _posts(folder: Path) -> _Raw:
    texts, classes = [], []
    for path in sorted(folder.glob("*/*")):
        with opened(path) as file:
            text = file.read().decode("latin-1").replace("\r\n", "\n")
        texts.append(text.partition("\n\n")[2])
        classes.append(path.parent.name)
    return _Raw(texts, classes)


def _shuffled(raw: _Raw, seed: int) -> _Raw:
    order = np.random.default_rng(seed).permutation(len(raw.texts))
    return _Raw([raw.texts[i] for i in order], [raw.classes[i] for i in order])


def reuters(data: Path, *, vocabulary: int | None = None) -> Dataset:
    """Return Reuters-21578 with the ModApte split: documents with a single topic that occurs in both parts.

    For the whole collection these are the 52 topics known as R52. Titles and bodies are counted.

    Args:
        data: Directory with the 22 files ``reut2-*.sgm``, or with ``reuters21578.tar.gz`` (or ``.xz``) that contains
            them; or its parent. Nothing is unpacked onto the disk.
        vocabulary: As for :func:`newsgroups`.

    Raises:
        ConfigError: if a file is missing, truncated, or something else.
    """
    folder = find_folder(
        data, ("reuters21578", "reuters-21578", "reuters"), _REUTERS_FILES, "Reuters-21578", _REUTERS_AT
    )
    texts: dict[str, list[tuple[str, str]]] = {"TRAIN": [], "TEST": []}
    for path, content in _sgml_files(folder):
        for part, topic, text in _articles(path, content.decode("latin-1")):
            texts[part].append((topic, text))
    common = {topic for topic, _ in texts["TRAIN"]} & {topic for topic, _ in texts["TEST"]}
    if not common:
        raise ConfigError(
            f"{folder} has no topic with documents in both parts; check that all files reut2-000.sgm to reut2-021.sgm "
            "are there"
        )
    kept = {part: [(topic, text) for topic, text in found if topic in common] for part, found in texts.items()}
    train, test = (_Raw([text for _, text in found], [topic for topic, _ in found]) for found in kept.values())
    return _dataset("Reuters-21578", folder, "published split ModApte, single topics", train, test, vocabulary)


def _sgml_files(folder: Path) -> Iterator[tuple[Path, bytes]]:
    files = sorted(folder.glob(_REUTERS_FILES[0]))
    for path in files:
        with opened(path) as file:
            yield path, file.read()
    if files:
        return
    path = next(folder / name for name in _REUTERS_FILES[1:] if (folder / name).is_file())
    try:
        with tarfile.open(path) as archive:
            yield from _members(archive, path)
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise ConfigError(
            f"cannot read {path} as a compressed archive: {error}. Copy or download it again, it is at {_REUTERS_AT}"
        ) from error


def _members(archive: tarfile.TarFile, path: Path) -> Iterator[tuple[Path, bytes]]:
    for member in archive:
        inside = path / member.name
        if not (member.isfile() and inside.match(_REUTERS_FILES[0])):
            continue
        if member.size > _MEMBER_BYTES:
            raise ConfigError(f"{inside} claims {member.size} bytes, but at most {_MEMBER_BYTES} are read")
        file = archive.extractfile(member)
        assert file is not None, "isfile() was true"
        yield inside, file.read()


def _articles(path: Path, content: str) -> Iterator[tuple[str, str, str]]:
    """Yield part, topic and text of each document with one topic."""
    begun = content.count("<REUTERS ")
    found = _DOCUMENT.findall(content)
    if begun == 0 or begun != len(found):
        raise ConfigError(
            f"{path} begins {begun} documents, but only {len(found)} are complete: it is truncated, or another file. "
            f"It is at {_REUTERS_AT}"
        )
    for head, body in found:
        part = re.search(r'LEWISSPLIT="(TRAIN|TEST)"', head)
        topics = re.findall(r"<D>(.*?)</D>", "".join(_TOPICS.findall(body)))
        if part is not None and 'TOPICS="YES"' in head and len(topics) == 1:
            text = _DATELINE.sub(" ", "".join(_TEXT.findall(body)))
            yield part[1], topics[0], html.unescape(_TAG.sub(" ", text))


def generated_documents(
    *,
    documents: int = 600,
    topics: int = 8,
    vocabulary: int | None = None,
    length: float = 80.0,
    topic_spread: float = 0.1,
    word_spread: float = 0.05,
    seed: int = 0,
) -> Dataset:
    """Return documents generated by the model of latent Dirichlet allocation; a sixth of them is for testing.

    Each topic is a distribution over words, each document a distribution over topics, and each of its tokens a word of
    one of its topics. The class of a document is its most frequent topic.

    Args:
        documents: Number of documents, ``>= 2``.
        topics: Number of topics, ``>= 1``.
        vocabulary: Number of words, ``>= 1``; None: 1000.
        length: Mean number of tokens, of a Poisson distribution, ``> 0``; no document is empty.
        topic_spread: Parameter of the Dirichlet distribution over topics, ``> 0``: the smaller, the fewer topics in a
            document.
        word_spread: The same for the words of a topic.
        seed: Seed of everything random.

    Raises:
        ConfigError: if a number is out of range.

    Source:
        D. M. Blei, A. Y. Ng, M. I. Jordan, "Latent Dirichlet allocation", JMLR 3, 2003.
    """
    words = 1000 if vocabulary is None else vocabulary
    if documents < 2 or min(topics, words) < 1 or not min(length, topic_spread, word_spread) > 0:
        raise ConfigError(
            "documents need at least 2 documents, 1 topic and 1 word, and length and spreads above 0, got "
            f"{documents}, {topics}, {words}, {length:g}, {topic_spread:g} and {word_spread:g}"
        )
    rng = np.random.default_rng(seed)
    word_shares = rng.dirichlet(np.full(words, word_spread), topics)
    topic_shares = rng.dirichlet(np.full(topics, topic_spread), documents)
    counts = []
    for shares in topic_shares:
        per_topic = rng.multinomial(max(1, rng.poisson(length)), shares)
        tokens = sum(
            (rng.multinomial(n, word_shares[topic]) for topic, n in enumerate(per_topic)), np.zeros(words, np.int64)
        )
        counts.append({int(word): int(tokens[word]) for word in np.flatnonzero(tokens)})
    labels = topic_shares.argmax(1).tolist()
    names = tuple(f"word{number}" for number in range(words))
    tested = max(1, documents // 6)
    return Dataset(
        title="generated documents",
        kind="documents",
        source=f"generated: {topics} topics, seed {seed}",
        split="the first sixth held out",
        shape=(words,),
        num_classes=topics,
        train=_rows(counts[tested:], labels[tested:], names),
        test=_rows(counts[:tested], labels[:tested], names),
    )


def _dataset(title: str, folder: Path, split: str, train: _Raw, test: _Raw, vocabulary: int | None) -> Dataset:
    size = VOCABULARY if vocabulary is None else vocabulary
    words = [[Counter(_WORD.findall(text.lower())) for text in part.texts] for part in (train, test)]
    names = _vocabulary(words[0], size)
    if not names:
        raise ConfigError(
            f"{folder} has no word that is in at most half of the training documents: these are not the texts of "
            f"{title}"
        )
    number = {word: place for place, word in enumerate(names)}
    classes = {name: place for place, name in enumerate(sorted(set(train.classes)))}
    parts = [
        _rows(
            ({number[word]: count for word, count in found.items() if word in number} for found in counted),
            [classes[name] for name in raw.classes],
            names,
        )
        for raw, counted in zip((train, test), words, strict=True)
    ]
    return Dataset(
        title=title,
        kind="documents",
        source=f"read from {folder}",
        split=split,
        shape=(len(names),),
        num_classes=len(classes),
        train=parts[0],
        test=parts[1],
    )


def _vocabulary(documents: Sequence[Counter[str]], size: int) -> tuple[str, ...]:
    spread = Counter(word for found in documents for word in found)
    usual = [(-count, word) for word, count in spread.items() if count <= len(documents) / 2]
    return tuple(word for _, word in sorted(usual)[:size])


def _rows(counted: Iterable[dict[int, int]], labels: Sequence[int], names: tuple[str, ...]) -> Documents:
    rows = [sorted(found.items()) for found in counted]
    flat = np.array([pair for row in rows for pair in row], dtype=np.int64).reshape(-1, 2)
    return Documents(
        offsets=torch.from_numpy(np.cumsum([0, *map(len, rows)], dtype=np.int64)),
        words=torch.from_numpy(flat[:, 0].copy()),
        counts=torch.from_numpy(flat[:, 1].copy()),
        labels=torch.tensor(labels, dtype=torch.int64),
        vocabulary=names,
    )
