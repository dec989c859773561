"""negchain's losses in `SentenceTransformerTrainer` (sentence-transformers 6).

    pairs = index_pairs(dataset, corpus=texts)
    loss_fn = ImportanceLoss(
        len(pairs.anchors), 20.0, views="paired", denominator="all", num_keys=len(pairs.keys)
    )
    loss = PairLoss(model, loss_fn, pairs)
    NegchainTrainer(model=model, args=args, train_dataset=pairs.dataset, loss=loss).train()

Positions travel in the label column. What the loss wants encoded goes through the model's
`preprocess` and `forward`, with the prompt and route of the column it belongs to. The state of the
loss, learned beta included, is in every checkpoint, and `resume_from_checkpoint` restores it.

Shapes: `B` batch, `L` known positives per anchor, `H` hard-negative columns, `D` embedding.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.base.data_collator import BaseDataCollator
from sentence_transformers.base.sampler import BatchSamplers, GroupByLabelBatchSampler
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from negchain.files import replacing
from negchain.integrations.text_pairs import LABEL, Pairs, index_pairs, padded, text_columns
from negchain.losses import ContrastiveLoss, InfoNCELoss
from negchain.losses.batch import as_embedding

__all__ = ["NegchainTrainer", "PairLoss", "Pairs", "index_pairs"]
STATE_NAME = "negchain_loss.pt"
BY_LABEL = (BatchSamplers.GROUP_BY_LABEL, GroupByLabelBatchSampler)


class PairLoss(nn.Module):
    r"""A loss of negchain as sentence-transformers calls one: `loss(features, labels)`.

    With hard-negative columns n_1 ... n_H there is a second term, logged as `hard_negatives` beside
    `contrastive`. A row's known positives are left out of its sum.

    $$ \text{loss_fn} + \tfrac{\text{hard_weight}}{B} \sum_i -\log \frac{e^{\beta s(x_i,y_i)}}
       {e^{\beta s(x_i,y_i)} + \sum_h e^{\beta s(x_i,n_{ih})}} $$

    While evaluating, the first term is the in-batch InfoNCE of the evaluation's own rows. Nothing
    of the training state is read or changed: positions of an evaluation name other texts.

    Args:
        model: the model that is trained.
        loss_fn: the loss, built for `len(pairs.anchors)` samples with `views="paired"` and
            `num_keys=len(pairs.keys)`; or one without a size, such as `InfoNCELoss(None)`.
        pairs: from `index_pairs`.
        hard_weight: factor of the second term.
        chunk: texts per forward pass where nothing is trained: when tables are filled or refreshed.

    Example:
        >>> from datasets import Dataset
        >>> from negchain import EMC2Loss
        >>> from sentence_transformers.sentence_transformer.modules import StaticEmbedding
        >>> from tokenizers import Tokenizer, models
        >>> words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "A": 2, "B": 3, "C": 4}))
        >>> model = SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=4)])
        >>> rows = Dataset.from_dict({"query": ["a", "b"], "answer": ["A", "B"]})
        >>> pairs = index_pairs(rows, corpus=["C"])
        >>> loss_fn = EMC2Loss(2, 10.0, views="paired", num_keys=len(pairs.keys))
        >>> features = [model.preprocess(rows[name][:]) for name in rows.column_names]
        >>> losses = PairLoss(model, loss_fn, pairs)(features, torch.tensor(pairs.positions()))
        >>> losses["contrastive"].backward()
    """

    def __init__(
        self,
        model: SentenceTransformer,
        loss_fn: ContrastiveLoss,
        pairs: Pairs,
        hard_weight: float = 1.0,
        chunk: int = 128,
    ) -> None:
        super().__init__()
        sizes = (loss_fn.num_samples, loss_fn.num_keys or loss_fn.num_samples)
        one_to_one = loss_fn.num_keys is not None or all(a == b for a, b in pairs.positions())
        fits = sizes == (len(pairs.anchors), len(pairs.keys)) and one_to_one
        if loss_fn.num_samples is not None and not fits:
            raise ValueError(
                f"the loss was built for {sizes[0]} anchors and {sizes[1]} keys"
                f"{' that are one-to-one' * (loss_fn.num_keys is None)}, the pairs have "
                f"{len(pairs.anchors)} and {len(pairs.keys)}; build it with "
                "num_samples=len(pairs.anchors), views='paired', num_keys=len(pairs.keys)"
            )
        if loss_fn.rows.ranks is not None:
            raise ValueError(
                "the trainer's checkpoints are written by one rank, and with shard_state=True none "
                "has all of the state; leave it out"
            )
        keys = torch.tensor([key for _, key in pairs.positions()])
        loss_fn.give_key_counts(torch.bincount(keys, minlength=len(pairs.keys)))
        self.anchors_of: dict[int, set[int]] = {}  # that a key is no negative of; -1: padding
        for anchor, own in enumerate([] if pairs.known is None else pairs.known.tolist()):
            for key in own:
                self.anchors_of.setdefault(key, set()).add(anchor)
        self.model = model  # the trainer puts the wrapped one here
        self.loss_fn = loss_fn
        self.pairs = pairs
        self.hard_weight = hard_weight
        self.chunk = chunk
        self.preprocess = model.preprocess
        self.inputs: tuple[dict[str, Any], dict[str, Any]] = ({}, {})  # prompt, task of each tower

    def get_extra_state(self) -> Tensor:  # [4]
        """A hash of the texts that positions name: the state belongs to these."""
        found = sha256()
        for text in (*self.pairs.anchors, "", *self.pairs.keys):
            found.update(sha256(text.encode(errors="surrogatepass")).digest())
        return torch.frombuffer(bytearray(found.digest()), dtype=torch.int64)

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse a state whose positions name other texts."""
        if not torch.equal(state.cpu(), self.get_extra_state()):
            raise ValueError(
                "the checkpoint's positions name other texts, or the same in another order; call "
                "index_pairs with the data set and the corpus as they were (a set has no order); "
                "or start on other data from its weights, SentenceTransformer(checkpoint)"
            )

    def forward(
        self, features: Iterable[dict[str, Tensor]], labels: Tensor | None
    ) -> dict[str, Tensor]:
        """The losses of a batch by name, [] each; the trainer sums and logs them.

        Args:
            features: of every text column, as the collator makes them.
            labels: [B, 2 + H] positions; while evaluating others, or None.
        """
        anchors, positives, *negatives = (self.model(f)["sentence_embedding"] for f in features)
        training = torch.is_grad_enabled()
        value = self._train if training else self._evaluate
        losses = {"contrastive": value(anchors, positives, labels)}
        if negatives:
            losses["hard_negatives"] = self.hard_weight * self._hard(
                anchors, torch.stack([positives, *negatives], 1), labels, training
            )
        return losses

    def _train(self, anchors: Tensor, positives: Tensor, labels: Tensor | None) -> Tensor:
        if labels is None or labels.dim() != 2 or labels.is_floating_point():
            raise ValueError(
                f"the column '{LABEL}' must hold positions, [anchor, key, ...] of integers; "
                "train on index_pairs(dataset).dataset"
            )
        towers = partial(self._encode, 0), partial(self._encode, 1)
        encode = towers if self.loss_fn.views == "paired" else towers[1]
        if len(self.loss_fn.tables) and not int(self.loss_fn.step):
            self._fill()
        index, keys = labels[:, 0], labels[:, 1]
        call = {} if self.loss_fn.num_keys is None else {"key_index": keys}
        if self.pairs.known is not None:
            call["known"] = self.pairs.known.to(index.device)[index]
            if self.loss_fn.num_samples is None and self.loss_fn.symmetric:
                return self._both_ways(anchors, positives, labels, call["known"])
        if self.loss_fn.num_samples is None:
            index = keys  # a loss without a size excludes by one id alone: the key's
        loss: Tensor = self.loss_fn(anchors, positives, index, encode=encode, **call)
        return loss

    def _fill(self) -> None:
        """Encode everything once into the tables, in sight of whoever waits."""
        total = sum(table.size for table in self.loss_fn.tables)
        with tqdm(total=total, desc="filling the table of old embeddings", disable=None) as bar:

            def encode(tower: int, ids: Tensor) -> Tensor:
                bar.update(len(ids))
                return self._encode(tower, ids)

            towers = partial(encode, 0), partial(encode, 1)
            self.loss_fn.fill(towers if self.loss_fn.views == "paired" else towers[1], self.chunk)

    def _both_ways(
        self, anchors: Tensor, positives: Tensor, labels: Tensor, known: Tensor
    ) -> Tensor:
        """A loss without a size, where anchors have several keys: both directions know them.

        The anchors of a key are no negatives of it. With paired views each direction is a call of
        its own, with the positions of its columns. Shared views have all columns in one call: two
        rows whose keys share an anchor are no negatives of each other there.
        """
        loss_fn, (index, keys) = self.loss_fn, labels.T[:2]
        asked = [self.anchors_of[key] for key in keys.tolist()]
        if loss_fn.views == "shared":
            assert self.pairs.known is not None
            near = [sorted(set(self.pairs.known[[*own]].flatten().tolist())) for own in asked]
            return loss_fn(anchors, positives, keys, known=padded(near).to(index.device))
        if loss_fn.ranks() is None:  # those that are here will do: a key may have thousands
            asked = [own.intersection(index.tolist()) for own in asked]
        of_keys = padded(asked).to(index.device)
        back = loss_fn(positives, anchors, index, known=of_keys, one_way=True)
        return (loss_fn(anchors, positives, keys, known=known, one_way=True) + back) / 2

    def _evaluate(self, anchors: Tensor, positives: Tensor, labels: Tensor | None) -> Tensor:
        own = self.loss_fn
        settings = {"views": own.views, "symmetric": own.symmetric, "normalize": own.normalize}
        in_batch = InfoNCELoss(None, float(own.beta), **settings)  # type: ignore[arg-type]
        keys = labels[:, 1] if labels is not None and labels.dim() == 2 else None
        return in_batch(anchors, positives, keys)

    def _hard(self, anchors: Tensor, keys: Tensor, labels: Tensor | None, training: bool) -> Tensor:
        """Cross-entropy of the first of each row's keys [B, 1 + H, D]; its positives left out."""
        anchors, keys = (as_embedding(z, self.loss_fn.normalize) for z in (anchors, keys))
        logits = torch.einsum("bd,bhd->bh", anchors, keys) * self.loss_fn.beta
        width = 1 + keys.shape[1]  # a column that was left out still has its position
        if labels is not None and labels.dim() == 2 and labels.shape[1] >= width:
            positives = labels[:, 1:2]
            if training and self.pairs.known is not None:
                positives = self.pairs.known.to(labels.device)[labels[:, 0]]
            taken = (labels[:, 2:width, None] == positives[:, None]).any(2)
            logits[:, 1:] = logits[:, 1:].masked_fill(taken, -torch.inf)
        return cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long).to(logits.device))

    def _encode(self, tower: int, ids: Tensor) -> Tensor:
        """Embeddings [R, D] of positions [R] among the anchors (tower 0) or the keys (1)."""
        texts = self.pairs.keys if tower else self.pairs.anchors
        wanted = [texts[position] for position in ids.tolist()]
        step = len(wanted) if torch.is_grad_enabled() else self.chunk
        parts = []
        for begin in range(0, len(wanted), step):
            # a plain dict: DDP looks for the tensors of what comes back, and not in others
            features = dict(self.preprocess(wanted[begin : begin + step], **self.inputs[tower]))
            if task := self.inputs[tower].get("task"):
                features["task"] = task
            found = self.model(batch_to_device(features, ids.device))["sentence_embedding"]
            parts.append(found.float() if not torch.is_grad_enabled() else found)
        return torch.cat(parts)


class NegchainTrainer(SentenceTransformerTrainer):  # type: ignore[misc]
    """`SentenceTransformerTrainer` whose checkpoints hold the state of its losses.

    It is called as theirs is. `loss` is a `PairLoss`, a loss of sentence-transformers, or a dict of
    either by data set. What a `PairLoss` reports (`loss_fn.info`) is logged with its value.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._first: dict[str, dict[str, Tensor]] = {}  # states of the losses, for model_init
        self._stepped = True  # gradients of the losses' own parameters are used up
        super().__init__(*args, **settings)
        if self.model_init is not None:
            self._first = deepcopy(self._states())
        ours = any(isinstance(loss, PairLoss) for loss in self._losses().values())
        alone = self.args.world_size == 1 or self.accelerator.split_batches
        if ours and isinstance(self.loss, dict) and not alone:
            raise ValueError(
                "with a loss per data set all processes must have the same data set in a step, "
                "and each gets batches of its own; set accelerator_config={'split_batches': True}, "
                "and per_device_train_batch_size to the rows of all processes together"
            )
        given = self.train_dataset
        sets = given if isinstance(given, dict) else {"": given}
        for name, loss in self._losses().items():
            if isinstance(loss, PairLoss):
                own = {k: rows for k, rows in sets.items() if rows is not None and name in ("", k)}
                own = own or {name: loss.pairs.dataset}
                for rows in own.values():
                    loss.pairs.check(rows)
                loss.inputs = self._inputs(own)
                if self.args.batch_sampler in BY_LABEL:
                    raise ValueError(
                        f"batch_sampler='group_by_label' groups rows by the column '{LABEL}', "
                        "where PairLoss has positions; use 'batch_sampler' or 'no_duplicates'"
                    )
            elif any(isinstance(inner, PairLoss) for inner in loss.modules()):
                raise ValueError(
                    "PairLoss must be the loss of a data set itself, and is inside "
                    f"{type(loss).__name__} here: that calls it several times a batch with the "
                    "texts encoded for the first, and each call draws texts of its own; give that "
                    "one a data set of its own, around a loss of sentence-transformers, beside "
                    "PairLoss: loss={'a': PairLoss(...), 'b': MatryoshkaLoss(...)}"
                )

    def _losses(self) -> dict[str, nn.Module]:
        return self.loss if isinstance(self.loss, dict) else {"": self.loss}

    def _states(self) -> dict[str, dict[str, Tensor]]:
        """Of each loss what it has beside the model."""
        return {
            name: {k: v for k, v in loss.state_dict().items() if not k.startswith("model.")}
            for name, loss in self._losses().items()
        }

    def call_model_init(self, *args: Any, **settings: Any) -> SentenceTransformer:
        """Theirs; with the new model (of a trial, say) the losses begin anew."""
        model: SentenceTransformer = super().call_model_init(*args, **settings)
        for name, state in self._first.items():
            self._losses()[name].load_state_dict(state, strict=False)
        return model

    def training_step(self, *args: Any, **settings: Any) -> Tensor:
        """Theirs; the gradient of a learned beta is no part of the model, for which both care.

        Before sentence-transformers 6.2 nobody sets it to zero after a step. DDP does not see it:
        ranks average it here.
        """
        own = [
            weight
            for loss in self._losses().values()
            for name, weight in loss.named_parameters()
            if not name.startswith("model.")
        ]
        if self._stepped:
            for weight in own:
                weight.grad = None
        value: Tensor = super().training_step(*args, **settings)
        self._stepped = self.accelerator.sync_gradients
        if self.args.world_size > 1:
            for weight in own:
                if weight.grad is not None:
                    weight.grad = self.accelerator.reduce(weight.grad, "mean")
        return value

    def _inputs(self, sets: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Prompt and route of anchors and of keys, as the collator has them for these data sets."""
        own = self.data_collator
        if not isinstance(own, BaseDataCollator):  # the user's: theirs has the rules of prompts
            own = self.get_data_collator(self.model, self.args)
        found = []
        for name, rows in sets.items():
            batch = {"dataset_name": name} if name else {}
            prompts, routes = own._resolve_prompts(batch), own._resolve_router_mapping(batch)
            columns = text_columns(next(iter(rows)))
            pair = [
                {
                    "prompt": own._get_prompt_for_column(prompts, column),
                    "task": own._get_task_for_column(column, number, routes),
                }
                for number, column in enumerate(columns[:2])
            ]
            found.append([{k: v for k, v in each.items() if v is not None} for each in pair])
        if any(pair != found[0] for pair in found):
            raise ValueError(
                f"one PairLoss serves the data sets {', '.join(sets)}, whose prompts or routes "
                "differ, and cannot tell which a drawn text belongs to; give each a loss of its own"
            )
        return found[0][0], found[0][1]

    def log(self, logs: dict[str, float], *args: Any, **settings: Any) -> None:
        """Theirs, with what the losses report in every line about training."""
        if "loss" in logs:
            for name, loss in self._losses().items():
                if isinstance(loss, PairLoss):
                    prefix = f"{name}_" if name else ""
                    logs = {**logs, **{prefix + k: v for k, v in loss.loss_fn.info.items()}}
        super().log(logs, *args, **settings)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            with replacing(Path(output_dir) / STATE_NAME) as file:
                torch.save(self._states(), file)

    def _checkpoint_push_skip_names(self, checkpoint_folder: str) -> set[str]:
        """Theirs, of what is not uploaded beside the weights: the losses' state is no model."""
        return {*super()._checkpoint_push_skip_names(checkpoint_folder), STATE_NAME}

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint) / STATE_NAME
        if not path.is_file():
            raise ValueError(
                f"{checkpoint} holds no state of the loss ({STATE_NAME}): by another trainer, with "
                "save_only_model, or interrupted while writing; resume from another checkpoint, or "
                "start from its weights with SentenceTransformer(checkpoint)"
            )
        states = torch.load(path, map_location="cpu", weights_only=True)
        for name, loss in self._losses().items():
            if name not in states:
                raise ValueError(
                    f"{path} holds the losses of {list(states)}, and none of '{name}'; name the "
                    "data sets as they were when the checkpoint was written"
                )
            result = loss.load_state_dict(states[name], strict=False)
            lost = [key for key in result.missing_keys if not key.startswith("model.")]
            if lost or result.unexpected_keys:
                raise ValueError(
                    f"{path} is the state of another loss ({', '.join(lost[:3])} missing); build "
                    "the loss as it was built when the checkpoint was written"
                )
