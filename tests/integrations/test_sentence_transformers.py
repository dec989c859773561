"""Inside SentenceTransformerTrainer: exact resume, prompts, hard negatives, evaluation."""

from __future__ import annotations

import doctest
import math
import os
import signal
import traceback
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a test forks

from datasets import Dataset, DatasetDict  # noqa: E402
from framework_play import assert_same, load, snapshot  # noqa: E402
from sentence_transformers import (  # noqa: E402
    SentenceTransformer,
    SentenceTransformerTrainingArguments,
    __version__,
)
from sentence_transformers.base.sampler import GroupByLabelBatchSampler  # noqa: E402
from sentence_transformers.sentence_transformer import losses as st_losses  # noqa: E402
from sentence_transformers.sentence_transformer.data_collator import (  # noqa: E402
    SentenceTransformerDataCollator,
)
from sentence_transformers.sentence_transformer.losses import (  # noqa: E402
    MultipleNegativesRankingLoss,
)
from transformers import BertConfig, BertModel, BertTokenizerFast  # noqa: E402

from negchain import EMC2Loss, ImportanceLoss, InfoNCELoss, Informed  # noqa: E402
from negchain.integrations import sentence_transformers as ours  # noqa: E402
from negchain.integrations import text_pairs  # noqa: E402
from negchain.integrations.sentence_transformers import (  # noqa: E402
    STATE_NAME,
    NegchainTrainer,
    PairLoss,
    index_pairs,
)

NUM, STEPS = 24, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny BERT with random weights, dropout included."""
    path = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(80))]
    tokenizer = BertTokenizerFast(vocab={w: i for i, w in enumerate(words)}, model_max_length=16)
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(path)
    return path


def texts(hard: bool = False) -> Dataset:
    """w1 -> w1 w41, ...; three queries have a second positive; the corpus has more."""
    queries = [f"w{i}" for i in range(NUM)] + ["w0", "w1", "w2"]
    answers = [f"w{i} w{i + 40}" for i in range(NUM)] + ["w50 w60", "w51 w61", "w52 w62"]
    columns = {"query": queries, "answer": answers}
    if hard:
        columns["negative"] = [f"w{i % 80} w3" for i in range(len(queries))]
    return Dataset.from_dict(columns)


def importance(pairs, **more):
    return ImportanceLoss(
        len(pairs.anchors),
        torch.nn.Parameter(torch.tensor(10.0)),
        Informed(num=4, alone=True, refresh=0.1),
        views="paired",
        denominator="all",
        num_keys=len(pairs.keys),
        **more,
    )


def emc2(pairs):
    return EMC2Loss(
        len(pairs.anchors), 10.0, "isir", proposals=Informed(4), views="paired",
        num_keys=len(pairs.keys),
    )  # fmt: skip


def trainer(folder: Path, out: Path, build=importance, hard: bool = False, **settings):
    torch.manual_seed(0)
    pairs = index_pairs(texts(hard), corpus=[f"w{i} w77" for i in range(10)])
    model = SentenceTransformer(str(folder), device="cpu")
    args = SentenceTransformerTrainingArguments(
        output_dir=str(out),
        **{
            "max_steps": 2 * STEPS,
            "save_steps": STEPS,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "seed": 5,
            **settings,
        },
    )
    loss = PairLoss(model, build(pairs), pairs)
    return NegchainTrainer(model=model, args=args, train_dataset=pairs.dataset, loss=loss)


def in_child(work) -> int:
    """Run in a fork: what takes seconds to import is there already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads
        child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def killed_after_checkpoint(folder: Path, out: Path, build) -> None:
    """Train in a child that gets SIGKILL in the step after the checkpoint."""

    def work() -> None:
        made = trainer(folder, out, build)
        plain = made.training_step

        def step(*args, **more):
            if made.state.global_step > STEPS:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **more)

        made.training_step = step
        made.train()

    assert os.WTERMSIG(os.waitpid(in_child(work), 0)[1]) == signal.SIGKILL


def in_processes(work, world: int) -> None:
    """Run `work(rank)` in forks that find each other as torchrun's processes do."""

    def rank(number: int) -> None:
        port = 20000 + os.getppid() % 20000
        os.environ.update(RANK=f"{number}", LOCAL_RANK=f"{number}", WORLD_SIZE=f"{world}")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")
        work(number)

    children = [in_child(partial(rank, number)) for number in range(world)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * world


def in_batch(pairs):
    return InfoNCELoss(None, torch.nn.Parameter(torch.tensor(10.0)), views="paired")


@pytest.mark.parametrize(
    ("world", "build"),
    [
        (2, importance),
        pytest.param(4, importance, marks=pytest.mark.slow),
        pytest.param(2, in_batch, marks=pytest.mark.slow),
    ],
)
def test_processes_take_the_step_of_one(folder, tmp_path, world, build) -> None:
    """Gloo, DDP, float64: after SGD weights and beta are one process's that had the whole batch.

    So the loss is neither multiplied by the number of ranks nor divided by it, and every forward
    pass of the model is one DDP knows of.
    """

    def trained(out: Path, size: int, **more) -> NegchainTrainer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = trainer(
                folder, out, build, hard=True, max_steps=2, save_strategy="no", optim="sgd",
                lr_scheduler_type="constant", learning_rate=1e-1, max_grad_norm=0.0,
                per_device_train_batch_size=size, **more,
            )  # fmt: skip
            for module in made.model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            made.loss.double()
            made.train()
        assert int(made.loss.loss_fn.step) == (0 if build is in_batch else 2)
        return made

    def rank(number: int) -> None:
        made = trained(tmp_path, 8 // world, ddp_backend="gloo")
        assert made.args.world_size == world
        torch.save(snapshot(made.loss), tmp_path / f"{number}.pt")

    in_processes(rank, world)
    first, *others = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in range(world))
    for other in others:
        assert_same(first, other)
    one = snapshot(trained(tmp_path / "one", 8).loss)
    first = {k.replace("module.", ""): v for k, v in first.items()}
    assert_same(first, one, atol=1e-6)  # the table is in float32
    exact = [k for k, v in one.items() if v.dtype == torch.float64]
    assert any("beta" in k for k in exact) and len(exact) > 10
    # not to the last bit: a row of the table may be rounded the other way, and q with it
    assert_same({k: first[k] for k in exact}, {k: one[k] for k in exact}, atol=1e-9)


@pytest.mark.parametrize("sampler", ["round_robin", "proportional"])
def test_with_a_loss_per_data_set_processes_have_the_same_one(folder, tmp_path, sampler) -> None:
    """Each had batches of its own: rows of two data sets were joined as if they were of one."""

    def made(**settings) -> tuple[NegchainTrainer, list[str]]:
        own = trainer(
            folder, tmp_path, max_steps=4, save_strategy="no", ddp_backend="gloo",
            per_device_train_batch_size=8, multi_dataset_batch_sampler=sampler, **settings,
        )  # fmt: skip
        other, order = PairLoss(own.model, importance(own.loss.pairs), own.loss.pairs), []
        both = {"a": own.loss, "b": other}
        for name, loss in both.items():
            loss.register_forward_pre_hook(lambda *_, name=name: order.append(name))
        data = {name: own.loss.pairs.dataset.select(range(16)) for name in both}
        return NegchainTrainer(own.model, own.args, data, loss=both), order

    def rank(number: int) -> None:
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="same data set in a step, .*'split_batches'"):
            made()
        own, order = made(accelerator_config={"split_batches": True})
        own.train()
        Path(tmp_path / f"{number}.txt").write_text(" ".join(order))

    in_processes(rank, 2)
    first, second = ((tmp_path / f"{number}.txt").read_text() for number in range(2))
    assert first == second and sorted(first.split()) == ["a", "a", "b", "b"]


def test_a_new_model_finds_new_losses(folder, tmp_path) -> None:
    """Every trial of a search builds a model; chains, tables and beta were the last one's."""
    pairs = index_pairs(texts(), corpus=[f"w{i} w77" for i in range(10)])

    def new_model(*_) -> SentenceTransformer:
        torch.manual_seed(0)
        return SentenceTransformer(str(folder), device="cpu")

    args = replace(trainer(folder, tmp_path).args, max_steps=2, save_strategy="no")
    made = NegchainTrainer(
        args=args, model_init=new_model, train_dataset=pairs.dataset,
        loss=lambda model: PairLoss(model, importance(pairs), pairs),
    )  # fmt: skip
    found = []
    for _ in range(2):
        made.train()
        found.append(snapshot(made.loss))
    assert int(made.loss.loss_fn.step) == 2
    assert_same(*found)


def test_the_losses_state_is_not_uploaded_with_the_weights(folder, tmp_path) -> None:
    """With hub_strategy='every_save' all of a checkpoint is, but for the names told here."""
    made = trainer(folder, tmp_path, max_steps=1, save_steps=1)
    made.train()
    saved = tmp_path / "checkpoint-1"
    kept = made._checkpoint_push_skip_names(str(saved))
    assert (saved / STATE_NAME).is_file() and {STATE_NAME, "optimizer.pt"} <= kept


@pytest.mark.parametrize("build", [importance, emc2])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(folder, tmp_path, build) -> None:
    """k + k steps are 2k steps: weights, learned beta, tables, chains, dropout, data order."""
    whole = trainer(folder, tmp_path / "whole", build, save_strategy="no")
    begin = snapshot(whole.loss)
    whole.train()
    killed_after_checkpoint(folder, tmp_path / "killed", build)
    saved = tmp_path / "killed" / f"checkpoint-{STEPS}"
    assert (saved / STATE_NAME).is_file()
    second = trainer(folder, tmp_path / "killed", build)
    second.train(resume_from_checkpoint=True)
    assert_same(snapshot(whole.loss), snapshot(second.loss), atol=1e-6)
    assert int(second.loss.loss_fn.step) == 2 * STEPS
    if build is importance:
        assert not torch.equal(begin["loss_fn.beta"], snapshot(whole.loss)["loss_fn.beta"])
    (saved / STATE_NAME).unlink()
    with pytest.raises(ValueError, match="no state of the loss"):
        trainer(folder, tmp_path / "killed", build).train(resume_from_checkpoint=str(saved))


def test_hard_negatives_samplers_accumulation_and_bf16(folder, tmp_path) -> None:
    made = trainer(
        folder, tmp_path, hard=True, max_steps=2, batch_sampler="no_duplicates",
        gradient_accumulation_steps=2, bf16=True, save_strategy="no",
        prompts={"query": "w70", "answer": "w71"},
    )  # fmt: skip
    assert made.loss.inputs == ({"prompt": "w70"}, {"prompt": "w71"})
    made.train()
    line = made.state.log_history[0]
    total = line["contrastive"] + line["hard_negatives"]
    assert line["loss"] == pytest.approx(total, abs=2e-3)
    assert {"effective_negatives", "global_loss_low"} <= line.keys()
    assert int(made.loss.loss_fn.step) == 4  # every micro-batch is a step


@pytest.mark.parametrize("accumulated", [1, 2])
def test_beta_forgets_the_gradient_of_the_step_before(folder, tmp_path, accumulated) -> None:
    """Before 6.2 theirs clears the model's gradients alone, and beta's grew from step to step."""
    found = []
    for old in (False, True):
        made = trainer(
            folder, tmp_path, max_steps=3, save_strategy="no",
            gradient_accumulation_steps=accumulated,
        )  # fmt: skip
        kept = made.callback_handler.callbacks
        if old:
            kept[:] = [c for c in kept if type(c).__name__ != "_OptimizerZeroGradCallback"]
        made.train()
        found.append(snapshot(made.loss))
    assert_same(*found)


def test_a_table_is_filled_in_sight(folder, tmp_path, monkeypatch) -> None:
    """A corpus takes minutes before the first step; it looked like a hang."""
    seen = []

    class Bar:
        def __init__(self, total, **words) -> None:
            seen.append(total)

        def __enter__(self):
            return self

        def __exit__(self, *error) -> None:
            pass

        def update(self, count) -> None:
            seen.append(-count)

    monkeypatch.setattr("negchain.integrations.sentence_transformers.tqdm", Bar)
    made = trainer(folder, tmp_path, max_steps=1, save_strategy="no")
    made.train()
    assert seen[0] == len(made.loss.pairs.keys) and sum(seen) == 0


@pytest.mark.parametrize("sampler", ["batch_sampler", "no_duplicates"])
def test_positions_are_those_of_the_texts(folder, tmp_path, sampler) -> None:
    """Whatever the order: anchors, keys, all positives of each; and the table is full."""
    made = trainer(folder, tmp_path, max_steps=7, save_strategy="no", batch_sampler=sampler)
    loss, pairs, decode = made.loss, made.loss.pairs, made.model.tokenizer.batch_decode
    outer, inner, texts, calls = loss.forward, loss.loss_fn.forward, [], []

    def read(features, labels):
        features = list(features)
        texts.append([decode(f["input_ids"], skip_special_tokens=True) for f in features])
        return outer(features, labels)

    def called(z_a, z_b, index, **told):
        assert loss.loss_fn.tables[0].embeddings.any(1).all()
        calls.append((index, told["key_index"], told["known"]))
        return inner(z_a, z_b, index, **told)

    loss.forward, loss.loss_fn.forward = read, called
    made.train()
    answers: dict[str, set[str]] = {}
    for query, answer in zip(pairs.dataset["query"], pairs.dataset["answer"], strict=True):
        answers.setdefault(query, set()).add(answer)
    assert len(calls) == len(texts) == 7
    for (index, keys, known), (queries, positives) in zip(calls, texts, strict=True):
        assert [pairs.anchors[i] for i in index.tolist()] == queries
        assert [pairs.keys[i] for i in keys.tolist()] == positives
        for query, row in zip(queries, known.tolist(), strict=True):
            assert {pairs.keys[k] for k in row if k >= 0} == answers[query]


@pytest.mark.parametrize("given", [False, True])
def test_keys_are_as_likely_as_they_are_among_the_rows(folder, tmp_path, given) -> None:
    """A pass shows every row, more than one per anchor: counted on the way, q was too large."""
    counts = torch.arange(NUM + 13) + 1
    more = {"key_counts": counts} if given else {}
    made = trainer(folder, tmp_path, lambda p: importance(p, **more), save_strategy="no")
    keys = torch.tensor([label[1] for label in made.loss.pairs.dataset["label"]])
    counts = counts if given else torch.bincount(keys, minlength=NUM + 13)
    made.train()
    assert torch.equal(made.loss.loss_fn.key_counts, torch.cat([counts, counts.sum()[None]]))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("cached", ["", "Cached"])
def test_in_batch_is_their_ranking_loss(folder, symmetric, cached) -> None:
    """Value and gradient, where no text comes twice; hard-negative columns are another term."""
    columns = {"q": [f"w{i}" for i in range(6)], "a": [f"w{i + 20} w{i + 40}" for i in range(6)]}
    pairs = index_pairs(Dataset.from_dict(columns))
    model = SentenceTransformer(str(folder), device="cpu").double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    ranking = getattr(st_losses, f"{cached}MultipleNegativesRankingLoss")
    ways = ("query_to_doc", "doc_to_query")[: 1 + symmetric]
    theirs = ranking(model, scale=20.0, directions=ways, partition_mode="per_direction")
    in_batch = InfoNCELoss(None, 20.0, views="paired", symmetric=symmetric)
    found = []
    for loss in (PairLoss(model, in_batch, pairs), theirs):
        features = [model.preprocess(texts) for texts in columns.values()]
        value = loss(features, torch.tensor(pairs.positions()))
        value = value["contrastive"] if isinstance(value, dict) else value
        model.zero_grad()
        value.backward()
        gradient = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append((value.detach(), gradient))
    loose = cached and __version__.startswith("6.0.")  # by 2e-6; 6.2 is not
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if loose else {}
    torch.testing.assert_close(*found, **tolerance)


def test_hard_negatives_by_hand(folder) -> None:
    """Each row against its own, weighed; one that is a known positive is left out."""
    columns = {"q": ["w1", "w1", "w2"], "a": ["w5", "w6", "w7"], "n": ["w6", "w9", "w8"]}
    pairs = index_pairs(Dataset.from_dict(columns))
    model = SentenceTransformer(str(folder), device="cpu").eval()
    loss = PairLoss(model, InfoNCELoss(None, 10.0, views="paired"), pairs, hard_weight=0.5)
    labels = torch.tensor(pairs.dataset["label"][:])
    found = loss([model.preprocess(texts) for texts in columns.values()], labels)
    encoded = (model.encode(texts, convert_to_tensor=True) for texts in columns.values())
    q, a, n = (torch.nn.functional.normalize(z, dim=1) for z in encoded)
    right, wrong = 10 * (q * a).sum(1), 10 * (q * n).sum(1)
    rows = torch.logaddexp(right, wrong) - right
    rows[0] = 0.0  # w6 answers w1 too
    assert found["hard_negatives"].item() == pytest.approx(0.5 * rows.mean().item(), rel=1e-4)
    # the first two rows are no negatives of each other, in either direction
    rows = [torch.logaddexp(10 * q[0] @ a[2], right[0]) - right[0]]
    rows += [torch.logaddexp(10 * q[1] @ a[2], right[1]) - right[1]]
    rows += [torch.logsumexp(10 * q[2] @ a.T, 0) - right[2]]
    rows += [torch.logaddexp(10 * a[i] @ q[2], right[i]) - right[i] for i in range(2)]
    rows += [torch.logsumexp(10 * a[2] @ q.T, 0) - right[2]]
    assert found["contrastive"].item() == pytest.approx(sum(rows).item() / 6, rel=1e-4)


def by_hand(anchors, keys, excluded, beta=10.0) -> float:
    """Mean over rows of the cross-entropy of key i against the keys that are not excluded."""
    total = 0.0
    for i, row in enumerate(anchors):
        logits = [beta * float(row @ key) for key in keys]
        others = [logits[j] for j in range(len(keys)) if not excluded(i, j)]
        total += math.log(sum(math.exp(x - logits[i]) for x in [*others, logits[i]]))
    return total / len(anchors)


ANSWERS = [("w1", "w5"), ("w1", "w6"), ("w2", "w6"), ("w3", "w7")]  # w6 answers two questions


@pytest.mark.parametrize("views", ["paired", "shared"])
@pytest.mark.parametrize("rows", [(0, 2, 3), (0, 1, 3), (1, 2, 3), (0, 2)])
def test_a_question_is_no_negative_of_any_of_its_answers(folder, views, rows) -> None:
    """In a batch with ("w1", "w5") and ("w2", "w6"), w1 is a positive of w6 as well."""
    columns = {"q": [q for q, _ in ANSWERS], "a": [a for _, a in ANSWERS]}
    pairs = index_pairs(Dataset.from_dict(columns))
    model = SentenceTransformer(str(folder), device="cpu").eval()
    loss_fn, symmetric = InfoNCELoss(None, 10.0, views=views), []
    loss_fn.register_forward_pre_hook(lambda self, args: symmetric.append(self.symmetric))
    loss = PairLoss(model, loss_fn, pairs)
    batch = [ANSWERS[row] for row in rows]
    labels = torch.tensor([pairs.dataset["label"][row] for row in rows])
    texts = [list(column) for column in zip(*batch, strict=True)]
    found = loss([model.preprocess(column) for column in texts], labels)["contrastive"]
    encoded = (model.encode(column, convert_to_tensor=True).double() for column in texts)
    q, a = (torch.nn.functional.normalize(z, dim=1) for z in encoded)
    if views == "paired":
        forth = by_hand(q, a, lambda i, j: (batch[i][0], batch[j][1]) in ANSWERS)
        back = by_hand(a, q, lambda i, j: (batch[j][0], batch[i][1]) in ANSWERS)
        assert found.item() == pytest.approx((forth + back) / 2, rel=1e-4)
        assert symmetric == [True, True]  # a call says its direction: nothing is switched
        return
    count = len(batch)  # only w7 shares no question with another answer: it is all that is left
    alone = [answer == "w7" for _, answer in batch]

    def excluded(i: int, j: int) -> bool:
        return i % count == j % count or not (alone[i % count] or alone[j % count])

    views_of = torch.cat([q, a])
    total = 0.0
    for i, row in enumerate(views_of):
        logits = [10 * float(row @ other) for other in views_of]
        positive = logits[(i + count) % (2 * count)]
        others = [logits[j] for j in range(2 * count) if not excluded(i, j)]
        total += math.log(sum(math.exp(x - positive) for x in [*others, positive]))
    assert found.item() == pytest.approx(total / (2 * count), rel=1e-4, abs=1e-6)


def test_an_anchors_own_text_is_no_negative_of_it(folder) -> None:
    """Questions that are each other's duplicates: a table proposed the anchor itself, at cosine 1.

    In either direction, and where it stands as a hard negative.
    """
    rows = [("w1", "w2", "w5"), ("w2", "w3", "w2"), ("w4", "w5", "w1")]
    columns = dict(zip("qan", (list(column) for column in zip(*rows, strict=True)), strict=True))
    pairs = index_pairs(Dataset.from_dict(columns), corpus=["w4"])
    model = SentenceTransformer(str(folder), device="cpu").eval()
    loss = PairLoss(model, InfoNCELoss(None, 10.0, views="paired"), pairs)
    labels = torch.tensor(pairs.dataset["label"][:])
    found = loss([model.preprocess(column) for column in columns.values()], labels)
    encoded = (model.encode(column, convert_to_tensor=True).double() for column in columns.values())
    q, a, n = (torch.nn.functional.normalize(z, dim=1) for z in encoded)
    forth = by_hand(q, a, lambda i, j: i == j or rows[i][0] == rows[j][1])
    back = by_hand(a, q, lambda i, j: i == j or rows[j][0] == rows[i][1])
    assert found["contrastive"].item() == pytest.approx((forth + back) / 2, rel=1e-4)
    hard = [math.log1p(math.exp(10 * float(q[i] @ (n[i] - a[i])))) for i in (0, 2)]
    assert found["hard_negatives"].item() == pytest.approx(sum(hard) / 3, rel=1e-4)


def lazy_texts() -> Dataset:
    """Rows of ids; texts are looked up when they are read, as by their `resolve_ids`."""
    queries, answers = texts()["query"], texts()["answer"]

    def look_up(rows: dict) -> dict:
        found = {"query": [queries[i] for i in rows["query_id"]]}
        found["answer"] = [answers[i] for i in rows["answer_id"]]
        return {**found, **{name: rows[name] for name in rows if name == "label"}}

    ids = list(range(NUM))
    return Dataset.from_dict({"query_id": ids, "answer_id": ids}).with_transform(look_up)


def test_texts_that_are_looked_up_when_they_are_read(folder, tmp_path) -> None:
    """The columns are those a row has, not those that are stored."""
    pairs = index_pairs(lazy_texts())
    assert pairs.keys == texts()["answer"][:NUM] and pairs.positions()[3] == [3, 3]
    args = trainer(folder, tmp_path, max_steps=2, save_strategy="no").args
    args.prompts = {"query": "w70", "answer": "w71"}
    model = SentenceTransformer(str(folder), device="cpu")
    loss = PairLoss(model, importance(pairs), pairs)
    NegchainTrainer(model=model, args=args, train_dataset=pairs.dataset, loss=loss).train()
    assert int(loss.loss_fn.step) == 2 and loss.inputs == ({"prompt": "w70"}, {"prompt": "w71"})


def test_prompts_are_those_of_the_columns_that_are_trained_on(folder, tmp_path) -> None:
    """Renamed after `index_pairs`: what is drawn had none."""
    own = trainer(folder, tmp_path, prompts={"anchor": "w70", "positive": "w71"})
    assert own.loss.inputs == ({}, {})
    named = own.train_dataset.rename_columns({"query": "anchor", "answer": "positive"})
    NegchainTrainer(model=own.model, args=own.args, train_dataset=named, loss=own.loss)
    assert own.loss.inputs == ({"prompt": "w70"}, {"prompt": "w71"})


def other_columns(own, pairs):
    return own.train_dataset.select_columns(["answer", "query", "label"])


def other_pairs(own, pairs):
    return index_pairs(texts(), corpus=["w79"]).dataset


def fewer_texts(own, pairs):
    return own.train_dataset.map(lambda row: {"label": [99, *row["label"][1:]]})


def scores(own, pairs):
    return texts().add_column("label", [0.5] * len(texts()))


def words(own, pairs):
    return texts().add_column("label", ["neutral"] * len(texts()))


@pytest.mark.parametrize("change", [other_columns, other_pairs, fewer_texts, scores, words])
def test_a_training_set_whose_positions_name_other_texts_is_refused(
    folder, tmp_path, change
) -> None:
    """It would train, with the wrong chains and the wrong positives."""
    own = trainer(folder, tmp_path)
    data = change(own, own.loss.pairs)
    for sets in (data, {"a": own.train_dataset, "b": data}):
        with pytest.raises(ValueError, match="row 0 of the training set holds .* train on the"):
            NegchainTrainer(model=own.model, args=own.args, train_dataset=sets, loss=own.loss)


def test_rows_may_be_left_out_and_negatives_too(folder, tmp_path) -> None:
    own = trainer(folder, tmp_path, hard=True)
    some = own.train_dataset.select(range(5, 20)).shuffle(seed=1)
    for data in (some, some.remove_columns("negative"), some.to_iterable_dataset(),
                 some.with_format("torch")):  # fmt: skip
        NegchainTrainer(model=own.model, args=own.args, train_dataset=data, loss=own.loss)


@pytest.mark.parametrize("kind", ["stream", "sets", "list"])
def test_positions_need_all_texts_at_once(kind) -> None:
    given = {"stream": texts().to_iterable_dataset(), "sets": DatasetDict({"a": texts()}),
             "list": [{"q": "w1", "a": "w2"}]}[kind]  # fmt: skip
    with pytest.raises(ValueError, match=f"datasets.Dataset, got {type(given).__name__}; load an"):
        index_pairs(given)


WRAPPERS = {
    "MatryoshkaLoss": {"matryoshka_dims": [16, 8]},
    "AdaptiveLayerLoss": {},
    "Matryoshka2dLoss": {"matryoshka_dims": [16, 8]},
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_losses_that_call_a_loss_several_times_a_batch_are_refused(folder, tmp_path, name) -> None:
    """They hand every call the texts encoded for the first, and each call draws its own."""
    own = trainer(folder, tmp_path)
    wrapped = getattr(st_losses, name)(own.model, own.loss, **WRAPPERS[name])
    with pytest.raises(ValueError, match=f"inside {name} here: .* give that one a data set"):
        NegchainTrainer(
            model=own.model, args=own.args, train_dataset=own.train_dataset, loss=wrapped
        )


def test_short_embeddings_are_trained_beside_by_their_loss(folder, tmp_path) -> None:
    """The remedy: the same pairs as a second data set, with MatryoshkaLoss over their own loss."""
    own = trainer(folder, tmp_path)
    short = st_losses.MatryoshkaLoss(own.model, MultipleNegativesRankingLoss(own.model), [16, 8])
    beside = NegchainTrainer(
        model=own.model,
        args=own.args,
        train_dataset={"pairs": own.train_dataset, "short": texts()},
        loss={"pairs": own.loss, "short": short},
    )
    beside.train()
    assert beside.state.global_step == 2 * STEPS and int(own.loss.loss_fn.step) > 0


def test_lengths_count_where_the_loss_does_not_normalize(folder) -> None:
    """In the hard-negative term and in evaluation, as in the loss itself."""
    columns = {"q": ["w1", "w2", "w3"], "a": ["w5", "w6", "w7"], "n": ["w16", "w9", "w8"]}
    pairs = index_pairs(Dataset.from_dict(columns))
    model = SentenceTransformer(str(folder), device="cpu").eval()
    plain = InfoNCELoss(None, 0.3, views="paired", symmetric=False, normalize=False)
    loss, labels = PairLoss(model, plain, pairs), torch.tensor(pairs.dataset["label"][:])
    q, a, n = (model.encode(c, convert_to_tensor=True).double() for c in columns.values())
    contrastive = by_hand(q, a, lambda i, j: i == j, beta=0.3)
    rows = [0.3 * float(q[i] @ (n[i] - a[i])) for i in range(3)]
    hard = sum(math.log1p(math.exp(row)) for row in rows) / 3
    for training in (True, False):
        with torch.set_grad_enabled(training):
            found = loss([model.preprocess(c) for c in columns.values()], labels)
        assert found["contrastive"].item() == pytest.approx(contrastive, rel=1e-5)
        assert found["hard_negatives"].item() == pytest.approx(hard, rel=1e-5)


@pytest.mark.parametrize("left_out", [False, True])
def test_a_rows_own_positive_is_none_of_its_hard_negatives(folder, left_out) -> None:
    """Even where no anchor has a second positive, or a later column is left out; evaluating too."""
    columns = {"q": ["w1", "w2"], "a": ["w5", "w6"], "n": ["w5", "w9"]}
    more = {"m": ["w3", "w4"]} if left_out else {}
    pairs = index_pairs(Dataset.from_dict({**columns, **more}))
    assert pairs.known is None
    model = SentenceTransformer(str(folder), device="cpu").eval()
    loss = PairLoss(model, InfoNCELoss(None, 10.0, views="paired"), pairs)
    encoded = (model.encode(c, convert_to_tensor=True).double() for c in columns.values())
    q, a, n = (torch.nn.functional.normalize(z, dim=1) for z in encoded)
    expected = math.log1p(math.exp(10 * float(q[1] @ (n[1] - a[1])))) / 2
    for training in (True, False):
        with torch.set_grad_enabled(training):
            labels = torch.tensor(pairs.dataset["label"][:])
            found = loss([model.preprocess(c) for c in columns.values()], labels)
        assert found["hard_negatives"].item() == pytest.approx(expected, rel=1e-4)


def test_two_views_of_the_same_texts(folder) -> None:
    """As SimCSE has it: one position per text, and what chains hold is encoded by the model."""
    words = [f"w{i}" for i in range(6)]
    pairs = index_pairs(Dataset.from_dict({"one": words, "two": words}))
    model = SentenceTransformer(str(folder), device="cpu")
    loss = PairLoss(model, EMC2Loss(6, 10.0), pairs)
    labels = torch.tensor(pairs.dataset["label"][:])
    found = loss([model.preprocess(words) for _ in range(2)], labels)
    found["contrastive"].backward()
    assert int(loss.loss_fn.step) == 1


def test_drawn_documents_are_encoded_as_the_column_is(folder, tmp_path) -> None:
    """The prompt is in what the model sees, and gradient goes through it."""
    made = trainer(folder, tmp_path, prompts={"answer": "w71 w72"})
    made.model.eval()
    ids = torch.tensor([3, 0])
    found = made.loss._encode(1, ids)
    assert found.requires_grad
    wanted = [f"w71 w72{made.loss.pairs.keys[i]}" for i in ids.tolist()]
    expected = made.model.encode(wanted, convert_to_tensor=True)
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-6)
    made.loss.chunk = 1
    with torch.no_grad():
        torch.testing.assert_close(made.loss._encode(1, ids), expected, rtol=0, atol=1e-6)


def test_prompts_are_the_collators_for_the_losss_data_sets(folder, tmp_path) -> None:
    """One loss for a dict of data sets; and a collator of the user's own."""
    pairs = index_pairs(texts())
    model = SentenceTransformer(str(folder), device="cpu")

    def inputs(train_dataset, prompts, **more):
        loss = PairLoss(model, importance(pairs), pairs)
        args = SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path), report_to="none", use_cpu=True, prompts=prompts
        )
        NegchainTrainer(model=model, args=args, loss=loss, train_dataset=train_dataset, **more)
        return loss.inputs

    both = {"prompt": "w70"}, {"prompt": "w71"}
    named = {"query": "w70", "answer": "w71"}
    assert inputs({"a": pairs.dataset}, {"a": named}) == both
    assert inputs({"a": pairs.dataset}, {"a": "w71"}) == (both[1], both[1])
    assert inputs({"a": pairs.dataset, "b": pairs.dataset}, named) == both
    with pytest.raises(ValueError, match="serves the data sets a, b, whose prompts or routes"):
        inputs({"a": pairs.dataset, "b": pairs.dataset}, {"a": named})
    collator = SentenceTransformerDataCollator(preprocess_fn=model.preprocess, prompts=named)
    assert inputs(pairs.dataset, None, data_collator=collator) == both


def test_evaluation_touches_nothing(folder, tmp_path) -> None:
    """Rows of another data set, with other positions, or none."""
    made = trainer(folder, tmp_path, max_steps=1, save_strategy="no")
    made.train()
    before = snapshot(made.loss)
    rows = Dataset.from_dict({"query": ["w70", "w71"], "answer": ["w5 w6", "w7 w8"]})
    plain, labelled = made.evaluate(rows), made.evaluate(index_pairs(rows).dataset)
    assert_same(before, snapshot(made.loss))
    z = made.model.encode(["w70", "w71", "w5 w6", "w7 w8"], convert_to_tensor=True)
    beta = float(made.loss.loss_fn.beta.detach())
    expected = InfoNCELoss(None, beta, views="paired", symmetric=False)(z[:2], z[2:])
    assert plain["eval_loss"] == labelled["eval_loss"] == pytest.approx(expected.item(), rel=1e-4)


def test_other_losses_and_several_data_sets(folder, tmp_path) -> None:
    """A dict of losses, ours beside theirs; each keeps its state."""
    pairs = index_pairs(texts())
    model = SentenceTransformer(str(folder), device="cpu")
    losses = {
        "a": PairLoss(model, importance(pairs), pairs),
        "b": MultipleNegativesRankingLoss(model),
    }
    args = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), max_steps=4, save_steps=4, per_device_train_batch_size=4,
        report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1,
        prompts={"a": {"query": "w70"}},
    )  # fmt: skip
    made = NegchainTrainer(
        model=model, args=args, loss=losses, train_dataset={"a": pairs.dataset, "b": texts()}
    )
    assert losses["a"].inputs == ({"prompt": "w70"}, {})
    made.train()
    saved = torch.load(tmp_path / "checkpoint-4" / STATE_NAME, weights_only=True)
    assert int(saved["a"]["loss_fn.step"]) > 0 and saved["b"] == {}
    assert any("a_effective_negatives" in line for line in made.state.log_history)


def test_refusals(folder, tmp_path) -> None:
    with pytest.raises(ValueError, match="rename"):
        index_pairs(texts().add_column("label", [0] * (NUM + 3)))
    with pytest.raises(ValueError, match="row 0 of 'score' is 0.5"):
        index_pairs(texts().add_column("score", [0.5] * (NUM + 3)))
    with pytest.raises(ValueError, match="row 1 of 'answer' is None"):
        index_pairs(Dataset.from_dict({"query": ["a", "b"], "answer": ["A", None]}))
    by_id, rows = {"d1": "a text"}, Dataset.from_dict({"text": ["a text"]})
    for corpus, found in ((by_id, "{'d1': "), (rows, "{'text': "), ([None], "None")):  # ids, once
        with pytest.raises(ValueError, match=f"row 0 of 'corpus=' is {found}.*the texts alone"):
            index_pairs(texts(), corpus)  # type: ignore[arg-type]
    assert "a text" in index_pairs(texts(), corpus="a text").keys  # and not its letters
    with pytest.raises(ValueError, match="at least one pair, got none"):
        index_pairs(texts().select([]))
    for by_label in ("group_by_label", GroupByLabelBatchSampler):
        with pytest.raises(ValueError, match="groups rows by the column 'label'"):
            trainer(folder, tmp_path, batch_sampler=by_label)
    made = trainer(folder, tmp_path)
    with pytest.raises(ValueError, match="built for 5 anchors"):
        PairLoss(made.model, InfoNCELoss(5), made.loss.pairs)
    rows = Dataset.from_dict({"query": ["a", "b", "c"], "answer": ["A", "B", "A"]})
    with pytest.raises(ValueError, match="3 keys that are one-to-one, the pairs have 3 and 3"):
        PairLoss(made.model, EMC2Loss(3, views="paired"), index_pairs(rows, corpus=["X"]))
    sharded = importance(made.loss.pairs, dim=16)
    sharded.rows = replace(sharded.rows, ranks=object())  # as shard_state=True makes it
    with pytest.raises(ValueError, match="with shard_state=True none has all of the state"):
        PairLoss(made.model, sharded, made.loss.pairs)
    made.train_dataset = texts()
    with pytest.raises(ValueError, match="index_pairs"):
        made.train()


def test_a_checkpoint_is_of_the_texts_its_positions_name(folder, tmp_path) -> None:
    """A corpus that comes in another order (a set's) would be taken for other documents."""
    made = trainer(folder, tmp_path, emc2, max_steps=1, save_steps=1)
    made.train()
    saved, before = str(tmp_path / "checkpoint-1"), made.loss.pairs

    def go_on(pairs, name=""):
        model = SentenceTransformer(str(folder), device="cpu")
        loss = PairLoss(model, emc2(pairs), pairs)
        sets = ({name: loss}, {name: pairs.dataset}) if name else (loss, pairs.dataset)
        args = replace(made.args, max_steps=2, save_strategy="no")
        again = NegchainTrainer(model=model, args=args, loss=sets[0], train_dataset=sets[1])
        again.train(resume_from_checkpoint=saved)
        return loss

    corpus = [f"w{i} w77" for i in range(10)]
    for pairs in (
        index_pairs(texts(), corpus=corpus[::-1]),
        index_pairs(texts().shuffle(seed=1), corpus=corpus),
    ):
        assert len(pairs.keys) == len(before.keys) and len(pairs.anchors) == len(before.anchors)
        with pytest.raises(ValueError, match="name other texts.*; or start on other data"):
            go_on(pairs)
    assert int(go_on(index_pairs(texts(), corpus=corpus)).loss_fn.step) == 2
    with pytest.raises(ValueError, match="none of 'a'; name the data sets as they were"):
        go_on(index_pairs(texts(), corpus=corpus), "a")


def test_examples_in_docstrings() -> None:
    assert all(doctest.testmod(module).failed == 0 for module in (ours, text_pairs))


def test_the_example(folder, tmp_path, capsys) -> None:
    example = load("with_sentence_transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trainer pins memory without a GPU
        example.main(example.tiny_model(), str(tmp_path), 20, resume=False)
        trainer = example.main(example.tiny_model(), str(tmp_path), 21, resume=True)
        given = SentenceTransformer(str(folder), device="cpu")
        other = example.main(given, str(tmp_path / "given"), 1, resume=False)
    assert int(trainer.loss.loss_fn.step) == 21
    assert other.args.learning_rate < 1e-4 < trainer.args.learning_rate  # it collapsed MiniLM
