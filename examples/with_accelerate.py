"""Accelerate: lines marked (*) differ from an InfoNCE loop.

Shows    positions from the loader, the loss registered for checkpointing, an exact resume.
Prints   the estimate of the global loss after each epoch, the second time from a checkpoint.

    python examples/with_accelerate.py
"""

import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from negchain import ContrastiveLoss, EMC2Loss
from negchain.data import Indexed


def train(items: torch.Tensor, epochs: range, folder: str) -> tuple[nn.Module, ContrastiveLoss]:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))
    loss_fn = EMC2Loss(len(items), beta=10.0)  # (*) was: InfoNCE(temperature=0.1)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    loader = DataLoader(Indexed(TensorDataset(items)), batch_size=16, shuffle=True)  # (*)
    encoder, optimizer, loader = accelerator.prepare(encoder, optimizer, loader)
    loss_fn.to(accelerator.device)  # (*)
    accelerator.register_for_checkpointing(loss_fn)  # (*) its chains go where the weights go
    if epochs.start:
        accelerator.load_state(folder)

    def encode(x: torch.Tensor) -> torch.Tensor:
        return encoder(x + 0.1 * torch.randn_like(x))

    def encode_ids(ids: torch.Tensor) -> torch.Tensor:  # (*) what the chains hold
        return encode(items[ids.cpu()].to(accelerator.device))  # (*)

    for epoch in epochs:
        for index, x in loader:  # (*) was: for (x,) in loader
            loss = loss_fn(encode(x), encode(x), index, encode=encode_ids)  # (*)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        print(f"epoch {epoch + 1}: {loss_fn.info['global_loss_low']:.3f}")
    accelerator.save_state(folder)
    return accelerator.unwrap_model(encoder), loss_fn


if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    for epochs in (range(0, 2), range(2, 4)):
        train(torch.randn(128, 12, generator=torch.Generator().manual_seed(0)), epochs, folder)
