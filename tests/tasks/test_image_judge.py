"""What encoders of images are chosen by, and what their results are held against."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from negchain import tasks
from negchain.data import DataBundle, ImageSet
from negchain.neighbours import accuracy
from negchain.tasks.image_judge import ImageJudge, OnlineProbe
from negchain.tasks.images import ImageTask, load_images
from negchain.train import start
from negchain.train.resolve import resolve
from negchain.train.run_folder import RunFolder

SETTINGS = {"data": "digits", "probe_samples": 16, "encoder": "small-cnn", "device": "cpu"}


@pytest.fixture(scope="module")
def digits() -> ImageTask:
    config = resolve(None, SETTINGS)
    return ImageTask(config, load_images(config))


def with_data(task: ImageTask, **parts: ImageSet | None) -> ImageTask:
    data: DataBundle = replace(task.data, **parts)
    made = ImageTask(task.config, data)
    made.place(torch.device("cpu"))
    return made


def relabelled(images: ImageSet | None, labels: Tensor) -> ImageSet:
    assert images is not None
    return replace(images, labels=labels)


def test_no_test_picture_has_a_say_in_what_is_kept(digits: ImageTask) -> None:
    """Other test labels change the test numbers, and not the score."""
    test = digits.data.test
    assert test is not None and test.labels is not None
    encoder, _ = digits.build()
    other = with_data(digits, test=relabelled(test, test.labels.roll(1)))
    found, wrong = (task.judge().quick(encoder) for task in (digits, other))
    assert wrong["probe"] < 0.3 < 0.9 < found["probe"]
    for task in (digits, other):
        for numbers in (found, wrong, task.judge().before(encoder)[0]):
            assert task.judge().score(numbers) == found["probe_validation"] > 0.9
            assert task.judge().score_by(numbers) == "probe_validation"


def test_validation_pictures_are_no_part_of_the_fit(digits: ImageTask) -> None:
    """Were they, a probe on 24 pictures of random classes would know all of them."""
    train = digits.data.train
    assert train is not None
    labels = torch.randint(10, (len(train),), generator=torch.Generator().manual_seed(0))
    task = with_data(digits, train=relabelled(train, labels))
    encoder, _ = task.build()
    assert task.judge().quick(encoder)["probe_validation"] < 0.25


@pytest.mark.parametrize("count, by", [(240, "global_loss"), (260, "probe_validation")])
def test_few_pictures_choose_nothing(digits: ImageTask, count: int, by: str) -> None:
    """A fifth of 240 are 48: one more right is two points. The exact loss decides."""
    train = digits.data.train
    assert train is not None
    labels = torch.arange(count) % 2
    some = relabelled(train.select(torch.arange(count)), labels)
    task = with_data(digits, train=some, test=relabelled(some, labels))
    encoder, _ = task.build()
    judge = task.judge()
    for numbers in (judge.quick(encoder), judge.thorough(encoder)[0]):
        assert judge.score_by(numbers) == by and "probe" in numbers
        assert judge.score(numbers) == (-numbers[by] if by == "global_loss" else numbers[by])


def test_without_labels_the_exact_loss_decides(digits: ImageTask) -> None:
    task = with_data(digits, train=None, test=None)
    encoder, _ = task.build()
    numbers = task.judge().quick(encoder)
    assert task.judge().score_by(numbers) == "global_loss"
    assert task.judge().score(numbers) == -numbers["global_loss"]


def test_chance_is_the_best_constant_answer_on_the_test_pictures(digits: ImageTask) -> None:
    """It was 0 where the commonest class of the training pictures has no test picture."""
    train, test = digits.data.train, digits.data.test
    assert train is not None and test is not None
    trained = torch.arange(len(train)) % 5
    trained[: len(train) // 2] = 7
    tested = torch.arange(len(test)) % 4
    task = with_data(digits, train=relabelled(train, trained), test=relabelled(test, tested))
    encoder, _ = task.build()
    found = task.judge().before(encoder)[0]["chance"]
    assert found == max(accuracy(torch.full_like(tested, c), tested) for c in range(8)) > 0.25


def test_no_picture_is_its_own_neighbour(digits: ImageTask) -> None:
    """Of two copies the other one was dropped where it came first."""
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    places = torch.arange(24, dtype=torch.uint8).view(24, 1, 1, 1)
    images = ImageSet(tuple(map(str, range(24))), None, places)
    found = ImageJudge(digits)._neighbours(images, x, images, x)
    queries, near = found["neighbour_queries"].flatten(), found["neighbour_images"].flatten(1)
    assert not (near == queries[:, None]).any()
    assert (near[:, 0] == (queries.int() + 12) % 24).all()
    assert torch.allclose(found["neighbour_similarities"][:, 0], torch.tensor(1.0))


def test_similarity_is_of_directions_however_short_the_features_are(digits: ImageTask) -> None:
    """The nearest are found among unit vectors, which are those of features times 2**-32 too."""
    images = digits.data.train
    assert images is not None
    x = torch.randn(len(images), 8, generator=torch.Generator().manual_seed(0))
    found, short = (ImageJudge(digits)._neighbours(images, y, images, y) for y in (x, x * 2**-32))
    assert all(torch.equal(found[name], short[name]) for name in found)


def test_the_online_probe_ignores_what_has_no_label() -> None:
    labels = torch.tensor([0, 1, -1, -1])
    probe = OnlineProbe(labels, dim=2)
    probe.learn(torch.eye(2), torch.tensor([2, 3]))
    assert not probe.weight.any() and float(probe.accuracy) == 0
    for _ in range(20):
        probe.learn(torch.eye(2)[[0, 1, 0]], torch.tensor([0, 1, 3]))
    assert float(probe.accuracy) > 0.9 and probe.weight.any()


def test_the_online_probe_learns_while_the_encoder_does(tmp_path: Path) -> None:
    config = resolve(None, {"device": "cpu", "subset": 1000})
    run = start.prepare(tasks.load(config), lambda: RunFolder.create(tmp_path / "r", config="{}"))
    found = []
    with run.folder:
        for step in range(40):
            run.step(step, run.order.batch(step))
            found.append(float(run.task.watched["online_probe"]))
        run.done = 40
        run._save()
        again = start.prepare(tasks.load(config), lambda: run.folder)
        again.restore()
    assert found[0] < 0.4 and found[-1] > 0.6
    pairs = zip(run.task.state_tensors(), again.task.state_tensors(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
