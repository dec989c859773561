"""open_clip: lines marked (*) differ from its own training script with ClipLoss.

Shows    positions from open_clip's CSV pipeline, a loss in the place of ClipLoss, a chain per
         picture and direction, the loss's state in the checkpoint. A tiny model, made-up pictures.
Prints   the estimate of the global loss and the model's logit scale.

    python examples/with_open_clip.py
"""

import tempfile
from pathlib import Path

import open_clip
import torch
from open_clip_train.data import get_csv_dataset
from open_clip_train.params import parse_args
from open_clip_train.train import train_one_epoch
from PIL import Image

from negchain import EMC2Loss
from negchain.integrations.open_clip import CsvPositions, IndexedClipLoss

VISION = {"layers": 1, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 32}
TEXT = {"layers": 1, "width": 32, "heads": 2, "context_length": 16}


def made_up(folder: Path, num: int = 48) -> None:
    for i in range(num):
        Image.new("RGB", (32, 32), (5 * i, 255 - 5 * i, 80)).save(folder / f"{i}.png")
    lines = ["filepath\ttitle", *(f"{folder}/{i}.png\tpicture number {i}" for i in range(num))]
    (folder / "train.csv").write_text("\n".join(lines))


def main(folder: Path, epochs: int = 2, resume: bool = False) -> IndexedClipLoss:
    args = parse_args([f"--train-data={folder}/train.csv", "--batch-size=8", "--workers=0"])
    args.distributed, args.device, args.rank, args.world_size = False, "cpu", 0, 1
    args.precision, args.skip_scheduler, args.distill, args.wandb = "fp32", True, False, False
    model = open_clip.CLIP(embed_dim=16, vision_cfg=VISION, text_cfg=TEXT, output_dict=True)
    tokenizer = open_clip.SimpleTokenizer(context_length=16)
    data = {"train": get_csv_dataset(args, open_clip.image_transform(32, True), True, 0, tokenizer)}
    positions = CsvPositions(data["train"].dataloader.dataset)  # (*)
    loss_fn = EMC2Loss(len(positions), views="paired", denominator="all")  # (*)
    loss = IndexedClipLoss(loss_fn).to(args.device)  # (*) was: open_clip.create_loss(args)
    data["train"] = loss.watch(data["train"], positions, model)  # (*)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = {"model": model, "optimizer": optimizer, "loss": loss}  # (*) the loss is new here
    if resume:
        for name, state in torch.load(folder / "last.pt", weights_only=True).items():
            parts[name].load_state_dict(state)
    for epoch in range(epochs):
        train_one_epoch(model, data, loss, epoch, optimizer, None, None, None, args)
        print(loss_fn.info["global_loss"], model.logit_scale.exp().item())
    torch.save({name: part.state_dict() for name, part in parts.items()}, folder / "last.pt")
    return loss


if __name__ == "__main__":
    made_up(folder := Path(tempfile.mkdtemp()))
    main(folder), main(folder, resume=True)
