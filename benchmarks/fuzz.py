"""Files that users hand us, damaged at random: every one ends in a result or in a sentence.

A case passes if the command ends with status 0, or with 1 or 2 and one line that says why; no
traceback and no "set NEGCHAIN_DEBUG" (which is said when an error was not foreseen); and if nothing
outside the run folder and the named output has changed. Files that could carry code carry a
payload that would leave a file behind.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import random
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from negchain.cli import run
from negchain.encoders import build_encoder
from negchain.train import checkpoint

TINY = (
    "train --encoder small-cnn --recipe digits --image-size 8 --batch-size 8 --probe-samples 8 "
    "--quiet --device cpu --log-every 1 --eval-every 0 --warmup-epochs 0 --workers 0 --steps 1"
)
Case = tuple[Path, bytes]  # a file, and what is written there


class Payload:
    """Leaves a file behind if it is unpickled."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.where}",)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut out, doubled, set to extremes, or all after some point gone."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        at, kind = rng.randrange(len(data) + 1), rng.randrange(6)
        span = slice(at, at + rng.choice((1, 2, 4, 8, 100)))
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[span] = rng.choice((b"\xff", b"\0", b"\x7f", b"\x80")) * len(data[span])
        elif kind == 2:
            del data[span]
        elif kind == 3:
            data[at:at] = data[span]
        elif kind == 4:
            data[at:at] = rng.choice(
                (b'"', b"[" * 500, b"}", b"-1", b"9" * 400, b"\xff\xfe", b"\n")
            )
        elif rng.random() < 0.2:
            del data[at:]
    return bytes(data)


def png(value: int, kind: str = "PNG", mode: str = "RGB") -> bytes:
    pixels = np.random.default_rng(value).integers(0, 256, (9, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind)
    return file.getvalue()


def tar(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def with_footer(archive: bytes) -> bytes:
    return archive + b"\nsha256:" + hashlib.sha256(archive).hexdigest().encode()


# ------------------------------------------------- what is damaged, and the commands that read it

Kind = Callable[[Path, random.Random], Iterator[tuple[list[object], Path, bytes]]]


def pictures(top: Path, rng: random.Random) -> Iterator[tuple[list[object], Path, bytes]]:
    data = top / "data"
    data.mkdir()
    for number in range(12):
        (data / f"{number}.png").write_bytes(png(number))
    kinds = [("png", "PNG", "RGBA"), ("jpg", "JPEG", "RGB"), ("gif", "GIF", "P"),
             ("tif", "TIFF", "RGB"), ("bmp", "BMP", "RGB"), ("webp", "WEBP", "RGB"),
             ("ppm", "PPM", "RGB"), ("tif", "TIFF", "F"), ("jpg", "JPEG", "CMYK")]  # fmt: skip
    for number in range(8):
        for ending, kind, mode in kinds:  # many at once: they are independent
            for copy in range(10):
                file = data / f"bad{kind}{mode}{copy}.{ending}"
                file.write_bytes(mutated(png(number, kind, mode), rng))
        yield [TINY, "--data", data, "--out", top / "out"], file, file.read_bytes()


def tables(top: Path, rng: random.Random) -> Iterator[tuple[list[object], Path, bytes]]:
    lines = io.StringIO()
    writer = csv.writer(lines)
    writer.writerow(["path", "label"])
    for number in range(12):
        (top / f"{number}.png").write_bytes(png(number))
        writer.writerow([f"{number}.png", "ab"[number % 2]])
    for _ in range(25):
        yield (
            [TINY, "--data", top / "t.csv", "--out", top / "out"],
            top / "t.csv",
            mutated(lines.getvalue().encode(), rng),
        )


def shards(top: Path, rng: random.Random) -> Iterator[tuple[list[object], Path, bytes]]:
    members = {
        f"{n}.{e}": c for n in range(12) for e, c in (("png", png(n)), ("cls", b"%d" % (n % 2)))
    }
    for _ in range(40):
        damaged = bytearray(tar(members))
        if rng.random() < 0.5:
            damaged = bytearray(mutated(bytes(damaged), rng))
        else:  # a header that says something else, with a right checksum
            header = 512 * rng.randrange(len(damaged) // 512)
            damaged[header + rng.randrange(512)] ^= 1 << rng.randrange(8)
            block = bytearray(damaged[header : header + 512])
            block[148:156] = b" " * 8
            damaged[header + 148 : header + 156] = b"%06o\0 " % sum(block)
        yield [TINY, "--data", top / "s.tar", "--out", top / "out"], top / "s.tar", bytes(damaged)


def saved(top: Path, rng: random.Random) -> Iterator[tuple[list[object], Path, bytes]]:
    import datasets

    datasets.disable_progress_bars()
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    rows = {"image": [{"bytes": png(n), "path": None} for n in range(12)], "label": [0, 1] * 6}
    made = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(top / "saved")
    files = sorted(p for p in (top / "saved").rglob("*") if p.is_file())
    for number in range(40):
        file = files[number % len(files)]
        content = mutated(file.read_bytes(), rng)
        yield [TINY, "--data", top / "saved", "--out", top / "out"], file, content


def finished(top: Path) -> Path:
    data = top / "data"
    data.mkdir()
    for number in range(12):
        (data / f"{number}.png").write_bytes(png(number))
    assert run([*TINY.split(), "--data", str(data), "--out", str(top / "run")]) == 0
    return top / "run"


def run_folders(top: Path, rng: random.Random) -> Iterator[tuple[list[object], Path, bytes]]:
    made = finished(top)
    names = ("config.json", "metrics.jsonl", "summary.json", "artifacts.npz")
    commands: list[list[object]] = [
        ["evaluate", made],
        ["train --quiet --resume --out", made],
        ["report", made, "--out", top / "out.html"],
        [f"{TINY} --config", made, "--out", top / "out"],
    ]
    for name in names:
        for command in commands:
            for _ in range(4):
                yield command, made / name, mutated((made / name).read_bytes(), rng)


def checkpoints(top: Path, rng: random.Random) -> Iterator[tuple[list[object], Path, bytes]]:
    """With a right checksum: whoever wrote the file wrote that too."""
    made = finished(top)
    (newest,) = (made / "checkpoints").glob("step-*.pt")
    archive = newest.read_bytes()[:-72]
    loaded = checkpoint.load_latest(made / "checkpoints")
    assert loaded is not None
    for number in range(24):
        command: list[object] = ["evaluate", made]
        if number % 2:
            command = ["train --quiet --resume --steps 2 --out", made]
        if number % 3 == 0:
            yield command, newest, with_footer(mutated(archive, rng))
            continue
        state = dict(loaded.state)  # whole, but for one thing that is of another kind
        name = rng.choice([*state])
        state[name] = rng.choice((None, -1, "text", [], {}, torch.ones(2), 10**30, float("nan")))
        file = io.BytesIO()
        if number % 3 == 1:
            torch.save({"schema": checkpoint.CHECKPOINT_SCHEMA, "step": 1, "state": state}, file)
        else:
            torch.save(
                {
                    "schema": checkpoint.CHECKPOINT_SCHEMA,
                    "step": 1,
                    "state": Payload(top / "owned"),
                },
                file,
            )
        yield command, newest, with_footer(file.getvalue())


def weights(top: Path, rng: random.Random) -> Iterator[tuple[list[object], Path, bytes]]:
    from safetensors.torch import save

    data = finished(top).parent / "data"
    state = build_encoder("small-cnn", image_size=8, norm="batch").state_dict()
    state = {name: value.contiguous() for name, value in state.items()}  # safetensors' rule
    file, legacy, evil = io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save(state, file)
    torch.save(state, legacy, _use_new_zipfile_serialization=False)
    torch.save(Payload(top / "owned"), evil)
    for number in range(32):
        ending = ("pt", "pt", "safetensors", "pt")[number % 4]
        plain = file.getvalue(), legacy.getvalue(), save(state), evil.getvalue()
        content = plain[number % 4]
        name = top / f"w.{ending}"
        command = [f"{TINY} --norm batch --data", data, "--out", top / "out", "--pretrained", name]
        yield command, name, content if number == 3 else mutated(content, rng)


TEXTS = "train --quiet --device cpu --log-every 1 --eval-every 0 --steps 1 --batch-size 4"
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] what the red blue old star sings on a".split()
NAMES = ("../../../../etc/passwd", "/dev/zero", "a\0b", "x" * 5000, "\x1b[2J", "[/]", "", "~", ".")


def write_bert(folder: Path) -> Path:
    """A BERT of 8 dimensions as sentence-transformers has it, beside code that must not run."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 16}
    layers = {"vocab_size": len(WORDS), "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(**layers, **sizes)).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate((("", "Transformer"), ("1_Pooling", "Pooling")))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    pooling = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    (folder / "evil.py").write_text(f"open({str(folder.parent / 'owned')!r}, 'w')\n")
    return folder


def write_texts(folder: Path) -> Path:
    """BEIR's layout: 12 documents, plain and packed, and a query for each."""
    (folder / "qrels").mkdir(parents=True)
    for name in ("corpus", "queries"):
        lines = [
            json.dumps({"_id": f"{name[0]}{n}", "text": f"the {WORDS[5 + n % 9]} {n}"}) + "\n"
            for n in range(12)
        ]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    for split, numbers in (("train", range(10)), ("test", range(10, 12))):
        rows = "".join(f"q{n}\tc{n}\t1\n" for n in numbers)
        (folder / "qrels" / f"{split}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{rows}")
    return folder


def swapped(content: bytes, rng: random.Random) -> bytes:
    """A name or a number of a text replaced by a hostile one; the rest stays as it was."""
    words = sorted(set(re.findall(rb"[\w.]+", content)))
    other = rng.choice([name.encode() for name in NAMES] + [b"-1", b"1e999", b"9" * 30, b"null"])
    return content.replace(rng.choice(words), other, rng.choice((1, -1)))


def unharmed(command: list[object], top: Path) -> list[object]:
    """The command, which must work while nothing is damaged: then damage is what it refuses."""
    status, text = attempt(command, top)
    assert status == 0, text
    shutil.rmtree(top / "out")
    return command


def damaged(content: bytes, rng: random.Random) -> bytes:
    return rng.choice((mutated, swapped))(content, rng)


def texts(top: Path, rng: random.Random) -> Iterator[tuple[list[object], Path, bytes]]:
    data, model = write_texts(top / "beir"), write_bert(top / "bert")
    command = unharmed([TEXTS, "--data", data, "--encoder", model, "--out", top / "out"], top)
    files = sorted(p for p in data.rglob("*") if p.is_file())
    for number in range(48):
        file = files[number % len(files)]
        content = damaged(file.read_bytes(), rng)
        if number % 6 == 5:  # packed, and damaged before or after
            plain = data / "corpus.jsonl"
            packed = plain.read_bytes()
            hidden = plain.rename(top / "hidden")
            content = gzip.compress(damaged(packed, rng), mtime=0)
            if number % 12 == 5:
                content = mutated(gzip.compress(packed, mtime=0), rng)
            yield command, data / "corpus.jsonl.gz", content
            hidden.rename(plain)
        else:
            yield command, file, content


def captions(top: Path, rng: random.Random) -> Iterator[tuple[list[object], Path, bytes]]:
    data, model = top / "data", write_bert(top / "bert")
    data.mkdir()
    rows = "image,caption,split\n"
    for number in range(12):
        (data / f"{number}.png").write_bytes(png(number))
        split = "test" if number > 9 else "train"
        rows += f'{number}.png,"the {WORDS[5 + number % 9]}, {number}",{split}\n' * 2
    command = [
        TINY,
        "--embedding-dim 4 --data",
        data,
        "--text-encoder",
        model,
        "--out",
        top / "out",
    ]
    (data / "captions.csv").write_text(rows)
    unharmed(command, top)
    for _ in range(40):
        yield command, data / "captions.csv", damaged(rows.encode(), rng)


def models(top: Path, rng: random.Random) -> Iterator[tuple[list[object], Path, bytes]]:
    """Of texts, and of captions; some name code in the folder, some are pickles with a command."""
    data, model = write_texts(top / "beir"), write_bert(top / "bert")
    pairs, pickles = top / "data", top / "pickles"
    pairs.mkdir()
    for number in range(12):
        (pairs / f"{number}.png").write_bytes(png(number))
    rows = "".join(f"{number}.png,the old {number}\n" for number in range(12))
    (pairs / "captions.csv").write_text("image,caption\n" + rows)
    shutil.copytree(model, pickles, ignore=shutil.ignore_patterns("*.safetensors"))
    file = io.BytesIO()
    torch.save(Payload(top / "owned"), file)
    (pickles / "pytorch_model.bin").write_bytes(file.getvalue())

    def commands(folder: Path) -> Iterator[list[object]]:
        words = [TINY, "--embedding-dim 4 --data", pairs, "--text-encoder", folder]
        for command in ([TEXTS, "--data", data, "--encoder", folder], words):
            yield [*command, "--out", top / "out"]

    for command in commands(model):
        unharmed(command, top)
    for command in commands(pickles):
        yield command, pickles / "pytorch_model.bin", file.getvalue()
    config = json.loads((model / "config.json").read_text())
    foreign = [
        ("config.json", config | {"auto_map": {"AutoModel": "evil.Evil", "AutoConfig": "evil.E"}}),
        ("config.json", config | {"model_type": "evil"}),
        ("config.json", config | {"hidden_size": 2**20}),
        ("config.json", config | {"num_hidden_layers": 10**7}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}),
        ("modules.json", [{"idx": 0, "name": "0", "path": "", "type": "evil.Evil"}]),
        ("modules.json", [{"idx": 0, "name": "0", "path": "../..", "type": "os.system"}]),
    ]
    for name, content in foreign:
        for command in commands(model):
            yield command, model / name, json.dumps(content).encode()
    files = sorted(p for p in model.rglob("*") if p.is_file() and p.suffix != ".py")
    for number in range(48):
        one = files[number % len(files)]
        text = one.suffix in (".json", ".txt")
        content = (damaged if text else mutated)(one.read_bytes(), rng)
        yield [*commands(model)][number // len(files) % 2], one, content


KINDS: dict[str, tuple[Kind, str]] = {
    "pictures": (
        pictures,
        "pictures (PNG, JPEG, GIF, TIFF, BMP, WebP, PPM) damaged at random, 90 a folder",
    ),
    "tables": (tables, "CSV tables damaged at random"),
    "shards": (shards, ".tar shards damaged at random, half of them with right checksums"),
    "saved": (saved, "Hugging Face folders damaged at random (Arrow and JSON)"),
    "run_folders": (run_folders, "config, metrics, summary and npz of a run folder damaged"),
    "checkpoints": (checkpoints, "checkpoints of others: right checksum, wrong or hostile content"),
    "weights": (weights, "files for `--pretrained` damaged, and pickles that run a command"),
    "texts": (texts, "BEIR folders damaged at random, or with hostile names in place of some"),
    "captions": (captions, "tables of captions damaged at random, or with hostile names"),
    "models": (models, "folders of text models: damaged, too large, with code or pickles in them"),
}


# ------------------------------------------------------------------------------------- trying them


def outside(top: Path) -> dict[str, tuple[int, int]]:
    """What a command must leave alone: all but the run folder and what it was told to write."""
    ours = (top / "run", top / "out", top / "out.html")
    found = {}
    for path in top.rglob("*"):
        if not any(path == own or own in path.parents for own in ours):
            status = path.lstat()
            found[str(path)] = status.st_size, status.st_mtime_ns
    return found


def attempt(command: list[object], top: Path) -> tuple[int, str]:
    words = [
        w for part in command for w in (part.split() if isinstance(part, str) else [str(part)])
    ]
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        status = run(words)
    return status, text.getvalue()


def row(name: str, top: str, every: int = 1) -> tuple[str, int, str, str]:
    """Try the cases of a kind, or one of so many; (fault, times tried, lost, said)."""
    kind, title = KINDS[name]
    base, rng, tried, refused = Path(top), random.Random(name), 0, 0
    backup: dict[Path, bytes] = {}
    for number, (command, file, content) in enumerate(kind(base, rng)):
        if number % every:
            continue
        kept = {p: p.read_bytes() for p in _files(base / "run")} if not backup else backup
        backup = kept
        before = file.read_bytes() if file.exists() else None
        file.write_bytes(content)
        untouched = outside(base)
        status, text = attempt(command, base)
        tried += 1
        refused += status != 0
        shown = f"{command} with {file.name} = {content[:300]!r}\n{text}"
        assert status in (0, 1, 2) and "Traceback" not in text, shown
        assert "NEGCHAIN_DEBUG" not in text or "must be finite" in text, shown  # odd weights
        assert status == 0 or [
            x for x in text.splitlines() if x.startswith(("refused: ", "failed: "))
        ], shown
        assert outside(base) == untouched, shown
        assert not (base / "owned").exists(), shown
        _restore(base, kept)
        if before is None:
            file.unlink()
        else:
            file.write_bytes(before)
    told = f"{refused} refused in a sentence, {tried - refused} read (what is damaged is left out)"
    return title, tried, "nothing written elsewhere, nothing executed", told


def _files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file()] if folder.exists() else []


def _restore(base: Path, kept: dict[Path, bytes]) -> None:
    shutil.rmtree(base / "out", ignore_errors=True)
    for path in _files(base / "run"):
        if path not in kept:
            path.unlink()
    for path, content in kept.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
