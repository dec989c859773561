"""Text encoders from a folder on this machine: nothing is ever fetched, nothing in it is run.

Shapes: `N` texts, `R` of them in a pass, `T` tokens, `D` embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from negchain.encoders import refuse_weights
from negchain.files import read_object
from negchain.printable import reason
from negchain.tasks.checks import check_model_folder
from negchain.train.presets import ConfigError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Role = Literal["query", "document"]
Tokens = dict[str, Any]  # what a sentence-transformers model takes, and "role"

PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""Names under which models keep what stands before a text, as in their `encode_query`."""
CHUNK = 1024  # texts tokenised at a time
PASS = 256  # texts encoded at a time where no gradient is kept
MAX_TOKENS = 77
"""Tokens a caption is cut to: CLIP's."""
MOST_LAYERS = 1000
"""A description that asks for more is refused."""
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


@contextmanager
def explained(option: str, folder: str) -> Iterator[None]:
    """Turn any error that a library raises for a model's folder into a refusal."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{option} {folder} must hold a model that transformers can load and run, but "
            f"{reason(error)}; restore the folder or name another"
        ) from error


def _check_sizes(folder: str) -> None:
    """Refuse a config that asks for more weights than the files hold.

    Libraries make up missing weights, of any size. Files may be packed, eightfold at most.
    """
    files = [file.resolve() for file in Path(folder).rglob("*") if file.is_file()]
    for file in Path(folder).rglob("config.json"):
        if "model_type" in (config := read_object(file.resolve())):
            refuse_larger(config, 8 * sum(found.stat().st_size for found in files))


def _fresh(**config: Any) -> nn.Module:
    """A transformers model of a config, with fresh weights."""
    from transformers import AutoConfig, AutoModel

    made: nn.Module = AutoModel.from_config(AutoConfig.for_model(**config))  # type: ignore[no-untyped-call,unused-ignore]
    return made


def refuse_larger(
    described: Mapping[str, Any], num_bytes: int, build: Callable[..., nn.Module] = _fresh
) -> None:
    """Refuse a config whose weights cannot be in a file of so many bytes, before it is built.

    Others may have written the file. On torch's meta device a model takes no memory. `build` makes
    a model of the config's entries.

    >>> refuse_larger({"in_features": 1000, "out_features": 1000}, 1000, nn.Linear)
    Traceback (most recent call last):
    ValueError: this model has 3 MB of weights and the file has 0 MB
    """
    if found := [n for n in _layers(described) if n > MOST_LAYERS]:  # they take too long
        raise ValueError(f"layers must be at most {MOST_LAYERS}, got {found[0]}")
    with torch.device("meta"):
        model = build(**described)
    refuse_weights(model, f"this {described.get('model_type', 'model')}", num_bytes)


def _layers(described: Mapping[str, Any]) -> list[int]:
    """Every number of layers in a config, those of its parts too."""
    found = list[int]()
    for name, value in described.items():
        if isinstance(value, Mapping):
            found += _layers(value)
        elif "layer" in name or "depth" in name:
            found += [n for n in (value if isinstance(value, list) else [value]) if type(n) is int]
    return found


class TextEncoder(nn.Module):
    """The model of a folder, which is never fetched from anywhere else.

    Args:
        folder: of a sentence-transformers model, or of a transformers model, which gets mean
            pooling (last token, where it is a causal one).
        max_length: tokens of a text that it sees, at most what the model allows.
        dim: beside another tower, width of a projection to their common space. Dropout is then off:
            one text has one embedding in a step, whichever part of the loss asks for it.
    """

    compiles = False
    """Models of transformers are run as they are: their own code breaks what is compiled."""

    def __init__(self, folder: str, max_length: int, dim: int | None = None) -> None:
        super().__init__()
        option = "--encoder" if dim is None else "--text-encoder"
        with explained(option, folder):
            self.model = load_model(folder, option)
            if type(self.model[0]).__name__ == "StaticEmbedding":
                raise ValueError("its first module, StaticEmbedding, is no transformer")
            allowed = self.model.max_seq_length
            self.model.max_seq_length = min(max_length, allowed) if allowed else max_length
            width = int(self.model.get_embedding_dimension())
            check_words(self.model.tokenizer)
        self.encoder_config = {"folder": folder, "max_length": max_length, "dim": dim}
        self.embedding_dim, self.project = dim or width, None
        if dim is not None:
            if type(self.model[-1]).__name__ == "Normalize":
                del self.model[-1]  # the loss normalises
            self.project = nn.Linear(width, dim, bias=False)

    @classmethod
    def rebuilt(cls, described: Mapping[str, Any]) -> TextEncoder:
        """The encoder an `encoder_config` describes."""
        return cls(described["folder"], described["max_length"], described.get("dim"))

    def train(self, mode: bool = True) -> TextEncoder:
        """Set the mode; beside another tower the model stays in eval mode, without dropout."""
        super().train(mode)
        if self.project is not None:
            self.model.eval()
        return self

    @staticmethod
    def refuse_larger(described: Mapping[str, Any], num_bytes: int) -> None:
        """See the function `refuse_larger`; the file names the folder as well."""
        file = Path(described.get("folder") or described["name"], "config.json").resolve()
        config = read_object(file) if file.is_file() else {}
        if "model_type" in config:
            refuse_larger(config, num_bytes)

    def forward(self, tokens: Mapping[str, Any]) -> Tensor:  # -> [R, D]
        """Embeddings; a model with routes uses that of the role."""
        count = len(tokens["input_ids"])
        size = count if torch.is_grad_enabled() else PASS
        begins = range(0, count, size)
        return torch.cat([self._pass(tokens, slice(begin, begin + size)) for begin in begins])

    def _pass(self, tokens: Mapping[str, Any], part: slice) -> Tensor:
        given = {k: v[part] if isinstance(v, Tensor) else v for k, v in tokens.items()}
        if self.project is None:
            embeddings: Tensor = self.model(given, task=given.pop("role"))["sentence_embedding"]
            return embeddings
        mask = given["attention_mask"]
        # Padding beyond the longest is not computed; a GPU is not asked for its length.
        longest = mask.shape[1] if mask.is_cuda else int(mask.sum(1).max())
        given = {name: table[:, :longest].long() for name, table in given.items()}
        return self.project(self.model(given)["sentence_embedding"])  # type: ignore[no-any-return]


def load_model(folder: str, option: str) -> SentenceTransformer:
    """The model of a folder, float32, on the CPU."""
    from sentence_transformers import SentenceTransformer
    from transformers.utils.logging import disable_progress_bar

    check_model_folder(folder, option)
    disable_progress_bar()  # the tool shows its own
    _check_sizes(folder)
    return SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": torch.float32}, **LOCAL)


def check_words(tokenizer: Any) -> None:
    """Refuse a tokenizer without words, which transformers makes up where its file is missing."""
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError(
            "its tokenizer knows no words (tokenizer.json, vocab.txt: is one missing?)"
        )


def hardest(lengths: Tensor, largest: Tensor) -> Tensor:
    """Places of the longest text, of the one with the largest token and of the shortest, of N.

    A model that can encode these three, padding included, can encode all. They are tried before the
    first step, because the files of a folder may not suit each other.
    """
    return torch.stack([lengths.argmax(), largest.argmax(), lengths.argmin()])


class Texts:
    """Many texts as token ids: kept ragged in memory, padded when a pass needs them.

    Args:
        encoder: whose tokeniser, prompts and length limit count.
        texts: N of them.
        role: queries and documents may have prompts of their own.
        told: hears of how many texts were added to those done.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        texts: Sequence[str],
        role: Role,
        told: Callable[[int], None] = lambda count: None,
    ) -> None:
        model, self.role = encoder.model, role
        names = (*PROMPTS[role], model.default_prompt_name)
        prompt = next((model.prompts[name] for name in names if name in model.prompts), None)
        tokenizer: Any = model.tokenizer
        self.left = tokenizer.padding_side == "left"
        self.padding = tokenizer.pad_token_id or 0
        self.rows: list[np.ndarray] = []
        self.more: Tokens = {}  # the length of a prompt that pooling leaves out
        for begin in range(0, len(texts), CHUNK):
            found = model.preprocess(list(texts[begin : begin + CHUNK]), prompt=prompt, task=role)
            ids, mask = found["input_ids"].numpy().astype(np.int32), found["attention_mask"].numpy()
            self.rows += [row[m > 0] for row, m in zip(ids, mask, strict=True)]
            told(len(ids))
            self.more = {k: v for k, v in found.items() if not isinstance(v, Tensor)}
        self.lengths = torch.tensor([len(row) for row in self.rows], dtype=torch.int64)
        self.padded: tuple[Tensor, Tensor] | None = None  # see `pad`
        if self.rows:
            largest = torch.tensor([row.max(initial=0) for row in self.rows])
            with torch.no_grad():
                encoder(self.tokens(hardest(self.lengths, largest), model.device))

    def __len__(self) -> int:
        return len(self.rows)

    def tokens(self, places: Tensor, device: torch.device) -> Tokens:  # [R] -> ids, mask [R, T]
        """What the encoder takes for the texts at some places, as long as the longest of them.

        Places on the device of `pad` get the one length it made; the host does not read them.
        """
        if self.padded is not None and self.padded[0].device == places.device:
            ids, mask = (table[places].long() for table in self.padded)
        else:
            ids, mask = self._joined([self.rows[place] for place in places.tolist()])
        both = {"input_ids": ids, "attention_mask": mask}
        moved = {name: value.to(device, non_blocking=True) for name, value in both.items()}
        return {**moved, **self.more, "role": self.role}

    def pad(self, device: torch.device) -> None:
        """Keep all texts on a device too, padded to the longest: every pass has one shape."""
        ids, mask = self._joined(self.rows, np.int32)
        self.padded = ids.to(device), mask.bool().to(device)

    def stand_padding(self, encoder: TextEncoder) -> bool:
        """Whether the shortest texts keep their embeddings when padded to the longest.

        They do not where an encoder counts positions from the padding on, or mixes padding in.
        """
        _, first = np.unique([len(row) for row in self.rows], return_index=True)
        some, device = torch.from_numpy(first[:4]), encoder.model.device  # one may be a mere prompt
        alone = torch.cat([encoder(self.tokens(place, device)) for place in torch.split(some, 1)])
        beside = encoder(self.tokens(torch.from_numpy(np.append(first[:4], first[-1])), device))
        apart, size = (alone - beside[: len(some)]).norm(dim=1), alone.norm(dim=1)
        return bool((apart <= 1e-2 * size).all())

    def _joined(self, rows: Sequence[np.ndarray], dtype: Any = np.int64) -> tuple[Tensor, Tensor]:
        longest = max([1, *map(len, rows)])  # models refuse a pass of empty texts without padding
        ids = np.full((len(rows), longest), self.padding, dtype=dtype)
        mask = np.zeros_like(ids)
        for number, row in enumerate(rows):
            part = slice(longest - len(row), None) if self.left else slice(len(row))
            ids[number, part], mask[number, part] = row, 1
        return torch.from_numpy(ids), torch.from_numpy(mask)


@torch.no_grad()
def try_out(tower: nn.Module, tokens: Mapping[str, Tensor]) -> None:
    """Let a tower on the CPU encode the hardest of some texts."""
    hard = hardest(tokens["attention_mask"].sum(1), tokens["input_ids"].amax(1))
    tower({name: table[hard].cpu() for name, table in tokens.items()})


def tokenise(folder: str, texts: Sequence[str]) -> tuple[dict[str, Tensor], int]:
    """Tokens of all texts for the model of a folder, int32 [texts,L], and how many fill the limit.

    These are captions beside another tower, without prompts; see `Texts` for the others.
    """
    with explained("--text-encoder", folder):
        check_model_folder(folder, "--text-encoder")
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right", **LOCAL)
        check_words(tokenizer)
        limit = min(MAX_TOKENS, tokenizer.model_max_length)
        found = tokenizer(
            list(texts), truncation=True, max_length=limit, padding=True, return_tensors="pt"
        )
    names = [n for n in ("input_ids", "attention_mask", "token_type_ids") if n in found]
    cut = int((found["attention_mask"].sum(1) >= limit).sum())
    return {name: found[name].int() for name in names}, cut
