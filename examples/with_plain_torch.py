"""A plain loop: lines marked (*) differ from an InfoNCE loop.

Shows    positions from the loader, the loss in the checkpoint beside the weights, an exact resume,
         a validation that never touches the chains.
Prints   the exact loss of the validation set after each epoch, the last two from a checkpoint.

    python examples/with_plain_torch.py
"""

import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from negchain import ContrastiveLoss, EMC2Loss, global_loss
from negchain.data import Indexed


def train(items: torch.Tensor, epochs: range, path: str) -> tuple[nn.Module, ContrastiveLoss]:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))
    loss_fn = EMC2Loss(len(items), beta=10.0)  # (*) was: InfoNCE(temperature=0.1)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    loader = DataLoader(Indexed(TensorDataset(items)), batch_size=16, shuffle=True)  # (*)
    parts = {"encoder": encoder, "optimizer": optimizer, "loss": loss_fn}  # (*) the loss is new
    if epochs.start:
        saved = torch.load(path, weights_only=True)
        torch.set_rng_state(saved.pop("rng"))
        for name, state in saved.items():
            parts[name].load_state_dict(state)

    def encode(x: torch.Tensor) -> torch.Tensor:
        return encoder(x + 0.1 * torch.randn_like(x))

    for epoch in epochs:
        for index, x in loader:  # (*) was: for (x,) in loader
            encode_ids = lambda ids: encode(items[ids])  # (*) what the chains hold # noqa: E731
            loss = loss_fn(encode(x), encode(x), index, encode=encode_ids)  # (*)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():  # no positions: those of a validation set are not the chains'
            held_out = global_loss(encoder(items[:32] + 0.2), encoder(items[:32]), beta=10.0)
        print(f"epoch {epoch + 1}: {held_out:.3f}")
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**state, "rng": torch.get_rng_state()}, path)
    return encoder, loss_fn


if __name__ == "__main__":
    path = f"{tempfile.mkdtemp()}/last.pt"
    for epochs in (range(0, 2), range(2, 4)):
        train(torch.randn(128, 12, generator=torch.Generator().manual_seed(0)), epochs, path)
