"""Texts in BEIR's layout: a corpus, queries, and which documents answer them.

    corpus.jsonl[.gz]    {"_id": "d1", "title": "may be missing", "text": "..."} a line
    queries.jsonl[.gz]   {"_id": "q1", "text": "..."} a line
    qrels/train.tsv      query-id <tab> corpus-id <tab> score, a header above; test.tsv and dev.tsv
                         (or val.tsv) the same; a score above 0 makes a positive

Another folder is refused, with the rule, what was found where, and what to do.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from negchain.files import open_plain
from negchain.printable import counted, show
from negchain.train.presets import ConfigError

Graded = dict[int, float]  # position of a document: its grade, above 0
SPLITS = {"train": ("train",), "dev": ("dev", "val", "valid", "validation"), "test": ("test",)}
"""Splits, and the names their files go by."""
LONGEST = 64 << 20
"""Bytes of a line, at most."""
PACKED = 100
"""How many times its own size a .gz may unpack to: a small file must not fill the memory."""
HALF = re.compile("[\ud800-\udfff]")
"""Half a character, as JSON may spell one ("\\ud83d" of a cut emoji): no tokenizer takes it."""
TAIL = 16
"""Bytes: the last 8 of a packed text are its checksum and length, which are zero of no text."""


@dataclass(frozen=True)
class Queries:
    """Queries of a split that have a positive, in order of their ids."""

    ids: list[str]
    texts: list[str]
    relevant: list[Graded]

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, places: list[int]) -> Queries:
        """Some of them."""
        columns = (self.ids, self.texts, self.relevant)
        return Queries(*([column[p] for p in places] for column in columns))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Beir:
    """A corpus and its queries.

    Attributes:
        documents: title and text of each.
        known: per training query the documents that are never its negatives: its positives, those
            of queries that ask the same, all that read as one of these, and all that read as it.
        train, validation, test: queries; empty where there are none. No text is in two of them.
        held: a hash of the corpus and of what is judged, validation and test queries.
        fingerprint: a hash of everything.
        notes: what was decided for the user.
    """

    documents: list[str]
    known: list[list[int]]
    train: Queries
    validation: Queries
    test: Queries
    held: str
    fingerprint: str
    notes: tuple[str, ...]


def claims(data: str) -> bool:
    """Whether a folder looks like BEIR's."""
    return any(os.path.isfile(Path(data) / f"{name}.jsonl{end}")
               for name in ("corpus", "queries") for end in ("", ".gz"))  # fmt: skip


def read_beir(folder: Path, holdout: float, subset: int | None = None) -> Beir:
    """Read a folder; `holdout`: share of the training queries for validation, without dev.tsv.

    The same queries are held out whatever the run's seed is, so that runs can be compared.
    """
    if not folder.is_dir():
        raise ConfigError(f"--data must be a folder, and there is no {show(str(folder))}")
    corpus = _entries(folder, "corpus")
    documents = [" ".join(filter(None, (e["title"], e["text"]))).strip() for e in corpus.values()]
    texts = {name: entry["text"].strip() for name, entry in _entries(folder, "queries").items()}
    place = {name: number for number, name in enumerate(corpus)}
    splits, notes = dict[str, Queries](), []
    blank = {name for name, text in texts.items() if not text}
    for split, named in SPLITS.items():
        files = [path for name in named if (path := folder / "qrels" / f"{name}.tsv").exists()]
        if len(files) > 1:
            raise ConfigError(
                f"{folder / 'qrels'} must hold one file for the {split} queries, and has "
                f"{', '.join(path.name for path in files)}; keep one of them"
            )
        found = _relevant(files[0], texts, place) if files else {}
        # a test stays as it was published
        empty = [(grades, n) for grades in found.values() for n in grades if not documents[n]]
        if split != "test" and empty:
            notes.append(
                f"left out: {counted(len(empty), 'positive', 'positives')} of {files[0].name} "
                "with no title and no text"
            )
            for grades, number in empty:
                del grades[number]
        names = sorted(name for name, grades in found.items() if grades and name not in blank)
        if gone := len(found) - len(names):
            notes.append(
                f"left out: {counted(gone, 'query', 'queries')} of {files[0].name} with no "
                "positive or no text"
            )
        splits[split] = Queries(names, [texts[q] for q in names], [found[q] for q in names])
    if not any(map(len, splits.values())):
        raise ConfigError(
            f"{folder / 'qrels'} must hold train.tsv, dev.tsv or test.tsv with a positive (a score "
            "above 0), and has none; write one line per pair: query-id, corpus-id, score"
        )
    train, test = splits["train"], splits["test"]
    validation = _apart(splits["dev"], "validation", test.texts, notes)
    if not len(validation) and len(train):
        order = np.random.default_rng(0).permutation(len(train)).tolist()
        held = set(order[: int(len(train) * holdout)])
        validation = _apart(train.take(sorted(held)), "validation", test.texts, notes)
        train = train.take([n for n in range(len(train)) if n not in held])
        queries = counted(len(held), "training query is", "training queries are")
        notes.append(f"{queries} held out for validation (--holdout)")
    train = _apart(train, "training", [*validation.texts, *test.texts], notes)
    train = train.take(list(range(len(train)))[:subset])
    alike: dict[str, list[int]] = {}
    for number, text in enumerate(documents):
        alike.setdefault(text, []).append(number)
    if (more := len(documents) - len(alike)) > 0:
        repeat = counted(more, "document repeats", "documents repeat")
        notes.append(f"{repeat} another's text: never among the negatives of its queries")
    known = _known(train, documents, alike)
    judged = _hash(documents, *map(vars, (validation, test)))
    whole = _hash(judged, vars(train))
    return Beir(documents, known, train, validation, test, judged, whole, tuple(notes))


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _apart(queries: Queries, name: str, held: list[str], notes: list[str]) -> Queries:
    """The queries whose text is not among the `held` texts of later splits."""
    taken = set(held)
    kept = [n for n, text in enumerate(queries.texts) if text not in taken]
    if gone := len(queries) - len(kept):
        same = counted(gone, f"{name} query is a held-out one", f"{name} queries are held-out ones")
        notes.append(f"{same} word for word, and left out")
    return queries.take(kept)


def _known(queries: Queries, documents: list[str], alike: dict[str, list[int]]) -> list[list[int]]:
    """See `Beir.known`."""
    asked: dict[str, dict[int, None]] = {}
    for text, graded in zip(queries.texts, queries.relevant, strict=True):
        own = asked.setdefault(text, dict.fromkeys(alike.get(text, ())))
        own.update(dict.fromkeys(copy for place in graded for copy in alike[documents[place]]))
    return [list(asked[text]) for text in queries.texts]


def _entries(folder: Path, name: str) -> dict[str, dict[str, str]]:
    """The lines of corpus.jsonl or queries.jsonl by their id."""
    paths = [folder / f"{name}.jsonl{end}" for end in ("", ".gz")]
    path = next((p for p in paths if p.is_file()), None)
    if path is None:
        raise ConfigError(
            f"{folder} must hold {name}.jsonl or {name}.jsonl.gz and has neither; BEIR's layout is "
            "corpus.jsonl, queries.jsonl and qrels/train.tsv"
        )
    found: dict[str, dict[str, str]] = {}
    for number, line in _lines(path):
        entry = _entry(path, number, line)
        if entry["_id"] in found:
            raise ConfigError(
                f"every line of {path} must have an _id of its own, and line {number} repeats "
                f"{show(entry['_id'])}; rename or delete one of the two"
            )
        found[entry["_id"]] = entry
    if not found:
        raise ConfigError(f"{path} must hold at least one line, and is empty; restore the file")
    return found


def _entry(path: Path, number: int, line: str) -> dict[str, str]:
    rule = f'{path} must hold a JSON object a line, {{"_id": "...", "text": "..."}}'
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError):
        entry = line
    if not isinstance(entry, dict):
        raise ConfigError(f"{rule}, and line {number} is {show(entry)}; correct or delete it")
    if isinstance(entry.get("_id"), int) and not isinstance(entry["_id"], bool):
        entry["_id"] = str(entry["_id"])  # qrels hold text
    entry["title"] = entry.get("title") or ""
    for key in ("_id", "text", "title"):
        text = entry.get(key)
        if not isinstance(text, str) or (key == "_id" and not text) or HALF.search(text):
            was = f"the {key} {show(entry[key])}" if key in entry else f"no {key}"
            raise ConfigError(f"{rule}, and line {number} has {was}; correct or delete it")
    return entry


def _relevant(path: Path, texts: dict[str, str], place: dict[str, int]) -> dict[str, Graded]:
    """Positives of every query that is named, which may be none."""
    found: dict[str, Graded] = {}
    unknown: list[str] = []  # what is wrong with a line
    for number, line in _lines(path):
        parts = line.split("\t")
        where = f"line {number} of {path}"
        score = _number(parts[2]) if len(parts) == 3 else None
        if score is None:
            if number == 1 and len(parts) == 3 and parts[0] not in texts:  # the header
                continue
            raise ConfigError(
                f"{path} must hold a query-id, a corpus-id and a score a line, with tabs between, "
                f"and line {number} is {show(line)}; correct or delete it"
            )
        if parts[0] not in texts:
            unknown.append(f"{where} names {show(parts[0])}, which is no _id of queries.jsonl")
        elif parts[1] not in place:
            unknown.append(f"{where} names {show(parts[1])}, which is no _id of corpus.jsonl")
        else:
            grades = found.setdefault(parts[0], {})
            if score > 0:
                grades[place[parts[1]]] = score
    if unknown:
        alike = f", as do {len(unknown) - 1:,} more" if len(unknown) > 1 else ""
        raise ConfigError(
            f"qrels must name lines of queries.jsonl and corpus.jsonl, and {unknown[0]}{alike}; "
            "correct such lines, or delete them"
        )
    return found


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < 1e6 else None  # not NaN


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file that are not empty, with their numbers; unpacked where it is .gz."""
    try:
        with (
            open_plain(path.resolve()) as plain,
            _unpacked(plain) if path.suffix == ".gz" else plain as file,
        ):
            length = 0
            for number, raw in enumerate(iter(lambda: file.readline(LONGEST), b""), start=1):
                length += len(raw)
                if len(raw) == LONGEST or length > LONGEST + PACKED * plain.tell():
                    raise ValueError(f"line {number} is too long, or the file unpacks to too much")
                if line := raw.decode("utf-8-sig" if number == 1 else "utf-8").strip("\r\n"):
                    yield number, line
    except (ValueError, EOFError, zlib.error, OSError) as error:
        raise ConfigError(
            f"{path} must be readable text (UTF-8), but {error}; restore the file"
        ) from None


def _unpacked(packed: BinaryIO) -> gzip.GzipFile:
    """The text of a .gz; one that ends in zeros is refused, which gzip skips one by one."""
    packed.seek(-min(TAIL, packed.seek(0, io.SEEK_END)), io.SEEK_END)
    if packed.read(TAIL) == bytes(TAIL):
        raise ValueError("it ends in zeros, as a file does that was not fetched whole")
    packed.seek(0)
    return gzip.GzipFile(fileobj=packed)
