"""How good are frozen features for a linear classifier; for neighbours see `neighbours`.

Shapes: M training rows, Q query rows, F features. Features are what `Encoder.features` gives, not
normalised. Nothing here touches a model: the caller puts it in `eval()` mode first.

| function | question | protocol |
|---|---|---|
| `linear_probe_paper` | the EMC² authors' code's number | 100 epochs of plain SGD, untuned |
| `linear_probe` | what can a linear classifier read? | logistic regression, tuned L2 |
| `few_label_probe` | ... from few labels? | one fixed strength, mean of 3 draws of labels |
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from negchain.neighbours import accuracy, check_features, in_top

if TYPE_CHECKING:
    from negchain.data import ImageSet

L2_GRID = tuple(10.0**e for e in range(1, -6, -1))
"""Strengths the probe tries, strong to weak, in mean cross-entropy + l2/2 |W|^2."""

FEW_LABELS_L2 = 1e-2  # a label or two per class leave none to choose a strength with
FEW_LABELS_DRAWS = 3  # one draw of so few labels says more about the draw than the features

HELD_OUT = 0.2  # share of each class's training rows that choose the strength

FEW_NUMBERS = 10_000_000
"""Training matrices up to this size are fitted with one BLAS thread: more only wait for each
other on products this small."""

MANY_PRODUCTS = 100_000_000
"""Rows times features times classes from which a fit goes to the GPU the features are on."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What `linear_probe` found."""

    accuracy: float
    """Share of test rows classified correctly, after refitting on all training rows."""
    l2: float
    """The strength chosen, in mean cross-entropy + l2/2 |W|^2 on standardised features."""
    predicted: Tensor = field(compare=False, repr=False)
    """The class given to each test row, [Q] int64."""
    top5: float
    """Share of test rows whose class is among the five most likely."""
    validation: float
    """Share of the held-out training rows classified correctly at that strength, before it."""
    held_out: int
    """How many those are."""


def embed_all(
    encode: Callable[[Tensor], Tensor],
    images: Tensor | ImageSet,
    *,
    plain: Callable[[Tensor], Tensor],
    batch_size: int,
    device: torch.device | str,
) -> Tensor:
    """Encode every image [M,C,H,W] uint8 once, in order, without gradient: -> [M,F] float32.

    `encode` is e.g. `encoder.features`, of an encoder in `eval()` mode; `plain` the transform that
    does not augment, uint8 batch -> float batch. Both work on `device`, `batch_size` at a time.

    Example:
        >>> pictures = torch.full((3, 1, 2, 2), 255, dtype=torch.uint8)
        >>> embed_all(lambda x: x.flatten(1), pictures, plain=lambda u: u / 255,
        ...           batch_size=2, device="cpu").shape
        torch.Size([3, 4])
    """
    fetch = images.__getitem__ if isinstance(images, Tensor) else images.fetch
    rows = []
    with torch.no_grad():
        for positions in torch.split(torch.arange(len(images)), batch_size):
            batch = fetch(positions).to(device, non_blocking=True)
            rows.append(encode(plain(batch)).float())
    return torch.cat(rows)


def linear_probe_paper(
    train_x: Tensor,
    train_y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    *,
    epochs: int = 100,
    lr: float = 1e-3,
    batch_size: int = 1024,
    seed: int = 0,
) -> float:
    """Test accuracy by the protocol of the EMC² authors' code, on the features as they are.

    The paper does not state it: "paper" in this name, and in `probe_paper` of records, is theirs.

    One Linear layer, SGD with momentum 0.9 and no weight decay, batches in the order of the rows,
    no schedule, the last epoch's weights. `seed` sets the initial weights. Under-trained by
    design: it depends on the scale of the features, so compare it only with itself.
    """
    check_features(train_x, test_x)
    device = train_x.device
    classes, labels = torch.unique(train_y.to(device), return_inverse=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        probe = nn.Linear(train_x.shape[1], len(classes)).to(device)  # drawn on the CPU
    optimizer = torch.optim.SGD(probe.parameters(), lr=lr, momentum=0.9)
    rows = torch.split(torch.arange(len(labels), device=device), batch_size)
    batches = [(train_x[r].float(), labels[r]) for r in rows]
    with torch.enable_grad():
        for _ in range(epochs):
            for features, targets in batches:
                optimizer.zero_grad()
                torch.autograd.backward(F.cross_entropy(probe(features), targets))
                optimizer.step()
    with torch.no_grad():
        return accuracy(classes[probe(test_x.float()).argmax(1)], test_y)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without scikit-learn's warnings about what is meant: few iterations, few rows a class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # after that many near enough
        warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
        yield


def linear_probe(train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor) -> ProbeResult:
    """Test accuracy of multinomial logistic regression with a tuned L2 penalty.

    Features are standardised by the training rows. The strength with the best accuracy on a
    stratified fifth of the training rows (always the same; the stronger of equals) is refitted on
    all of them. scikit-learn on the CPU, each fit started from the last; large problems on the
    features' GPU (`OnDevice`).

    Example:
        >>> x = torch.arange(20.0)[:, None]
        >>> linear_probe(x, (x[:, 0] > 9).long(), torch.tensor([[2.0]]), torch.tensor([0])).accuracy
        1.0
    """
    check_features(train_x, test_x)
    x, y, x_test, y_test = (t.cpu().numpy() for t in (train_x, train_y, test_x, test_y))
    held = np.zeros(len(y), dtype=bool)  # none of a class with one or two rows
    held[_stratified(y, HELD_OUT, np.random.default_rng(0), least=0)] = True
    model = _logistic(train_x, y)(max_iter=500, tol=1e-4, warm_start=True)
    with threadpool_limits(1 if x.size <= FEW_NUMBERS else None), _quietly():
        fit_x, held_x = _standardised(x[~held], x[held])
        scores = []
        for l2 in L2_GRID:
            model.set_params(C=1 / (l2 * len(fit_x))).fit(fit_x, y[~held])
            scores.append(float(model.score(held_x, y[held])))
        best = int(np.argmax(scores))
        all_x, x_test = _standardised(x, x_test)
        model.set_params(C=1 / (L2_GRID[best] * len(x)), warm_start=False).fit(all_x, y)
    predicted = torch.from_numpy(model.predict(x_test))
    likely = torch.from_numpy(model.predict_proba(x_test))
    top5 = in_top(likely, torch.from_numpy(model.classes_), torch.from_numpy(y_test), 5)
    return ProbeResult(
        accuracy=float((predicted.numpy() == y_test).mean()),
        l2=L2_GRID[best],
        predicted=predicted,
        top5=top5.double().mean().item(),
        validation=scores[best],
        held_out=int(held.sum()),
    )


def few_label_probe(
    train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor, *, share: float
) -> float:
    """Test accuracy of logistic regression on a stratified share of the labels, mean of 3 draws.

    Each class keeps `share` of its training rows, at least one. Features are standardised by all
    training rows (that takes no label); the strength is fixed.

    Example:
        >>> x = torch.arange(20.0)[:, None]
        >>> few_label_probe(x, (x[:, 0] > 9).long(), torch.tensor([[2.0]]), torch.tensor([0]),
        ...                 share=0.1)
        1.0
    """
    check_features(train_x, test_x)
    x, y, x_test, y_test = (t.cpu().numpy() for t in (train_x, train_y, test_x, test_y))
    x, x_test = _standardised(x, x_test)
    kind, generator, found = _logistic(train_x, y), np.random.default_rng(0), []
    with threadpool_limits(1), _quietly():
        for _ in range(FEW_LABELS_DRAWS):
            rows = _stratified(y, share, generator)
            model = kind(C=1 / (FEW_LABELS_L2 * len(rows)), max_iter=200, tol=1e-3)
            found.append(float(model.fit(x[rows], y[rows]).score(x_test, y_test)))
    return float(np.mean(found))


class OnDevice(LogisticRegression):  # type: ignore[misc]
    """scikit-learn's multinomial regression, minimised where the features are.

    The same loss, penalty and tolerance by torch's L-BFGS. scikit-learn's, scipy's L-BFGS-B, keeps
    its history on the CPU: of 100 classes and 2,048 features it took minutes, sums on a GPU or not.
    For three classes or more.
    """

    device = torch.device("cpu")
    coef_: NDArray[Any]
    intercept_: NDArray[Any]

    def fit(self, X: NDArray[Any], y: NDArray[Any]) -> OnDevice:
        """Minimise mean cross-entropy + |W|^2 / (2 C M); the bias is not penalised."""
        self.classes_, labels = np.unique(y, return_inverse=True)
        start = np.zeros((len(self.classes_), X.shape[1] + 1))
        if self.warm_start and hasattr(self, "coef_"):
            start = np.column_stack([self.coef_, self.intercept_])
        full = torch.autocast(self.device.type, enabled=False)  # even if the caller has it on
        with torch.inference_mode(False), torch.enable_grad(), full:
            x, targets = (torch.from_numpy(a).to(self.device) for a in (X, labels))
            w = torch.from_numpy(start).to(x).requires_grad_()
            solver = torch.optim.LBFGS(
                [w],
                max_iter=self.max_iter,
                max_eval=50 * self.max_iter,
                tolerance_grad=self.tol,
                tolerance_change=64 * np.finfo(float).eps,  # scikit-learn's
                line_search_fn="strong_wolfe",
            )

            def loss() -> float:
                fit = F.cross_entropy(F.linear(x, w[:, :-1], w[:, -1]), targets)
                total = fit + w[:, :-1].square().sum() / (2 * self.C * len(x))
                (w.grad,) = torch.autograd.grad(total, w)
                return float(total.detach())

            solver.step(loss)  # type: ignore[no-untyped-call]
        weights = w.detach().double().cpu().numpy()
        self.coef_, self.intercept_ = weights[:, :-1], weights[:, -1]
        self.n_iter_ = np.array([solver.state[w]["n_iter"]])
        self.n_features_in_ = x.shape[1]
        return self


def _logistic(features: Tensor, labels: NDArray[Any]) -> type[LogisticRegression]:
    """Which regression fits so many rows and classes."""
    classes = len(np.unique(labels))
    if not features.is_cuda or classes < 3 or features.numel() * classes < MANY_PRODUCTS:
        return LogisticRegression  # type: ignore[no-any-return]
    return type("OnDevice", (OnDevice,), {"device": features.device})


def _stratified(
    labels: NDArray[Any], share: float, generator: np.random.Generator, least: int = 1
) -> NDArray[np.int64]:
    """Rows of a random share of each class, at least `least` of each."""
    drawn = []
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        drawn.append(rows[: max(least, round(share * len(rows)))])
    return np.concatenate(drawn)


def _standardised(
    fit: NDArray[Any], other: NDArray[Any]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Both with the mean and spread of `fit` removed; constant columns become zero."""
    mean = fit.mean(0, dtype=np.float64)
    spread = fit.std(0, dtype=np.float64)
    spread[spread == 0] = 1
    return ((fit - mean) / spread).astype(np.float32), ((other - mean) / spread).astype(np.float32)
