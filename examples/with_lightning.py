"""Lightning: lines marked (*) differ from an InfoNCE module.

Shows    positions from the loader, the loss as a submodule (checkpoints hold its chains), a
         validation that never touches them, fine-tuning on another data set.
Prints   the exact loss of the validation set, before and after a resume.

    python examples/with_lightning.py
"""

import tempfile

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from negchain import EMC2Loss, global_loss
from negchain.data import Indexed


class Contrastive(lightning.LightningModule):
    def __init__(self, items: torch.Tensor, fine_tune: bool = False) -> None:
        super().__init__()
        self.items = items
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))
        self.loss_fn = EMC2Loss(len(items), beta=10.0)  # (*) was: InfoNCE(temperature=0.1)
        if fine_tune:  # (*) load_from_checkpoint(..., fine_tune=True): weights, but not the chains
            self.loss_fn.skip_saved_state()  # (*)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x + 0.1 * torch.randn_like(x))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        index, x = batch  # (*) was: (x,) = batch
        z_a, z_b = self.encode(x), self.encode(x)
        encode = lambda ids: self.encode(self.items[ids.cpu()].to(x))  # (*) as x is # noqa: E731
        return self.loss_fn(z_a, z_b, index, encode=encode)  # (*) was: loss_fn(z_a, z_b)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        (x,) = batch  # no positions: those of the validation set are not the chains'
        self.log("val_loss", global_loss(self.encode(x), self.encode(x), beta=10.0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def fit(module: Contrastive, path: str, resume: str | None = None, **more) -> Contrastive:
    train = DataLoader(Indexed(TensorDataset(module.items)), batch_size=16, shuffle=True)  # (*)
    valid = DataLoader(TensorDataset(module.items[:32] + 0.2), batch_size=32)
    trainer = lightning.Trainer(logger=False, enable_checkpointing=False, **more)
    trainer.fit(module, train, valid, ckpt_path=resume)
    trainer.save_checkpoint(path)
    return module


if __name__ == "__main__":
    items, path = torch.randn(128, 12), f"{tempfile.mkdtemp()}/last.ckpt"
    for epochs, resume in ((3, None), (6, path)):
        print(fit(Contrastive(items), path, resume, max_epochs=epochs).trainer.callback_metrics)
