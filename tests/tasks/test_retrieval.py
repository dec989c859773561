"""Dense retrieval through the tool: BEIR folders, early stopping, the model it leaves, its report.

The encoder is a BERT of 16 dimensions with random weights (tests/tasks/tiny_texts.py).
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from html import escape
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers")

import negchain.tasks.retrieval as module  # noqa: E402
from negchain import tasks, train  # noqa: E402
from negchain.cli import run as command_line  # noqa: E402
from negchain.cli.train import _show  # noqa: E402
from negchain.losses.request import Want  # noqa: E402
from negchain.progress import Progress  # noqa: E402
from negchain.report.runs import load_run  # noqa: E402
from negchain.tasks.beir import read_beir  # noqa: E402
from negchain.tasks.retrieval_judge import _short, measured  # noqa: E402
from negchain.tasks.text import TextEncoder, Texts  # noqa: E402
from negchain.train import start, trainer  # noqa: E402
from negchain.train.config import ConfigError  # noqa: E402
from negchain.train.resolve import resolve  # noqa: E402
from negchain.train.run_folder import RunFolder, read_metrics  # noqa: E402
from negchain.train.step import build_loss  # noqa: E402
from negchain.train.team import Team  # noqa: E402
from tasks.graphed import losses_of  # noqa: E402
from tasks.tiny_texts import ASKED, FACTS, write_beir, write_model  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("retrieval")
    write_model(made / "model")
    write_beir(made / "beir")
    return made


def settings(folder: Path, **more) -> dict:
    given = {"data": str(folder / "beir"), "encoder": str(folder / "model"), "device": "cpu"}
    return {**given, "batch_size": 4, "lr": 3e-3, "beta": 10.0, "epochs": 2, **more}


@pytest.fixture(scope="module")
def finished(folder: Path) -> Path:
    given = settings(folder, out=str(folder / "run"), epochs=6, precision="float32")
    return train.run(**given)


@pytest.fixture(scope="module")
def task(folder: Path):
    made = tasks.load(resolve(None, settings(folder)))
    made.place(torch.device("cpu"))
    return made


# ------------------------------------------------------------------ the run and what it leaves


def test_it_trains_and_beats_the_start(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["ndcg10"] > summary["untrained_ndcg10"] + 0.05
    assert summary["test_ndcg10"] > summary["untrained_test_ndcg10"]
    assert summary["score"] == summary["ndcg10"]
    config = json.loads((finished / "config.json").read_text())
    assert (config["task"], config["method"], config["denominator"]) == (
        "retrieval", "informed", "all"
    )  # fmt: skip


def test_the_model_is_sentence_transformers_own_and_as_good(finished: Path, folder: Path) -> None:
    """Their evaluator, on their model loaded from the folder, finds the run's numbers."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    model = SentenceTransformer(str(finished / "model"), device="cpu", local_files_only=True)
    data = read_beir(folder / "beir", 0.2)
    relevant = {q: {str(d) for d in g} for q, g in zip(data.test.ids, data.test.relevant)}  # noqa: B905
    found = InformationRetrievalEvaluator(
        dict(zip(data.test.ids, data.test.texts, strict=True)),
        {str(n): text for n, text in enumerate(data.documents)},
        relevant,
        precision_recall_at_k=[10, 100],
    )(model)
    summary = json.loads((finished / "summary.json").read_text())
    for name, theirs in (("ndcg10", "ndcg@10"), ("mrr10", "mrr@10"), ("recall10", "recall@10")):
        assert summary[f"test_{name}"] == pytest.approx(found[f"cosine_{theirs}"], abs=1e-6)
    card = (finished / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: sentence-transformers")
    assert f"| test ndcg10 | {summary['untrained_test_ndcg10']:.4f} |" in card
    recorded = json.loads((finished / "config.json").read_text())["versions"]
    assert {"transformers", "sentence-transformers"} <= set(recorded)  # they compute it


def test_the_model_is_not_written_through_a_link(finished: Path, task, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(outside, target_is_directory=True)
    summary = json.loads((finished / "summary.json").read_text())
    with pytest.raises(ValueError, match="a folder of its own, and it is a link"):
        task.finish(task.encoder, tmp_path / "run", summary)
    assert [(p.name, p.read_text()) for p in outside.iterdir()] == [("mine", "mine")]
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["model"]


def test_the_best_encoder_is_kept_and_patience_ends_the_run(folder: Path, tmp_path: Path) -> None:
    """With a rate that moves nothing, the encoder of the start is what is left."""
    given = settings(folder, out=str(tmp_path / "run"), lr=1e-7, patience=2, epochs=5)
    path = train.run(**given)
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["best_step"], summary["step"]) == (0, 2 * 6)  # two epochs of six steps
    assert summary["ndcg10"] == summary["untrained_ndcg10"]
    fresh, left = (
        torch.cat([p.flatten() for p in tasks.named("retrieval").rebuild(
            {"folder": str(where), "max_length": 16}).parameters()])
        for where in (folder / "model", path / "model")
    )  # fmt: skip
    assert torch.equal(fresh, left)


def test_who_waits_sees_how_far_reading_and_judging_are(
    folder: Path, tmp_path: Path, capsys
) -> None:
    given = settings(folder, out=str(tmp_path / "run"), lr=1e-7, patience=1, epochs=3)
    run = start.start(resolve(None, given), True)
    assert "tokenising: 0/80 texts" in capsys.readouterr().err  # 41 documents and 39 queries
    heard: list[str] = []
    progress = Progress(False)
    progress.within = heard.append  # type: ignore[method-assign]
    with run.folder:
        summary = run.train(progress)
    assert heard[:3] == ["32/41 texts", "41/41 texts", "6/6 texts"]  # documents, then queries
    _show(run, summary)
    said = capsys.readouterr().out
    assert "ended after step 6 of 18: 1 evaluation found nothing better (--patience)" in said
    assert "kept: the encoder as it was" in said


def test_epochs_are_judged_on_validation_queries_alone(task) -> None:
    judge = task.judge()
    task.encoder.to(task.device)
    (before, _), numbers = judge.before(task.encoder), judge.quick(task.encoder)
    assert numbers == {name: before[name] for name in ("ndcg10", "mrr10", "recall10", "recall100")}
    assert before["test_ndcg10"] != before["ndcg10"]
    z, documents = (judge.embed(task.encoder, texts)
                    for texts in (task.queries["validation"], task.documents))  # fmt: skip
    by_hand = measured(z, documents, task.data.validation.relevant)["ndcg10"].mean()
    assert numbers["ndcg10"] == pytest.approx(by_hand)
    assert judge.score({**numbers, "test_ndcg10": 2.0}) == numbers["ndcg10"]


def test_a_run_stopped_half_way_resumes_to_the_bit(folder: Path, tmp_path: Path) -> None:
    whole = train.run(**settings(folder, out=str(tmp_path / "whole"), log_every=1))
    half = tmp_path / "half"
    text = (whole / "config.json").read_text()
    loaded = tasks.load(resolve(None, settings(folder, log_every=1)))
    run = start.prepare(loaded, lambda: RunFolder.create(half, config=text))
    judge = run.judge.quick
    run.judge.quick = lambda encoder: (setattr(run, "stop", True), judge(encoder))[1]
    with run.folder, pytest.raises(trainer.Interrupted):
        run.train(Progress(show=False))
    assert command_line(["train", "--out", str(half), "--resume", "--quiet"]) == 0

    def untimed(path: Path) -> list[dict]:
        clock = ("seconds", "samples_per_second")
        return [{k: v for k, v in line.items() if k not in clock} for line in read_metrics(path)]

    assert untimed(half) == untimed(whole)
    arrays = [load_run(path).artifacts for path in (whole, half)]
    assert np.array_equal(arrays[0]["before_ndcg10"], arrays[1]["before_ndcg10"])


def test_a_run_killed_before_its_start_is_kept_judges_it_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later its gain could not be compared query by query any more."""

    def killed(*arrays: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "run"
    run = start.start(resolve(None, settings(folder, out=str(out))), show=False)
    with monkeypatch.context() as patch, run.folder, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunFolder, "keep_arrays", killed)
        run.train(Progress(show=False))
    assert command_line(["train", "--out", str(out), "--resume", "--quiet"]) == 0
    assert "before_ndcg10" in load_run(out).artifacts


def test_the_card_says_that_its_numbers_are_of_bf16(folder: Path, tmp_path: Path) -> None:
    """Who loads the model finds others, in float32."""
    for precision, said in (("bf16", True), ("float32", False)):
        given = settings(folder, out=str(tmp_path / precision), epochs=1, precision=precision)
        card = (train.run(**given) / "model" / "README.md").read_text()
        assert ("embeddings were computed in bf16" in card) == said


def test_the_report_shows_proposals_beside_the_positive(finished: Path) -> None:
    page = (finished / "report.html").read_text(encoding="utf-8")
    for text in ("The hardest negatives", "that the encoder ranks highest", "nDCG@10"):
        assert text in page
    art = load_run(finished).artifacts
    own = art["proposal_positives"]
    for row, texts in enumerate(art["proposal_texts"]):
        assert own[row] not in texts  # copies of the positive are none of its negatives
    commit = json.loads((finished / "config.json").read_text())["commit"]  # may say anything
    body = page.split("<body>")[1].split("<footer>")[0].replace(escape(commit), "")
    assert "image" not in body and "pixels" not in body


def test_the_negatives_shown_are_those_of_the_encoder_that_was_kept(
    folder: Path, tmp_path: Path
) -> None:
    """They were its queries' among the table's documents, which later encoders had encoded."""
    from sentence_transformers import SentenceTransformer

    given = settings(folder, out=str(tmp_path / "run"), lr=1.0, patience=1, precision="float32")
    path = train.run(**given)
    summary = json.loads((path / "summary.json").read_text())
    assert summary["best_step"] < summary["step"]
    art = load_run(path).artifacts
    model = SentenceTransformer(str(path / "model"), device="cpu", local_files_only=True)
    asked, others = (
        model.encode(texts, normalize_embeddings=True)
        for texts in (art["proposal_queries"].tolist(), art["proposal_texts"].ravel().tolist())
    )
    others = others.reshape(*art["proposal_texts"].shape, -1)
    cosines = np.einsum("qd,qpd->qp", asked, others)
    known = art["proposal_scores"] < -1.5
    assert cosines[~known] == pytest.approx(art["proposal_scores"][~known], abs=1e-5)


def test_evaluate_takes_other_texts_without_training_queries(
    finished: Path, folder: Path, tmp_path: Path, capsys
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder / "beir", other)
    (other / "qrels" / "train.tsv").unlink()
    assert command_line(["evaluate", str(finished), "--device", "cpu", "--data", str(other)]) == 0
    said = capsys.readouterr().out
    assert "nDCG@10, test" in said and "nDCG@10, test: training gained" in said


def test_evaluate_judges_the_encoder_that_was_kept(folder: Path, tmp_path: Path, capsys) -> None:
    """The one in model/, and not that of the last step."""
    given = settings(folder, out=str(tmp_path / "run"), lr=1e-7, patience=1, epochs=3)
    path = train.run(**given)
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["best_step"], summary["step"]) == (0, 6)
    for words, step in (((), 0), (("--checkpoint", "latest"), 6)):
        assert command_line(["evaluate", str(path), "--device", "cpu", *words]) == 0
        assert capsys.readouterr().out.startswith(f"step {step}, ")
        judged = json.loads((path / "evaluation.json").read_text())
        assert judged["step"] == step
        kept = {k: judged[k] for k in ("ndcg10", "test_ndcg10", "untrained_test_ndcg10")}
        assert step or kept == {k: summary[k] for k in kept}


def test_what_belongs_to_texts_is_no_riddle_beside_a_misspelt_path(folder: Path) -> None:
    encoder = {"max_length": 16, "encoder": "resnet18"}
    with pytest.raises(ConfigError, match="'/nowhere' is neither a folder nor one of"):
        resolve(None, {**encoder, "data": "/nowhere"})
    with pytest.raises(ConfigError, match="what --task retrieval needs: a folder of corpus"):
        resolve(None, {**encoder, "data": "digits"})
    with pytest.raises(ConfigError, match="leave out --max-length or change --task"):
        resolve(None, {**encoder, "data": "digits", "task": "images"})


# ------------------------------------------------------------------ batches


def test_positives_are_drawn_by_grade_and_copies_are_known(task) -> None:
    place = task.data.train.ids.index("q1")
    index = torch.tensor([place] * 400)
    drawn = [task.batch(torch.tensor([place]), torch.tensor(step)).keys for step in range(400)]
    assert 0.2 < torch.cat(drawn).eq(1).double().mean() < 0.3  # d1 has grade 1, d0 grade 3
    known = task.batch(index, torch.tensor(0)).told["known"][0]
    assert set(known[known >= 0].tolist()) == {0, 1, 40}  # and the copy of d0


def test_the_loss_is_told_how_likely_each_document_is_in_a_batch(folder: Path, task) -> None:
    """A query takes one of its positives: counted on the way, q of a new one was that of a whole.

    2,000 batches of all queries; false alarm 1e-4 in all (a normal bound of 4.5 deviations).
    """
    index, times = torch.arange(task.num_samples), torch.zeros(len(task.data.documents))
    for step in range(2000):
        keys = task.batch(index, torch.tensor(step)).keys
        times.index_add_(0, keys, torch.full(keys.shape, 1 / 2000))
    assert task.key_counts.sum() == pytest.approx(task.num_samples)
    assert any(0 < share < 1 for share in task.key_counts.tolist())  # a query with two positives
    for seen, share in zip(times.tolist(), task.key_counts.tolist(), strict=True):
        assert abs(seen - share) <= 4.5 * (share / 2000) ** 0.5 + 1e-4  # its variance is below that
    for method in ("infonce", "sogclr", "emc2"):
        made = tasks.load(resolve(None, settings(folder, method=method)))
        loss_fn = build_loss(made, made.encoder)
        assert torch.equal(loss_fn.key_counts[:-1], task.key_counts)
        assert not loss_fn._counts_keys


def test_texts_are_padded_to_the_longest_of_a_pass(task) -> None:
    tokens = task.inputs([Want(torch.tensor([0, 1]), "anchors")], torch.tensor(0), 0)
    assert tokens["input_ids"].shape == tokens["attention_mask"].shape == (2, 6)
    assert tokens["role"] == "query"


def test_empty_texts_have_a_pass(folder: Path) -> None:
    """Tokenizers without marks at the ends make nothing of them."""
    made = tasks.load(resolve(None, settings(folder)))
    texts = made.documents
    texts.rows[3] = texts.rows[3][:0]
    tokens = texts.tokens(torch.tensor([3, 3]), made.device)
    assert tokens["attention_mask"].shape == (2, 1) and not tokens["attention_mask"].any()
    assert torch.equal(made.encoder(tokens), torch.zeros(2, 16))


@pytest.mark.parametrize("left", [False, True])
def test_texts_padded_to_one_length_are_the_same_texts(folder: Path, left: bool) -> None:
    """What a CUDA graph is given: no pass is shorter than the longest text of all."""
    made = tasks.load(resolve(None, settings(folder)))
    made.place(torch.device("cpu"))
    texts, places = made.documents, torch.tensor([3, 0, 3])
    texts.left = left
    texts.rows[3] = texts.rows[3][:4]
    ragged = [texts.tokens(places[:1], made.device), texts.tokens(places, made.device)]
    texts.pad(made.device)
    one, several = (texts.tokens(p, made.device) for p in (places[:1], places))
    assert ragged[0]["input_ids"].shape[1] == 4 < one["input_ids"].shape[1]
    for key in ("input_ids", "attention_mask"):
        assert torch.equal(several[key], ragged[1][key])  # the longest is among them
        kept = one["attention_mask"] > 0
        assert torch.equal(one[key][kept], ragged[0][key][0])
    if not left:  # BERT's positions are absolute
        made.encoder.eval()
        torch.testing.assert_close(made.encoder(one), made.encoder(ragged[0]))


def test_one_length_is_for_small_steps_and_even_texts(task, monkeypatch) -> None:
    plenty = 2**30
    assert task._pads_well(plenty)  # 12 documents of about 9 tokens, a BERT of 16 dimensions
    assert not task._pads_well(1000)  # their table alone is larger than a tenth
    lengths = torch.full((1000,), 50)
    monkeypatch.setattr(task.documents, "lengths", lengths)
    lengths[0] = 512  # one text is ten times as long as those of nearly every pass
    assert task._pads_well(plenty)
    weights = 3 * 16 * 16 + 3 * 16  # queries, keys and values, of 2,800 in all
    monkeypatch.setattr(module, "SMALL_PASS", 12 * 512 * weights)
    assert not task._pads_well(plenty)
    lengths[0] = 60
    assert task._pads_well(plenty)
    lengths[:100] = 512  # nearly every pass has one
    assert task._pads_well(plenty)


def test_one_length_is_not_for_encoders_that_padding_changes(folder: Path) -> None:
    """BERT counts positions from the left end: padded there, a short text is another text."""
    made = tasks.load(resolve(None, settings(folder)))
    for texts in (made.documents, made.queries["train"]):
        texts.rows[3], texts.rows[4] = texts.rows[3][:4], texts.rows[4][:0]
        assert made._pads_well(2**30)
        texts.left = True
        assert not made._pads_well(2**30)
        texts.left = False


def test_ranks_agree_on_one_length(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """A rank whose GPU has no room for it decides for all: they record a step together."""
    other = {"capturable": True}
    monkeypatch.setattr(Team, "any", lambda self, flag: flag or not other["capturable"])
    monkeypatch.setattr(Team, "same", lambda self, what, value: None)  # asks any() too
    for capturable in (True, False):
        made = tasks.load(resolve(None, settings(folder)))
        build = made.build
        monkeypatch.setattr(
            made,
            "build",
            lambda made=made, build=build: (build(), setattr(made, "capturable", True))[0],
        )
        other["capturable"] = capturable
        path = tmp_path / str(capturable)
        run = start.prepare(made, lambda path=path: RunFolder.create(path, config="{}\n"))
        run.folder.close()
        assert made.capturable == capturable


def after_steps(folder: Path, path: Path, graph: bool, method: str) -> tuple[list[float], bool]:
    """Losses of steps on a GPU with dropout; whether they were a graph."""
    made = tasks.load(resolve(None, settings(folder, device="cuda", method=method,
                                             precision="float32", lr=1e-3)))  # fmt: skip
    run = start.prepare(made, lambda: RunFolder.create(path, config="{}\n"))
    run.folder.close()
    assert made.capturable
    return losses_of(run, graph)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["infonce", "sogclr", "emc2", "informed", "topk", "logq"])
def test_a_step_is_a_cuda_graph_that_does_what_the_eager_one_does(
    folder: Path, tmp_path: Path, method: str
) -> None:
    plain = after_steps(folder, tmp_path / "plain", False, method)
    graph = after_steps(folder, tmp_path / "graph", True, method)
    assert graph[1] and not plain[1]
    assert len(set(plain[0])) == len(plain[0])
    assert graph[0] == pytest.approx(plain[0], rel=2e-3)


@pytest.mark.gpu
def test_an_encoder_that_asks_the_device_gets_passes_of_their_own_length(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, widths = TextEncoder.forward, set()

    def asking(self: TextEncoder, tokens: dict) -> torch.Tensor:
        assert int(tokens["input_ids"].max()) > 0
        if tokens["role"] == "document":
            widths.add(tokens["input_ids"].shape[1])
        return whole(self, tokens)

    data = tmp_path / "beir"
    shutil.copytree(folder / "beir", data)
    with gzip.open(data / "corpus.jsonl.gz", "at") as file:
        file.write(json.dumps({"_id": "long", "text": "old " * 20}) + "\n")
    made = tasks.load(resolve(None, settings(folder, data=str(data), device="cuda")))
    run = start.prepare(made, lambda: RunFolder.create(tmp_path / "run", config="{}\n"))
    run.folder.close()
    monkeypatch.setattr(TextEncoder, "forward", asking)
    with pytest.warns(UserWarning, match="no CUDA graph"):
        assert not run.step.try_capture()
    longest = int(made.documents.lengths.max())
    assert widths == {longest}
    widths.clear()
    for step in range(6):  # of which each renews one document, and draws eight
        run.step(step, run.order.batch(step))
    assert min(widths) < longest


def test_prompts_are_the_models_own_and_texts_are_cut(folder: Path, tmp_path: Path) -> None:
    """Embeddings are those of `encode_query` and `encode_document` at this length."""
    described = {"folder": str(folder / "model"), "max_length": 16}
    model = tasks.named("retrieval").rebuild(described).model
    model.prompts = {"query": "text ", "document": "ice "}
    model.save(str(tmp_path / "model"), create_model_card=False)
    given = settings(folder, encoder=str(tmp_path / "model"), max_length=6, precision="float32")
    loaded = tasks.load(resolve(None, given))
    loaded.place(torch.device("cpu"))
    model = loaded.encoder.eval().model
    for texts, kept, encode, prompt in (
        (loaded.data.train.texts, loaded.queries["train"], model.encode_query, "text"),
        (loaded.data.documents, loaded.documents, model.encode_document, "ice"),
    ):
        expected = encode(texts, convert_to_tensor=True, normalize_embeddings=True)
        torch.testing.assert_close(loaded.judge().embed(loaded.encoder, kept), expected)
        assert kept.lengths.max() == 6  # nothing here is shorter than that
        assert {model.tokenizer.convert_ids_to_tokens(int(row[1])) for row in kept.rows} == {prompt}


def test_documents_per_step_are_equal_for_all_methods(folder: Path) -> None:
    from negchain.train.step import build_loss

    for method in ("infonce", "sogclr", "emc2", "informed", "topk", "logq"):
        config = resolve(None, settings(folder, method=method, batch_size=4, draws=2))
        loaded = tasks.load(config)
        loss_fn = build_loss(loaded, loaded.encoder)
        index, z = torch.arange(4), torch.randn(4, 16)
        told = loaded.batch(index, torch.tensor(0)).told
        wants = [
            *loss_fn.request(index, **told).wants,
            *loss_fn.request(index, z, z, **told).wants,
        ]
        assert sum(len(w.ids) for w in wants if w.gradient) == 8, method


def test_more_draws_than_the_usual_top_come_from_a_larger_one(folder: Path) -> None:
    from negchain.train.step import build_loss

    for draws, top in ((2, 20), (25, 25)):
        loaded = tasks.load(resolve(None, settings(folder, method="topk", draws=draws)))
        loss_fn = build_loss(loaded, loaded.encoder)
        assert (loss_fn.num, loss_fn.top) == (draws, top)


def test_no_draws_is_the_batch_alone(folder: Path) -> None:
    """What others call in-batch negatives; a table has to be drawn from."""
    from negchain.train.step import build_loss

    for method in ("infonce", "dcl", "sogclr", "logq"):
        loaded = tasks.load(resolve(None, settings(folder, method=method, draws=0)))
        index = torch.arange(4)
        told = loaded.batch(index, torch.tensor(0)).told
        assert not build_loss(loaded, loaded.encoder).request(index, **told).wants, method
        assert not any("--draws 0" in note for note in loaded.notes)
    loaded = tasks.load(resolve(None, settings(folder, method="infonce")))
    assert any("2 random documents per query" in note for note in loaded.notes)
    for method, draws, more in (("informed", 0, {}), ("topk", 0, {}),
                                ("emc2", 1, {"proposal": "informed"})):  # fmt: skip
        with pytest.raises(ConfigError, match=f"--draws must be at least .* got {draws}; raise"):
            resolve(None, settings(folder, method=method, draws=draws, **more))


@pytest.mark.parametrize(("draws", "number"), [(2, 7), (4, 15)])
def test_a_burn_in_is_of_the_batch_and_its_draws(folder: Path, draws: int, number: int) -> None:
    """One document that is encoded per query is the carried one, and no draw."""
    given = {"method": "emc2", "batch_size": 4, "draws": draws}
    loaded = tasks.load(resolve(None, settings(folder, **given, burn_in=number - 1)))
    loss_fn = build_loss(loaded, loaded.encoder)
    loss_fn.check_batch_size(4)
    with pytest.raises(ValueError, match=f"offers {number - 1} at batch size 3"):
        loss_fn.check_batch_size(3)
    with pytest.raises(ConfigError, match=f"got {number}, .* has {number};"):
        resolve(None, settings(folder, **given, burn_in=number))


def test_a_refresh_that_outweighs_the_step_is_said(folder: Path) -> None:
    given = {"refresh": 1.0, "batch_size": 2, "draws": 1}
    loaded = tasks.load(resolve(None, settings(folder, method="informed", **given)))
    count = len(loaded.data.documents)
    said = f"re-encodes {count} documents for the table (--refresh 1) beside 4 that train"
    assert count > 32
    assert any(said in note for note in loaded.notes)
    for other in ({"method": "informed", **given, "refresh": 0.1}, {"method": "infonce"}):
        loaded = tasks.load(resolve(None, settings(folder, **other)))
        assert not any("re-encodes" in note for note in loaded.notes)


def test_a_folder_too_large_for_the_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    fits = tasks.named("retrieval").fits
    fits({"folder": str(folder / "model"), "max_length": 16}, 10**6)
    config = json.loads((folder / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 2**20}))
    with pytest.raises(ValueError, match="bert has .* MB of weights and the file has 0 MB"):
        fits({"folder": str(tmp_path), "max_length": 16}, 10**6)


def test_long_texts_are_cut_between_words() -> None:
    assert _short("a " * 500) == ("a " * 200).rstrip() + "…"
    assert _short("字" * 401) == "字" * 400 + "…" and _short("a") == "a"


def test_measures_of_a_ranking_by_hand() -> None:
    documents = torch.eye(5)
    query = torch.tensor([[0.5, 0.4, 0.3, 0.2, 0.1]])  # ranks documents 0, 1, 2, 3, 4
    found = measured(query, documents, [{1: 1.0, 3: 2.0}])
    ideal = 1 + 1 / np.log2(3)
    assert found["ndcg10"] == pytest.approx([(1 / np.log2(3) + 1 / np.log2(5)) / ideal])
    assert (found["mrr10"], found["recall10"]) == ([0.5], [1.0])


# ------------------------------------------------------------------ what is refused


def test_validation_queries_are_dev_tsv_where_there_is_one(folder: Path, tmp_path: Path) -> None:
    data = read_beir(folder / "beir", 0.2)
    assert (len(data.train), len(data.validation), len(data.test)) == (25, 6, 8)
    assert data.documents[1] == "glacier the old glacier sings in a text"  # the title comes first
    assert not set(data.train.ids) & set(data.validation.ids) and "q2" not in data.train.ids
    copy = shutil.copytree(folder / "beir", tmp_path / "beir")
    (copy / "qrels" / "dev.tsv").write_text("q6\td6\t1\n")  # a header may be missing
    data = read_beir(copy, 0.2)
    assert (len(data.train), data.validation.ids) == (30, ["q6"])


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_validation_queries_have_the_usual_names(name: str, folder: Path, tmp_path: Path) -> None:
    """A file that is passed over in silence would be trained on."""
    copy = shutil.copytree(folder / "beir", tmp_path / "beir")
    (copy / "qrels" / f"{name}.tsv").write_text("q6\td6\t1\n")
    assert read_beir(copy, 0.2).validation.ids == ["q6"]
    (copy / "qrels" / "dev.tsv").write_text("q7\td7\t1\n")
    with pytest.raises(ConfigError, match=rf"one file .* has dev.tsv, {name}.tsv; keep one"):
        read_beir(copy, 0.2)


def test_queries_without_words_are_left_out(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder / "beir", tmp_path / "beir")
    add(copy, "queries.jsonl", {"_id": "blank", "text": " \n"})
    add(copy, "qrels/train.tsv", "blank\td3\t1")
    data = read_beir(copy, 0.2)
    assert "blank" not in (*data.train.ids, *data.validation.ids)
    assert "left out: 2 queries of train.tsv with no positive or no text" in data.notes  # and q2


def add(folder: Path, name: str, *lines: dict | str) -> None:
    with open(folder / name, "a") as file:
        file.writelines((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)


def test_an_empty_document_is_no_positive(folder: Path, tmp_path: Path) -> None:
    """It was trained on, and nothing was said."""
    shutil.copytree(folder / "beir", tmp_path / "beir")
    with gzip.open(tmp_path / "beir/corpus.jsonl.gz", "ab") as corpus:
        corpus.write(b'{"_id": "blank", "title": " ", "text": ""}\n')
    with open(tmp_path / "beir/qrels/train.tsv", "a") as qrels:
        qrels.write("q1\tblank\t1\nq2\tblank\t1\n")
    with open(tmp_path / "beir/qrels/test.tsv", "a") as qrels:
        qrels.write(f"{read_beir(folder / 'beir', 0.2).test.ids[0]}\tblank\t1\n")
    with_it, without = (read_beir(f / "beir", 0.2) for f in (tmp_path, folder))
    relevant = [sum(map(len, data.test.relevant)) for data in (with_it, without)]
    assert relevant[0] == relevant[1] + 1  # a test stays as it was published
    said = "left out: 2 positives of train.tsv with no title and no text"
    assert said in with_it.notes and with_it.documents[-1] == ""
    assert (with_it.train, with_it.validation) == (without.train, without.validation)  # not q2


def test_no_query_is_in_two_splits(folder: Path, tmp_path: Path) -> None:
    """By id or word for word: test before validation before training."""
    copy = shutil.copytree(folder / "beir", tmp_path / "beir")
    asked = {n: f"what {FACTS[n % 5]} the {ASKED[n // 5]}" for n in (4, 6)}
    add(copy, "queries.jsonl", *({"_id": f"again{n}", "text": t} for n, t in asked.items()))
    add(copy, "qrels/train.tsv", "q9\td9\t1", "again4\td3\t1", "again6\td8\t1")
    add(copy, "qrels/dev.tsv", "q4\td4\t1", "q6\td6\t1")
    data = read_beir(copy, 0.2)
    assert data.validation.ids == ["q6"] and len(data.test) == 8
    assert len(data.train) == 30 and not {"q6", "q9", "again4", "again6"} & set(data.train.ids)
    said = "word for word, and left out"
    assert f"1 validation query is a held-out one {said}" in data.notes
    assert f"4 training queries are held-out ones {said}" in data.notes
    shutil.copy(copy / "qrels" / "test.tsv", copy / "qrels" / "dev.tsv")  # then some are held out
    data = read_beir(copy, 0.2)
    splits = (data.train, data.validation, data.test)
    assert all(len(part) for part in splits)
    assert len({t for part in splits for t in part.texts}) == sum(
        len(set(part.texts)) for part in splits
    )
    shutil.copy(copy / "qrels" / "test.tsv", copy / "qrels" / "train.tsv")
    with pytest.raises(ConfigError, match=r"and has none that dev.tsv or test.tsv does not ask"):
        tasks.load(resolve(None, settings(folder, data=str(copy))))


def test_what_reads_as_a_query_or_answers_its_twin_is_no_negative(
    folder: Path, tmp_path: Path
) -> None:
    """A query that is a document itself, and two queries of one text with different positives."""
    copy = shutil.copytree(folder / "beir", tmp_path / "beir")
    (copy / "qrels" / "dev.tsv").write_text("q6\td6\t1\n")
    text = f"what {FACTS[3]} the {ASKED[0]}"  # q3's
    add(copy, "queries.jsonl", {"_id": "twin", "text": text})
    add(copy, "qrels/train.tsv", "twin\td0\t1")
    with gzip.open(copy / "corpus.jsonl.gz", "at") as file:
        file.write(json.dumps({"_id": "asked", "title": "", "text": text}) + "\n")
    data = read_beir(copy, 0.2)
    for name in ("q3", "twin"):  # d3, d0, its copy, and the document that reads so
        assert set(data.known[data.train.ids.index(name)]) == {3, 0, 40, 41}
    assert set(data.known[data.train.ids.index("q1")]) == {0, 1, 40}


def test_spaces_around_a_query_are_no_words_of_it(folder: Path, tmp_path: Path) -> None:
    """With one, a test query was trained on, and a document that reads so was its negative."""
    copy = shutil.copytree(folder / "beir", tmp_path / "beir")
    (copy / "qrels" / "dev.tsv").write_text("q6\td6\t1\n")
    tested, asked = (f"what {FACTS[n % 5]} the {ASKED[n // 5]}" for n in (4, 3))
    add(copy, "queries.jsonl", {"_id": "again", "text": tested + " "})
    add(copy, "queries.jsonl", {"_id": "twin", "text": f" {asked}\n"})
    add(copy, "qrels/train.tsv", "again\td3\t1", "twin\td0\t1")
    with gzip.open(copy / "corpus.jsonl.gz", "at") as file:
        file.write(json.dumps({"_id": "asked", "title": "", "text": asked}) + "\n")
    data = read_beir(copy, 0.2)
    assert "again" not in data.train.ids
    assert set(data.known[data.train.ids.index("twin")]) == {3, 0, 40, 41}


BROKEN = {
    "bad line": ("queries.jsonl", '{"_id": "q1", "te', r"JSON object a line.*line 1 is"),
    "no id": ("queries.jsonl", '{"text": "a"}', "line 1 has no _id; correct or delete it"),
    "no text": ("queries.jsonl", '{"_id": "q1"}', "line 1 has no text"),
    "text": ("queries.jsonl", '{"_id": "q1", "text": 5}', "line 1 has the text 5"),
    "twice": ("queries.jsonl", '{"_id": "q", "text": "a"}\n' * 2, "line 2 repeats 'q'; rename"),
    "empty": ("corpus.jsonl", "\n", "at least one line, and is empty"),
    "document": ("qrels/train.tsv", "q1\tnobody\t1\n", "line 1 of .* names 'nobody', which is no"),
    "query": ("qrels/train.tsv", "nobody\td1\t1\n", r"must name lines of queries.jsonl"),
    "columns": ("qrels/train.tsv", "h\th\th\nq1 d1 1\n", "tabs between, and line 2 is 'q1 d1 1'"),
    "score": ("qrels/train.tsv", "h\th\th\nq1\td1\tyes\n", "line 2 is"),
    "no header": ("qrels/train.tsv", "q1\td1\tyes\nq3\td3\t1\n", "line 1 is"),
    "many": ("qrels/train.tsv", "q1\tx\t1\n" * 3, "names 'x', which is no _id .*, as do 2 more"),
    "bytes": ("queries.jsonl", b"\xff\xfe", "readable text"),
    "gzip": ("corpus.jsonl.gz", b"no gzip", "readable text"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_malformed_folders_are_refused(what: str, folder: Path, tmp_path: Path, capsys) -> None:
    name, content, message = BROKEN[what]
    made = write_beir(tmp_path / "beir", packed=name.endswith(".gz"))
    (made / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    given = ["--data", str(made), "--encoder", str(folder / "model"), "--out", str(tmp_path / "r")]
    assert command_line(["train", *given]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("refused:") and "Traceback" not in said
    with pytest.raises(ConfigError, match=message):
        read_beir(made, 0.2)
    assert not (tmp_path / "r").exists()


def test_what_is_missing_is_refused(folder: Path, tmp_path: Path) -> None:
    beir = {"data": str(folder / "beir")}
    with pytest.raises(ConfigError, match="which need --encoder, the folder of a"):
        resolve(None, beir)
    with pytest.raises(ConfigError, match="'all-MiniLM-L6-v2' is no folder; nothing is fetched"):
        resolve(None, {**beir, "encoder": "all-MiniLM-L6-v2"})
    with pytest.raises(ConfigError, match="holds neither modules.json nor config.json"):
        resolve(None, {**beir, "encoder": str(tmp_path)})
    with pytest.raises(ConfigError, match="leaves none; raise --holdout"):
        tasks.load(resolve(None, settings(folder, holdout=0.0)))
    with pytest.raises(ConfigError, match="--max-length belongs to --task retrieval"):
        resolve(None, {"data": "digits", "max_length": 64})
    with pytest.raises(ConfigError, match="--pretrained goes with images.*leave out"):
        resolve(None, settings(folder, pretrained=str(folder / "model")))  # before texts are read
    copy = shutil.copytree(folder / "beir", tmp_path / "beir")
    (copy / "corpus.jsonl.gz").unlink()
    with pytest.raises(ConfigError, match="must hold corpus.jsonl or corpus.jsonl.gz"):
        read_beir(copy, 0.2)
    shutil.rmtree(copy / "qrels")
    write_beir(tmp_path / "full")
    shutil.rmtree(tmp_path / "full" / "qrels")
    with pytest.raises(ConfigError, match="with a positive .* and has none"):
        read_beir(tmp_path / "full", 0.2)


def test_a_pipe_is_not_waited_for_and_a_bomb_not_unpacked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(folder / "beir", tmp_path / "beir")
    monkeypatch.setattr("negchain.tasks.beir.LONGEST", 1 << 12)
    read_beir(copy, 0.2)
    empty = b"\r" * 999 + b"\n"
    lines = [b" " * 5000, b'{"_id": "d", "text": "a"}\n' + empty * 1000]
    for content in map(gzip.compress, lines):
        (copy / "corpus.jsonl.gz").write_bytes(content)
        with pytest.raises(ConfigError, match="too long, or the file unpacks to too much; restore"):
            read_beir(copy, 0.2)
    shutil.copy(folder / "beir" / "corpus.jsonl.gz", copy)
    (copy / "qrels" / "dev.tsv").symlink_to("train.tsv")  # a link is fine
    assert len(read_beir(copy, 0.2).validation) == 31
    (copy / "qrels" / "dev.tsv").unlink()
    os.mkfifo(copy / "qrels" / "dev.tsv")
    with pytest.raises(ConfigError, match="must be a plain file"):
        read_beir(copy, 0.2)


def test_packed_text_goes_to_the_end_of_its_file(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder / "beir", tmp_path / "beir")
    packed, expected = copy / "corpus.jsonl.gz", read_beir(copy, 0.2)
    text = gzip.decompress(packed.read_bytes())
    parts = [text[begin : begin + 1000] for begin in range(0, len(text), 1000)]
    packed.write_bytes(b"".join(map(gzip.compress, [b"", *parts, b""])))
    assert read_beir(copy, 0.2) == expected
    whole = packed.stat().st_size
    for size in (whole - 1, whole - 25, 5):
        os.truncate(packed, size)
        with pytest.raises(ConfigError, match="ended before the end-of-stream marker.*; restore"):
            read_beir(copy, 0.2)
    packed.write_bytes(gzip.compress(text))
    os.truncate(packed, 1 << 40)  # zeros, which would be read for days
    with pytest.raises(ConfigError, match="it ends in zeros, as a file .* not fetched whole; rest"):
        read_beir(copy, 0.2)
    packed.write_bytes(gzip.compress(text) + b"more")
    with pytest.raises(ConfigError, match="Not a gzipped file .*; restore"):
        read_beir(copy, 0.2)


def test_a_folder_of_links_is_a_model(folder: Path, tmp_path: Path) -> None:
    """As the cache of the hub has them."""
    for file in (folder / "model").iterdir():
        (tmp_path / file.name).symlink_to(file)
    fits = tasks.named("retrieval").fits
    fits({"folder": str(tmp_path), "max_length": 16}, 10**6)
    tasks.named("retrieval").rebuild({"folder": str(tmp_path), "max_length": 16})


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [("config.json", {"hidden_size": 2**20}, "this bert has .* MB of weights and the file has 0"),
     ("config.json", {"num_hidden_layers": 10**7}, "layers must be at most 1000, got 10000000"),
     ("sentence_bert_config.json", {"max_seq_length": 64}, "can load and run, but .*size")],
)  # fmt: skip
def test_what_would_fail_later_is_refused_at_the_start(
    name: str, changed: dict, said: str, folder: Path, tmp_path: Path
) -> None:
    """A model as large as its config asks, and texts too long for it."""
    model = tmp_path / "model"
    described = {"folder": str(folder / "model"), "max_length": 16}
    tasks.named("retrieval").rebuild(described).model.save(str(model), create_model_card=False)
    old = json.loads((model / name).read_text())
    (model / name).write_text(json.dumps(old | changed))
    data = write_beir(tmp_path / "beir", packed=False)
    with open(data / "corpus.jsonl", "a") as file:
        file.write(json.dumps({"_id": "long", "text": "the old " * 60}) + "\n")
    given = settings(folder, encoder=str(model), data=str(data))
    with pytest.raises(ConfigError, match=said):
        tasks.load(resolve(None, given))


def test_a_model_that_cannot_be_loaded_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder / "model", tmp_path / "model")
    (copy / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="must hold a model that transformers can load"):
        tasks.named("retrieval").rebuild({"folder": str(copy), "max_length": 16})


def test_padding_that_the_model_does_not_know_is_found_at_the_start(folder: Path) -> None:
    """A token added to the tokenizer alone; a longest text that has the last word hid it."""
    encoder = TextEncoder(str(folder / "model"), 16)
    encoder.model.tokenizer.add_special_tokens({"pad_token": "[MORE]"})
    with pytest.raises(IndexError):
        Texts(encoder, ["the old text", "the"], "document")


def test_half_a_character_is_refused_by_its_line(folder: Path, tmp_path: Path) -> None:
    """JSON can spell one, as programs do that cut an emoji; the model's folder was blamed."""
    for name, line in (("corpus", 42), ("queries", 41)):
        data = write_beir(tmp_path / name, packed=False)
        with open(data / f"{name}.jsonl", "a") as file:
            file.write('{"_id": "cut", "text": "a smile \\ud83d"}\n')
        with pytest.raises(ConfigError, match=rf"{name}.jsonl must hold .* line {line} has the te"):
            read_beir(data, 0.2)


def test_what_is_judged_is_part_of_the_data(folder: Path, tmp_path: Path, capsys) -> None:
    """A run does not go on with other test queries than its start was judged by."""
    data = write_beir(tmp_path / "beir")
    run = train.run(**settings(folder, data=str(data), out=str(tmp_path / "run"), epochs=1))
    before = read_beir(data, 0.2)
    few = read_beir(data, 0.2, subset=8)
    assert few.held == before.held and few.fingerprint != before.fingerprint
    test = data / "qrels" / "test.tsv"
    test.write_text(test.read_text().replace("q4\td4", "q4\td5"))
    after = read_beir(data, 0.2)
    assert after.held != before.held and after.fingerprint != before.fingerprint
    assert command_line(["train", "--out", str(run), "--resume", "--epochs", "2"]) == 2
    assert "made on another data set" in capsys.readouterr().err
    with np.load(run / "artifacts.npz") as arrays:
        assert bytes(arrays["test_labels"]).decode() == before.held
