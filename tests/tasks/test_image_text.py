"""Pictures with captions: towers, the learned temperature, recall, the tool and its page."""

from __future__ import annotations

import importlib
import json
import math
import re
import shlex
import shutil
import sys
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from graphed import losses_of
from pairs_data import captioned, table, tiny_bert, tiny_clip
from scipy import stats

import negchain
from negchain import methods, tasks, train
from negchain.cli import run as command_line
from negchain.encoders import build_encoder
from negchain.losses.request import Want
from negchain.report.advice import against_baselines
from negchain.report.runs import group_runs, load_run
from negchain.report.statistics import estimates, over_start
from negchain.tasks.image_text import ImageTextTask, shared_captions
from negchain.tasks.image_text_judge import distinct, nearest
from negchain.tasks.text import TextEncoder, tokenise
from negchain.train import start, trainer
from negchain.train.config import ConfigError
from negchain.train.resolve import resolve
from negchain.train.run_folder import RunFolder, read_metrics
from negchain.train.trained import Trained

pytest.importorskip("transformers")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "image_text.md"
TINY = {"encoder": "small-cnn", "image_size": 8, "embedding_dim": 8, "batch_size": 8,
        "device": "cpu", "workers": 0, "lr": 3e-3, "probe_samples": 16,
        "holdout": 0.2}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data` and `bert`."""
    path = tmp_path_factory.mktemp("pairs")
    captioned(path / "data")
    tiny_bert(path / "bert")
    return path


def settings(made: Path, **changed: object) -> dict:
    return {**TINY, "data": str(made / "data"), "text_encoder": str(made / "bert"), **changed}


def loaded(made: Path, **changed: object) -> ImageTextTask:
    task = tasks.load(resolve(None, settings(made, **changed)))
    assert isinstance(task, ImageTextTask)
    task.place(torch.device("cpu"))
    return task


def prepared(task: ImageTextTask, folder: Path) -> trainer.Run:
    begun = start.prepare(task, lambda: RunFolder.create(folder, config="{}\n"))
    begun.folder.close()
    return begun


@pytest.fixture(scope="module")
def run(made: Path) -> Path:
    """A finished run."""
    return train.run(**settings(made, epochs=4, eval_every=2, warmup_epochs=0.0, lr=1e-2,
                                method="emc2", batch_size=12, out=str(made / "run")))  # fmt: skip


def test_the_best_encoder_is_chosen_by_validation_pictures(made: Path) -> None:
    task = loaded(made)
    judge, (encoder, _) = task.judge(), task.build()
    assert set(task.held) == {"validation", "test"}
    numbers = judge.quick(encoder)
    assert not any(name.startswith("test_") for name in numbers)
    assert judge.score({**numbers, "test_mean_recall": 2.0}) == numbers["mean_recall"]
    everything, _ = judge.thorough(encoder)
    assert {**everything, **numbers} == everything and "test_mean_recall" in everything


def test_training_helps_and_is_said(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["global_loss"] < summary["untrained_global_loss"]
    for way in ("i2t", "t2i"):
        for split in ("", "test_"):
            recall = [summary[f"{split}{way}_r{k}"] for k in (1, 5)]
            assert 0 <= recall[0] <= recall[1] <= 1
    assert summary["beta"] != pytest.approx(14.28, abs=1e-6) and summary["beta"] <= 100
    config = json.loads((run / "config.json").read_text())
    assert config["task"] == "image-text" and config["data_info"]["validation"] == 10
    assert config["data_info"]["captions"] == 2 * (48 - 10) and config["recipe"] == "mild"


def test_the_mean_recall_is_a_mean_over_pictures_with_an_interval(run: Path) -> None:
    """So the page can say what is within the noise, as it does for other tasks."""
    summary, loaded_run = json.loads((run / "summary.json").read_text()), load_run(run)
    for key in ("mean_recall", "test_mean_recall"):
        answers = loaded_run.artifacts[f"right_{key}"]
        assert answers.mean() == pytest.approx(summary[key], abs=1e-12)
        (found,) = estimates(group_runs([loaded_run]), key)
        assert found is not None and found.interval is not None
        assert found.interval[0] < summary[key] < found.interval[1]
    assert "% before" in (run / "report.html").read_text(encoding="utf-8")


def test_a_result_is_paired_with_the_start_picture_by_picture(run: Path, capsys) -> None:
    """On the page and by `evaluate`: the interval is of the differences."""
    loaded_run = load_run(run)
    for key in ("mean_recall", "test_mean_recall", "test_i2t_r1"):
        first = loaded_run.artifacts[f"before_{key}"]
        assert first.mean() == pytest.approx(loaded_run.summary[f"untrained_{key}"], abs=1e-12)
    (gain,) = over_start(group_runs([loaded_run]), "test_mean_recall")
    assert gain is not None and gain.interval is not None
    own, first = (loaded_run.artifacts[f"{n}_test_mean_recall"] for n in ("right", "before"))
    difference = own - first
    assert gain.mean == pytest.approx(difference.mean())
    count = len(difference)
    spread = 2 * stats.t.ppf(0.975, count - 1) * difference.std(ddof=1) / math.sqrt(count)
    assert gain.interval[1] - gain.interval[0] == pytest.approx(spread, rel=0.15)
    sentence = next(s for s in against_baselines(loaded_run) if s.startswith("Mean recall, test"))
    assert gain.in_points() in sentence and "[" in sentence
    assert escape(sentence) in (run / "report.html").read_text(encoding="utf-8")
    assert command_line(["evaluate", str(run), "--device", "cpu"]) == 0
    assert sentence in capsys.readouterr().out


def test_the_best_encoder_is_kept_and_patience_ends_a_run(made: Path, tmp_path: Path) -> None:
    assert resolve(None, settings(made)).patience == 3
    path = train.run(**settings(made, out=str(tmp_path / "run"), lr=1e-9, epochs=9, eval_every=1,
                                patience=2, checkpoint_every=0))  # fmt: skip
    summary = json.loads((path / "summary.json").read_text())
    lines = [line for line in read_metrics(path) if "mean_recall" in line]
    best = max(lines, key=lambda line: line["mean_recall"])  # the first of equal ones
    assert [summary[name] for name in ("best_step", "mean_recall")] == [
        best[name] for name in ("step", "mean_recall")
    ]
    assert summary["step"] == best["step"] + 2 * 4 < 9 * 4  # 38 pictures, 4 steps an epoch
    page = (path / "report.html").read_text(encoding="utf-8")
    kept = f"of step {best['step']} of {summary['step']}, the best by validation."
    assert f"What was kept is the encoder {kept if best['step'] else 'as it was.'}" in page


def test_the_page_shows_pictures_beside_captions(run: Path) -> None:
    page = (run / "report.html").read_text(encoding="utf-8")
    for text in ("Captions found for pictures", "Pictures found for captions", "R@1",
                 "What the chains hold", "on the top side", "Encoder at the start"):  # fmt: skip
        assert text in page
    assert page.count("<img") > 60


def test_evaluate_and_encode(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["evaluate", str(run), "--device", "cpu"]) == 0
    judged = json.loads((run / "evaluation.json").read_text())
    recalls = [name for name in judged if name.endswith(("_r1", "_r5", "_r10"))]
    before = [name for name in recalls if name.startswith("untrained_")]
    assert before and len(recalls) == 2 * len(before)  # each beside the start's
    assert "Mean recall, test" in capsys.readouterr().out
    now = json.loads((run / "evaluation.json").read_text())
    then = json.loads((run / "summary.json").read_text())
    assert now["test_i2t_r1"] == then["test_i2t_r1"]
    begun = [name for name in then if name.startswith("untrained_")]
    assert begun and {n: now[n] for n in begun} == pytest.approx({n: then[n] for n in begun})
    alone = shutil.copytree(run.parent / "data" / "test", tmp_path / "alone" / "test").parent
    shutil.copy(run.parent / "data" / "test.csv", alone)
    assert command_line(["evaluate", str(run), "--device", "cpu", "--data", str(alone)]) == 0
    all_of_them = json.loads((run / "evaluation.json").read_text())
    assert {n: all_of_them[n] for n in recalls if "test_" in n} == {
        n: judged[n] for n in recalls if "test_" in n
    }  # not a share of it, as validation pictures
    assert f"judged on {len(list(alone.glob('test/*')))} images" in capsys.readouterr().out
    other = shutil.copytree(run, tmp_path / "other")  # of weights that are not known here
    (other / "config.json").write_text(
        json.dumps(json.loads((run / "config.json").read_text()) | {"pretrained": "weights.pt"})
    )
    data = str(run.parent / "data")
    assert command_line(["evaluate", str(other), "--device", "cpu", "--data", data]) == 0
    assert "untrained_" not in (other / "evaluation.json").read_text()
    trained = negchain.load(run, device="cpu")
    images = trained.encode(run.parent / "data" / "test" / "004.png")
    texts = trained.encode_text(["red on yellow", "blue on black"])
    assert images.shape == (1, 8) and texts.shape == (2, 8)
    shutil.move(run.parent / "bert", run.parent / "elsewhere")
    try:  # pictures need no text encoder
        alone = negchain.load(run, device="cpu")
        assert torch.equal(alone.encode(run.parent / "data" / "test" / "004.png"), images)
        with pytest.raises(ConfigError, match="--text-encoder must be the folder"):
            alone.encode_text(["red on yellow"])
    finally:
        shutil.move(run.parent / "elsewhere", run.parent / "bert")
    out = str(run.parent / "test.npz")
    assert command_line(["embed", str(run), "--data", str(run.parent / "data" / "test"), "--out",
                         out, "--device", "cpu"]) == 0  # fmt: skip


@pytest.mark.parametrize("method", methods.trained())
def test_every_method_takes_a_step_with_the_tower_of_each_side(
    method: str, made: Path, tmp_path: Path
) -> None:
    task = tasks.load(resolve(None, settings(made, method=method)))
    begun = prepared(task, tmp_path / "run")
    begun.step.fill()
    passes: list[tuple[str, int]] = []
    inputs = task.inputs

    def spied(wants, *given):
        assert len({want.tower for want in wants}) == 1
        passes.append((wants[0].tower, sum(len(want.ids) for want in wants)))
        return inputs(wants, *given)

    task.inputs = spied  # type: ignore[method-assign]
    for number in range(2):
        begun.step(number, begun.order.batch(number))
        assert torch.isfinite(begun.step.loss)
    # carried states and uniform draws go with the batch
    size = 2 * 8 if method in ("emc2", "isir", "logq") else 8
    assert passes[:2] == [("anchors", size), ("keys", size)]
    for tower in (begun.encoder.image, begun.encoder.text.model[0].auto_model.encoder):
        assert any(w.grad is not None and w.grad.any() for w in tower.parameters())
    assert begun.encoder.log_beta.item() != pytest.approx(math.log(14.28), abs=1e-7)


def test_it_resumes_to_the_bit(made: Path, tmp_path: Path) -> None:
    options = settings(made, steps=4, checkpoint_every=2, log_every=1, eval_every=0)
    whole = train.run(**options, out=str(tmp_path / "whole"))
    half = tmp_path / "half"
    task = tasks.load(resolve(None, options))
    text = (whole / "config.json").read_text()
    begun = start.prepare(task, lambda: RunFolder.create(half, config=text))
    with begun.folder, pytest.raises(trainer.Interrupted):
        begun.train(StopsAt(begun, 2))
    assert command_line(["train", "--out", str(half), "--resume", "--quiet"]) == 0
    clock = ("seconds", "samples_per_second")
    a, b = ([{k: v for k, v in line.items() if k not in clock} for line in read_metrics(folder)]
            for folder in (whole, half))  # fmt: skip
    assert a == b
    first = [load_run(folder).artifacts["before_mean_recall"] for folder in (whole, half)]
    assert first[0].tolist() == first[1].tolist()


class StopsAt(trainer.Progress):
    """Progress that asks a run to stop."""

    def __init__(self, begun: trainer.Run, number: int) -> None:
        super().__init__(False)
        self.begun, self.number = begun, number

    def at(self, done: float, text: str | None = None) -> None:
        self.begun.stop = done >= self.number


def test_pictures_on_disk_are_the_same(made: Path) -> None:
    here, on_disk = loaded(made), loaded(made, resident_gb=0.0)
    assert here.resident and not on_disk.resident
    step, index = torch.tensor(3), torch.tensor([5, 0, 7])
    wants = [Want(index, "anchors"), Want(torch.tensor([9, 9]), "anchors")]
    (given,) = on_disk.load_ahead(index[None])
    torch.testing.assert_close(
        here.inputs(wants, step, 0), on_disk.inputs(wants, step, 0, given), atol=2e-2, rtol=0
    )


def test_captions_are_drawn_by_step_and_row(made: Path) -> None:
    task, ids = loaded(made), torch.tensor([2, 3, 2])

    def drawn(step: int, row: int = 0) -> list[list[int]]:
        return task.inputs([Want(ids, "keys")], torch.tensor(step), row)["input_ids"].tolist()

    assert drawn(0) == drawn(0)
    assert drawn(0)[1:] == [r for r in task.inputs(
        [Want(ids[1:], "keys")], torch.tensor(0), 1)["input_ids"].tolist()]  # fmt: skip
    seen = {tuple(row) for step in range(40) for row in drawn(step)[:1]}
    own = task.caption(torch.arange(task.begin[2], task.begin[3]))["input_ids"]
    assert seen == {tuple(row) for row in own.tolist()} and len(seen) == 2


def test_pictures_that_share_a_caption_are_known_positives(made: Path) -> None:
    task = loaded(made)
    captions = task.train.captions
    count = len(captions)
    told = task.batch(torch.arange(count), torch.tensor(0)).told["known"]
    for picture, row in enumerate(told.tolist()):
        shared = {
            o for o in range(count) if o != picture and set(captions[o]) & set(captions[picture])
        }
        assert shared == {other for other in row if other >= 0}
    assert shared_captions([("a",), ("b",)]) == (None, 0)
    known, crowded = shared_captions([("a",)] * 70)
    assert known is not None and known.shape == (70, 64) and crowded == 70


def test_beta_is_learned_by_its_logarithm_and_clamped(made: Path) -> None:
    task = loaded(made, method="infonce")
    encoder, _ = task.build()
    step = trainer.TrainStep(task, encoder, start.build_loss(task, encoder),
                             torch.optim.SGD(encoder.parameters(), lr=0.0))  # fmt: skip
    index = torch.arange(8)

    def loss(log_beta: float) -> float:
        with torch.no_grad():
            encoder.log_beta.fill_(log_beta)
        step(0, index)
        return step.loss.item()

    low, high = loss(2.99), loss(3.01)
    loss(3.0)
    assert encoder.log_beta.grad is not None
    assert encoder.log_beta.grad.item() == pytest.approx((high - low) / 0.02, rel=1e-2)
    loss(9.0)
    assert math.exp(encoder.log_beta.item()) == pytest.approx(100)


@pytest.mark.parametrize(("norm", "count"), [("batch", 1), ("group", 2)])
def test_batchnorm_sees_drawn_pictures_with_those_of_the_batch(
    norm: str, count: int, made: Path
) -> None:
    task = loaded(made, method="informed", norm=norm)
    encoder, _ = task.build()
    step = trainer.TrainStep(task, encoder, start.build_loss(task, encoder),
                             torch.optim.SGD(encoder.parameters(), lr=0.0))  # fmt: skip
    step.fill()
    sizes: list[int] = []
    pictures = encoder.image
    pictures.register_forward_pre_hook(
        lambda module, given: sizes.append(len(given[0])) if torch.is_grad_enabled() else None
    )
    step(0, torch.arange(8))
    assert len(sizes) == count and sum(sizes) > 8


@pytest.mark.parametrize("given", [{"method": "topk"}, {"method": "isir", "proposal": "informed"}])
def test_with_batchnorm_what_is_drawn_suits_the_captions_that_are_trained(
    given: dict[str, str], made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass that says what to draw has the pictures' own views and captions, not others."""
    task = loaded(made, norm="batch", **given)
    encoder, _ = task.build()
    step = trainer.TrainStep(task, encoder, start.build_loss(task, encoder),
                             torch.optim.SGD(encoder.parameters(), lr=0.0))  # fmt: skip
    step.fill()
    inputs, seen = task.inputs, dict[tuple[str, bool], torch.Tensor]()

    def watched(wants: list[Want], *more: Any) -> Any:
        made = inputs(wants, *more)
        first = made["input_ids"] if isinstance(made, dict) else made
        seen.setdefault((wants[0].tower, torch.is_grad_enabled()), first[:8])
        return made

    monkeypatch.setattr(task, "inputs", watched)
    step(0, torch.arange(8))
    for tower in ("anchors", "keys"):
        assert torch.equal(seen[tower, False], seen[tower, True])


def test_recall_is_that_of_a_loop(made: Path) -> None:
    task = loaded(made)
    part = replace(task.train, captions=tuple(own[: 1 + n % 2] for n, own in
                                              enumerate(task.train.captions)))  # fmt: skip
    texts, pairs = distinct(part)
    assert len(texts) == len(set(texts)) < len(pairs)
    generator = torch.Generator().manual_seed(0)
    count = len(part.captions)
    images, words = (torch.randn(n, 6, generator=generator) for n in (count, len(texts)))
    captions = nearest(images, words, pairs).right
    pictures = nearest(words, images, pairs.flip(1)).right
    for k in (1, 5, 10):
        right = [
            any(texts[t] in part.captions[i] for t in (images[i] @ words.T).topk(k).indices)
            for i in range(count)
        ]
        assert captions[:, :k].any(1).tolist() == right
        right = [
            any(text in part.captions[i] for i in (words[t] @ images.T).topk(k).indices)
            for t, text in enumerate(texts)
        ]
        assert pictures[:, :k].any(1).tolist() == right


def test_the_text_tower_averages_words_and_no_padding(made: Path) -> None:
    tower = TextEncoder(str(made / "bert"), 77, 8).eval()
    folder = str(made / "bert")
    both, cut = tokenise(folder, ["red on blue", "a picture with red on the top side"])
    assert cut == 0 and tokenise(folder, ["red " * 99])[1] == 1
    alone, _ = tokenise(folder, ["red on blue"])
    torch.testing.assert_close(tower(both)[:1], tower(alone), atol=1e-5, rtol=1e-5)
    hidden = tower.model[0].auto_model(alone["input_ids"].long()).last_hidden_state
    torch.testing.assert_close(tower(alone), tower.project(hidden.mean(1)))
    tower.train()
    assert torch.equal(tower(alone), tower(alone))  # no dropout


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_the_text_tower_is_that_of_sentence_transformers(pooling, made: Path, tmp_path) -> None:
    """Whatever its pooling; what it does to lengths is left to the loss."""
    library = pytest.importorskip("sentence_transformers")
    modules = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    words = modules.Transformer(str(made / "bert"))
    model = library.SentenceTransformer(
        modules=[words, modules.Pooling(32, pooling_mode=pooling), modules.Normalize()],
        device="cpu",
    )
    model.save_pretrained(str(tmp_path))
    tower = TextEncoder(str(tmp_path), 77, 32).eval()
    torch.nn.init.eye_(tower.project.weight)
    texts = ["red on blue", "a picture with red on the top side"]
    mine = tower(tokenise(str(tmp_path), texts)[0])
    assert not torch.allclose(mine.norm(dim=1), torch.ones(2))
    mine = torch.nn.functional.normalize(mine, dim=-1)
    torch.testing.assert_close(mine, torch.from_numpy(model.encode(texts)), atol=1e-5, rtol=1e-4)


def test_open_clip_from_its_config(made: Path, tmp_path: Path) -> None:
    open_clip = pytest.importorskip("open_clip")
    config = tiny_clip(tmp_path / "tiny.json")
    theirs = open_clip.model.CLIP(**json.loads(config.read_text())).eval()
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    changed = {**TINY, "data": str(made / "data"), "encoder": str(config), "epochs": 1}
    task = tasks.load(resolve(None, changed))
    task.place(torch.device("cpu"))
    encoder, _ = task.build()
    task.start_from(encoder, str(tmp_path / "weights.pt"))
    encoder.eval()
    pixels, tokens = torch.randn(2, 3, 16, 16), task.caption(torch.arange(3))
    torch.testing.assert_close(encoder.image(pixels), theirs.encode_image(pixels))
    torch.testing.assert_close(encoder.text(tokens), theirs.encode_text(tokens["input_ids"].long()))
    again = tasks.named("image-text").rebuild(encoder.encoder_config)
    again.load_state_dict(encoder.state_dict())
    assert again.encoder_config == encoder.encoder_config
    begun = prepared(task, tmp_path / "run")
    begun.step(0, begun.order.batch(0))
    assert torch.isfinite(begun.step.loss)


def test_towers_are_rebuilt_and_started_from(made: Path, run: Path) -> None:
    task = loaded(made)
    encoder, _ = task.build()
    again = tasks.named("image-text").rebuild(json.loads(json.dumps(encoder.encoder_config)))
    again.load_state_dict(encoder.state_dict())
    assert again.encoder_config == encoder.encoder_config
    assert task.start_from(encoder, str(run)).endswith("both towers")
    bert = torch.load(run / "checkpoints" / "best.pt", weights_only=True)["state"]["encoder"]
    assert encoder.state_dict().keys() == bert.keys()
    torch.save(again.image.backbone.state_dict(), made / "cnn.pt")
    assert "tensors of the backbone" in task.start_from(encoder, str(made / "cnn.pt"))


def test_a_description_too_large_for_its_file_is_refused(made: Path, tmp_path: Path) -> None:
    """Nothing is built: each of these would take terabytes or hours."""
    fits = tasks.named("image-text").fits
    described = json.loads(json.dumps(loaded(made).build()[0].encoder_config))
    fits(described, 10**6)
    config = json.loads((made / "bert" / "config.json").read_text())
    for name, more in (("wide", {"hidden_size": 2**20}), ("deep", {"num_hidden_layers": 10**12})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | more))
    clip = {"open_clip": json.loads(tiny_clip(tmp_path / "tiny.json").read_text())}
    for path, value in (
        (("text", "folder"), str(tmp_path / "wide")),
        (("text", "folder"), str(tmp_path / "deep")),
        (("image", "name"), "resnet50"),
        (("open_clip", "text_cfg", "width"), 2**20),
        (("open_clip", "vision_cfg", "layers"), [10**12]),
    ):
        changed = json.loads(json.dumps(clip if path[0] == "open_clip" else described))
        inner = changed
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
        with pytest.raises(ValueError, match="of weights and the file has|at most 1000"):
            fits(changed, 10**6)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"text_encoder": None}, "--text-encoder must be the folder .* none was given; nothing is"),
        ({"text_encoder": "bert-base"}, "'bert-base' is no folder; nothing is fetched"),
        ({"beta": 200.0}, "kept at most 100, got 200; start lower"),
        ({"encoder": "resnet1"}, "--encoder .* got 'resnet1'; did you mean"),
        ({"encoder": "x.json"}, "has a text encoder of its own; leave out --text-encoder"),
        ({"encoder": "x.json", "text_encoder": None}, "there is no 'x.json'"),
        ({"augmentations": 2}, "--augmentations belongs to --task images"),
        ({"data": "digits"}, "--text-encoder belongs to --task image-text"),
        ({"data": "nowhere", "task": "image-text"}, "there is no 'nowhere'; check the path"),
    ],
)
def test_settings_that_are_refused(changed: dict, said: str, made: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(None, settings(made, **changed))


def test_all_methods_have_clips_denominator_unless_theirs_is_built_in(made: Path) -> None:
    """As in the table of docs/image_text.md; a comparison would else be of two objectives."""
    found = {m: resolve(None, settings(made, method=m)) for m in ("infonce", "sogclr", "emc2")}
    assert {config.denominator for config in found.values()} == {"all"}
    assert resolve(None, settings(made, method="dcl")).denominator == "negatives"


def test_what_else_is_refused(made: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ConfigError, match="must hold a model that transformers can load"):
        TextEncoder(str(tmp_path), 77, 8)
    (made / "data" / "train" / "bad.png").write_bytes(b"no picture")
    rows = [("image", "caption"), ("train/000.png", "one"), ("train/bad.png", "two")]
    alone = table(made / "data" / "few.csv", rows)
    with pytest.raises(ValueError, match="at least 2 readable images"):
        loaded(made, data=str(alone))
    alone.unlink()
    with pytest.raises(ConfigError, match="only a run of --task image-text has a text encoder"):
        config = resolve(None, {"data": "digits"})
        encoder = tasks.named("images").rebuild(
            build_encoder("small-cnn", image_size=8, channels=1).encoder_config
        )
        Trained(encoder, config, torch.device("cpu")).encode_text(["a"])


def test_a_transformers_that_cannot_be_imported_is_said_in_a_sentence(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(made / "bert")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="--text-encoder .* import of transformers halted"):
        tokenise(folder, ["a"])


def test_captions_too_long_for_the_model_are_refused_before_the_first_step(
    made: Path, tmp_path: Path
) -> None:
    """Where the tokenizer does not say what the model takes."""
    bert = tiny_bert(tmp_path / "bert")
    settled = json.loads((bert / "tokenizer_config.json").read_text())
    (bert / "tokenizer_config.json").write_text(json.dumps(settled | {"model_max_length": 99}))
    task = loaded(made, text_encoder=str(bert))
    task.build()
    captioned(tmp_path / "data")
    with open(tmp_path / "data" / "train.csv", "a") as file:
        file.write("000.png," + "red " * 60)
    task = loaded(made, text_encoder=str(bert), data=str(tmp_path / "data"))
    with pytest.raises(ConfigError, match=r"--text-encoder .*load and run, but .*size"):
        task.build()


COMMANDS = re.findall(r"^negchain .*?[^\\]$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize(
    "which", ["train", "evaluate", pytest.param("compare", marks=pytest.mark.slow)]
)
def test_the_commands_of_the_page(
    which: str, made: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand there, on a few tiny pictures."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flickr8k").symlink_to(made / "data")
    (tmp_path / "minilm").symlink_to(made / "bert")
    (tmp_path / "runs").mkdir()
    if which != "train":
        (tmp_path / "runs" / "flickr8k").symlink_to(run)
    tiny = "--encoder small-cnn --image-size 8 --batch-size 8 --epochs 1 --device cpu --workers 0"
    chosen = [c for c in COMMANDS if c.startswith(f"negchain {which} ")]
    assert chosen
    for command in chosen:
        words = shlex.split(command.replace("\\\n", " "))[1:]
        small = shlex.split(tiny) if which != "evaluate" else ["--device", "cpu"]
        assert (
            command_line([*words, *small, *(["--seeds", "1"] if which == "compare" else [])]) == 0
        )


def after_steps(made: Path, folder: Path, graph: bool, method: str) -> tuple:
    """Losses of some steps on a GPU in float32 and beta at the end; whether it was a graph."""
    task = tasks.load(
        resolve(None, settings(made, device="cuda", graph=graph, method=method, norm="batch",
                               precision="float32", warmup_epochs=0.0, lr=1e-3))
    )  # fmt: skip
    run = prepared(task, folder)
    losses, recorded = losses_of(run, graph)
    return [*losses, run.encoder.beta().item()], recorded


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["infonce", "emc2", "isir", "sogclr", "informed", "topk"])
def test_a_step_is_a_cuda_graph_that_does_what_the_eager_one_does(
    made: Path, tmp_path: Path, method: str
) -> None:
    plain = after_steps(made, tmp_path / "plain", False, method)
    graph = after_steps(made, tmp_path / "graph", True, method)
    assert graph[1] and not plain[1]
    assert len(set(plain[0])) == len(plain[0])  # it learns, or draws: no two steps are the same
    assert graph[0] == pytest.approx(plain[0], rel=2e-3)


@pytest.mark.gpu
def test_a_text_encoder_that_asks_the_device_is_trained_without_a_graph(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = TextEncoder.forward

    def asking(self: TextEncoder, tokens: dict) -> torch.Tensor:
        assert int(tokens["input_ids"].max()) > 0
        return whole(self, tokens)

    plain = after_steps(made, tmp_path / "plain", False, "emc2")
    monkeypatch.setattr(TextEncoder, "forward", asking)
    with pytest.warns(UserWarning, match="no CUDA graph"):
        asked = after_steps(made, tmp_path / "asked", True, "emc2")
    assert not asked[1]
    assert asked[0] == pytest.approx(plain[0], rel=2e-3)
