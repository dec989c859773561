"""Lightly: lines marked (*) differ from its SimCLR example with NTXentLoss.

Shows    lightly's transform and projection head, with negchain's loss.
Prints   the estimate of the global loss after each epoch.

    python examples/with_lightly.py
"""

import numpy as np
import torch
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms import SimCLRTransform
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

from negchain import EMC2Loss
from negchain.data import Indexed

TRANSFORM = SimCLRTransform(input_size=32, gaussian_blur=0.0)


class Digits(Dataset):
    def __init__(self, num: int) -> None:
        self.pixels, self.labels = (array[:num] for array in load_digits(return_X_y=True))

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, i: int) -> tuple[list[torch.Tensor], int]:
        grey = Image.fromarray((self.pixels[i].reshape(8, 8) * 15).astype(np.uint8))
        return TRANSFORM(grey.resize((32, 32)).convert("RGB")), int(self.labels[i])


def main(num: int = 256, epochs: int = 3) -> EMC2Loss:
    dataset = Digits(num)
    backbone = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(64))
    model = nn.Sequential(backbone, SimCLRProjectionHead(64, 64, 32))
    criterion = EMC2Loss(len(dataset), beta=10.0)  # (*) was: NTXentLoss(temperature=0.1)
    loader = DataLoader(Indexed(dataset), batch_size=32, shuffle=True, drop_last=True)  # (*)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.06)

    def encode_ids(ids: torch.Tensor) -> torch.Tensor:  # (*) what the chains hold, augmented anew
        return model(torch.stack([dataset[i][0][0] for i in ids.tolist()]))  # (*)

    for epoch in range(epochs):
        for index, (x_0, x_1), *_ in loader:  # (*) was: for (x_0, x_1), *_ in loader
            loss = criterion(model(x_0), model(x_1), index, encode=encode_ids)  # (*)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: {criterion.info['global_loss']:.3f}")
    return criterion


if __name__ == "__main__":
    main()
