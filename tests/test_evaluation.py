"""Probes and neighbours against scikit-learn and brute force."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors
from torch import Tensor

from negchain import evaluation
from negchain.evaluation import (
    OnDevice,
    embed_all,
    few_label_probe,
    linear_probe,
    linear_probe_paper,
)
from negchain.neighbours import (
    KNN_TEMPERATURE,
    in_top,
    knn_accuracy,
    knn_votes,
    nearest_neighbours,
    similar_pairs,
)

Split = tuple[Tensor, Tensor, Tensor, Tensor]


def clusters(seed: int = 0, spread: float = 1.0, shift: float = 0.0) -> Split:
    """300 train and 150 test points of 4 overlapping classes labelled 3, 5, 8, 9, in 10-D."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, 10, generator=generator)
    y = torch.randint(0, 4, (450,), generator=generator)
    x = centres[y] + spread * torch.randn(450, 10, generator=generator) + shift
    labels = torch.tensor([3, 5, 8, 9])[y]
    return x[:300], labels[:300], x[300:], labels[300:]


@pytest.fixture(scope="module")
def digits() -> Split:
    data = load_digits()
    x, y = torch.from_numpy(data.data).float(), torch.from_numpy(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:1000], y[:1000], x[1000:], y[1000:]


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("chunk", [7, 1024])
def test_neighbours_and_accuracy_equal_scikit_learns(metric: str, k: int, chunk: int) -> None:
    train_x, train_y, test_x, test_y = clusters(shift=50.0)  # where float32 distances cancel
    found = nearest_neighbours(train_x, test_x, k=k, metric=metric, chunk=chunk)
    # exact distances have no ties here, so the order is unique
    oracle = NearestNeighbors(n_neighbors=k, metric=metric, algorithm="brute")
    oracle.fit(train_x.double().numpy())
    expected = oracle.kneighbors(test_x.double().numpy(), return_distance=False)
    assert np.array_equal(found.numpy(), expected)

    ours = knn_accuracy(train_x, train_y, test_x, test_y, metric=metric)
    assert ours == pytest.approx(np.mean(train_y.numpy()[expected[:, 0]] == test_y.numpy()))
    assert 0.3 < ours < 1


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_one_nearest_neighbour_on_digits(digits: Split, metric: str) -> None:
    train_x, train_y, test_x, test_y = digits
    oracle = KNeighborsClassifier(1, metric=metric, algorithm="brute")
    oracle.fit(train_x.double().numpy(), train_y.numpy())
    expected = oracle.score(test_x.double().numpy(), test_y.numpy())
    assert knn_accuracy(*digits, metric=metric) == pytest.approx(expected)
    assert expected > 0.95


def test_neighbours_come_nearest_first_and_scale_matters_only_to_euclid() -> None:
    train_x = torch.tensor([[1.0, 0.0], [0.0, 10.0], [5.0, 5.0]])
    query = torch.tensor([[0.0, 1.0]])
    cosine = nearest_neighbours(train_x, query, k=3)
    euclid = nearest_neighbours(train_x, query, k=3, metric="euclidean")
    assert cosine.tolist() == [[1, 2, 0]] and euclid.tolist() == [[0, 2, 1]]


def test_logistic_regression_agrees_with_scikit_learn(digits: Split) -> None:
    train_x, train_y, test_x, test_y = digits
    ours = linear_probe(*digits)
    mean, spread = train_x.mean(0), train_x.std(0, correction=0)
    spread[spread == 0] = 1
    train, test = (((x - mean) / spread).double().numpy() for x in (train_x, test_x))
    model = LogisticRegression(C=1 / (ours.l2 * len(train)), max_iter=5000, tol=1e-8)
    expected = model.fit(train, train_y.numpy()).score(test, test_y.numpy())
    assert ours.accuracy == pytest.approx(expected, abs=0.005)
    assert ours.accuracy > 0.94


def test_a_fit_on_the_device_is_scikit_learns(digits: Split) -> None:
    """Coefficients, then the next strength from there; a probe by it; planted: another penalty."""
    x = ((digits[0] - digits[0].mean(0)) / 5).double().numpy()
    y = digits[1].numpy() + 3  # labels are no positions
    both = [kind(C=1.0, tol=1e-8, max_iter=2000, warm_start=True)
            for kind in (LogisticRegression, OnDevice)]  # fmt: skip
    for strength in (0.1, 1e-3):
        theirs, ours = (m.set_params(C=1 / (strength * len(x))).fit(x, y) for m in both)
        for name in ("coef_", "intercept_"):
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-3)
        assert (ours.predict(x) == theirs.predict(x)).all()
        assert np.abs(ours.predict_proba(x) - theirs.predict_proba(x)).max() < 1e-3
        other = OnDevice(C=2 / (strength * len(x)), tol=1e-6, max_iter=2000).fit(x, y)
        assert np.abs(other.coef_ - theirs.coef_).max() > 4e-3


@pytest.mark.parametrize("around", [torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)])
def test_a_fit_does_not_care_what_it_is_called_within(digits: Split, around) -> None:
    """Few users leave these for a probe, and scikit-learn's sums do not see them."""
    x, y = ((digits[0] - digits[0].mean(0)) / 5).numpy(), digits[1].numpy()
    plain = OnDevice(C=0.1, max_iter=20).fit(x, y)
    with around:
        found = OnDevice(C=0.1, max_iter=20).fit(x, y)
    assert np.array_equal(found.coef_, plain.coef_)


@pytest.mark.gpu
def test_large_probes_are_fitted_on_the_gpu(digits: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tuple(t.cuda() for t in digits)
    monkeypatch.setattr(evaluation, "MANY_PRODUCTS", 1)
    assert evaluation._logistic(there[0], digits[1].numpy()).device.type == "cuda"
    ours, theirs = linear_probe(*there), linear_probe(*digits)
    assert ours.accuracy == pytest.approx(theirs.accuracy, abs=0.005) and ours.l2 == theirs.l2
    few = few_label_probe(*there, share=0.1)
    assert few == pytest.approx(few_label_probe(*digits, share=0.1), abs=0.01)


def test_the_strength_is_tuned_without_the_test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many noise features, few rows: the weakest penalty loses by far."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(200) % 2
    x = torch.randn(200, 100, generator=generator)
    x[:, 0] += 3 * y
    split = x[:100], y[:100], x[100:], y[100:]
    tuned = linear_probe(*split)
    other = linear_probe(split[0], split[1], -split[2], split[3])
    assert other.l2 == tuned.l2
    monkeypatch.setattr(evaluation, "L2_GRID", (1e-5,))
    weak = linear_probe(*split)
    assert tuned.l2 > 1e-3 and tuned.accuracy > weak.accuracy + 0.05


def test_the_probe_does_not_depend_on_the_features_scale() -> None:
    train_x, train_y, test_x, test_y = clusters()
    scale = torch.logspace(-3, 3, 10)
    plain = linear_probe(train_x, train_y, test_x, test_y)
    scaled = linear_probe(train_x * scale + 5, train_y, test_x * scale + 5, test_y)
    assert scaled.l2 == plain.l2 and scaled.accuracy == pytest.approx(plain.accuracy, abs=0.01)
    assert plain.accuracy > 0.7


def test_constant_features_and_rare_classes_are_fine() -> None:
    train_x, train_y, test_x, test_y = clusters()
    train_x, test_x = F.pad(train_x, (0, 1), value=2.0), F.pad(test_x, (0, 1), value=2.0)
    train_y[0] = 77  # a class of one
    assert linear_probe(train_x, train_y, test_x, test_y).accuracy > 0.6


def test_the_papers_probe_is_its_protocol() -> None:
    train_x, train_y, test_x, test_y = clusters()
    classes, targets = train_y.unique(return_inverse=True)
    torch.manual_seed(3)
    layer = torch.nn.Linear(10, 4)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    velocity_w, velocity_b = torch.zeros_like(weight), torch.zeros_like(bias)
    for _ in range(20):
        for start in range(0, 300, 128):
            x, y = train_x[start : start + 128], targets[start : start + 128]
            error = (x @ weight.T + bias).softmax(1) - F.one_hot(y, 4)
            velocity_w = 0.9 * velocity_w + error.T @ x / len(x)
            velocity_b = 0.9 * velocity_b + error.mean(0)
            weight, bias = weight - 0.01 * velocity_w, bias - 0.01 * velocity_b
    expected = (classes[(test_x @ weight.T + bias).argmax(1)] == test_y).double().mean().item()
    ours = linear_probe_paper(
        train_x, train_y, test_x, test_y, epochs=20, lr=0.01, batch_size=128, seed=3
    )
    assert ours == pytest.approx(expected, abs=1 / 150)  # one row on the boundary may differ
    assert ours > 0.5


def test_the_papers_probe_is_deterministic_and_leaves_randomness_alone() -> None:
    split = clusters()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with torch.no_grad():  # callers evaluate without gradients
        first = linear_probe_paper(*split, epochs=2, seed=1)
    assert torch.equal(torch.rand(1), expected)
    assert first == linear_probe_paper(*split, epochs=2, seed=1)
    assert len({linear_probe_paper(*split, epochs=1, seed=s) for s in range(5)}) > 1


class Reversed:
    """An image source that holds its pictures backwards."""

    def __init__(self, pictures: Tensor) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def fetch(self, positions: Tensor) -> Tensor:
        return self.pictures.flip(0)[positions]


def test_embed_all_keeps_the_order_and_the_last_partial_batch() -> None:
    pictures = torch.arange(7 * 12, dtype=torch.uint8).reshape(7, 3, 2, 2)
    layer = torch.nn.Linear(12, 5)

    def encode(x: Tensor) -> Tensor:
        return layer(x.flatten(1))

    def plain(raw: Tensor) -> Tensor:
        assert raw.dtype == torch.uint8
        return raw.float() / 255

    expected = encode(plain(pictures)).detach()
    settings = {"plain": plain, "batch_size": 3, "device": "cpu"}
    out = embed_all(encode, pictures, **settings)
    assert not out.requires_grad and out.dtype == torch.float32
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(embed_all(encode, Reversed(pictures), **settings), expected.flip(0))
    with torch.autocast("cpu", torch.bfloat16):
        half = embed_all(encode, pictures, **settings)
    assert half.dtype == torch.float32 and not torch.equal(half, expected)
    torch.testing.assert_close(half, expected, rtol=0.02, atol=0.02)


def test_weighted_votes_equal_a_loop_over_neighbours() -> None:
    train_x, train_y, test_x, test_y = clusters()
    votes = knn_votes(train_x, train_y, test_x, ks=(1, 20, 200), chunk=7)
    classes = train_y.unique()
    unit_train, unit_test = F.normalize(train_x.double()), F.normalize(test_x.double())
    for k in (1, 20, 200):
        expected = torch.zeros(len(test_x), 4, dtype=torch.double)
        for q, row in enumerate(unit_test):
            cosine = unit_train @ row
            for i in cosine.argsort(descending=True)[:k].tolist():
                expected[q, classes == train_y[i]] += torch.exp(cosine[i] / KNN_TEMPERATURE)
        torch.testing.assert_close(votes[k], expected / expected.sum(1, keepdim=True))
    one = in_top(votes[1], classes, test_y, 1).double().mean().item()
    assert one == pytest.approx(knn_accuracy(train_x, train_y, test_x, test_y))
    assert in_top(votes[20], classes, test_y, 4).all()


def test_features_of_zeros_have_cosine_zero() -> None:
    """A picture that no unit answers to was taken for one at cosine 0.5."""
    x, y = torch.tensor([[1.0, 0.6], [0.0, 0.0], [-1.0, 0.0]]), torch.arange(3)
    query = torch.tensor([[-0.2, 1.0]])
    cosine = F.cosine_similarity(query.double(), x.double())
    assert nearest_neighbours(x, query, k=3)[0].equal(cosine.argsort(descending=True))
    votes = knn_votes(x, y, query, ks=(3,))[3][0]
    assert torch.allclose(votes, (cosine / KNN_TEMPERATURE).softmax(0))


def test_the_probe_gives_its_predictions_and_the_share_among_five(digits: Split) -> None:
    found = linear_probe(*digits)
    assert (found.predicted == digits[3]).double().mean().item() == pytest.approx(found.accuracy)
    assert found.accuracy < found.top5 < 1


def test_few_labels_are_stratified_and_more_labels_help(digits: Split) -> None:
    few, more, all_ = (few_label_probe(*digits, share=s) for s in (0.01, 0.1, 1.0))
    assert 0.3 < few < more < all_ and all_ > 0.9
    x, y = torch.eye(6).repeat(1, 2), torch.tensor([0, 1, 2, 3, 4, 5])
    assert few_label_probe(x, y, x, y, share=0.01) == 1.0  # one of each class at least


def test_many_classes_with_few_pictures_are_no_warning() -> None:
    """scikit-learn takes 30 classes in 40 rows for a regression, and said so once per fit."""
    y = torch.arange(30).repeat(2)
    x = torch.eye(30)[y]
    assert few_label_probe(x, y, x, y, share=0.01) == 1.0
    y, x = torch.cat([y[:35], y[:5]]), torch.cat([x[:35], x[:5]])
    linear_probe(x, y, x, y)


@pytest.mark.parametrize("chunk", [3, 64])
def test_similar_pairs_equal_brute_force(chunk: int) -> None:
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    x[13] = 2 * x[4]
    cosine = F.normalize(x.double()) @ F.normalize(x.double()).T
    expected = [[i, j] for i in range(20) for j in range(i + 1, 20) if cosine[i, j] >= 0.8]
    pairs, scores, count = similar_pairs(x, 0.8, chunk=chunk)
    assert sorted(pairs.tolist()) == expected and count == len(expected) > 5
    torch.testing.assert_close(scores, cosine[pairs[:, 0], pairs[:, 1]])
    assert (scores.diff() <= 0).all() and pairs[0].tolist() == [4, 13]
    kept, _, count = similar_pairs(x, 0.8, chunk=chunk, limit=2)
    assert kept.tolist() == pairs[:2].tolist() and count == len(expected)
    assert len(similar_pairs(x, -1.0, chunk=chunk)[0]) == 190  # a cosine of 0 or less counts too
    with pytest.raises(ValueError, match="between -1 and 1"):
        similar_pairs(x, 95)


def test_copies_are_similar_pairs_at_one() -> None:
    """Rounding left a third of all copies below a cosine of 1."""
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    pairs, _, count = similar_pairs(torch.cat([x, x]), 1.0)
    assert count == 200 and pairs.diff(dim=1).eq(200).all()


def test_refusals() -> None:
    train_x, train_y, test_x, test_y = clusters()
    broken = train_x.clone()
    broken[0, 0] = float("nan")
    for probe in (knn_accuracy, linear_probe, linear_probe_paper):
        with pytest.raises(ValueError, match="1 value that is not"):
            probe(broken, train_y, test_x, test_y)
