"""Inside open_clip's own training loop, with its CSV and webdataset pipelines."""

from __future__ import annotations

import argparse
import doctest
import gc
import inspect
import io
import tarfile
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("open_clip")
with warnings.catch_warnings():  # timm's and webdataset's own
    warnings.simplefilter("ignore")
    import open_clip
    from open_clip_train import data as clip_data
    from open_clip_train.train import train_one_epoch

from framework_play import assert_same, load, snapshot
from PIL import Image

from forked import fork_ranks
from negchain import EMC2Loss, ImportanceLoss, InfoNCELoss, Informed, SogCLRLoss
from negchain.integrations import open_clip as ours
from negchain.integrations.open_clip import CsvPositions, IndexedClipLoss, ShardPositions

pytestmark = pytest.mark.slow  # its imports alone take seconds

NUM, SIZE = 10, 16


def picture(number: int) -> Image.Image:
    return Image.new("RGB", (SIZE, SIZE), (10 * number, 255 - 20 * number, 128))


def preprocess(image: Image.Image) -> torch.Tensor:
    return (
        torch.tensor(list(image.convert("RGB").tobytes())).view(SIZE, SIZE, 3).permute(2, 0, 1)
        / 255
    )


TOKENIZER = open_clip.SimpleTokenizer(context_length=8)


def tokenizer(texts):
    return TOKENIZER(texts)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return open_clip.CLIP(
        embed_dim=8,
        vision_cfg={
            "layers": 1,
            "width": 32,
            "head_width": 16,
            "patch_size": 8,
            "image_size": SIZE,
        },
        text_cfg={"layers": 1, "width": 16, "heads": 2, "context_length": 8},
        output_dict=True,
    )


def arguments(train_data: str, **more) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            "train_data": train_data, "val_data": None, "csv_img_key": "filepath",
            "csv_caption_key": "title", "csv_separator": "\t", "distributed": False,
            "batch_size": 4, "workers": 0, "seed": 0, "world_size": 1, "train_num_samples": NUM,
            "train_data_upsampling_factors": None, "dataset_resampled": False, "device": "cpu",
            "precision": "fp32", "accum_freq": 1, "distill": False, "skip_scheduler": True,
            "horovod": False, "grad_clip_norm": None, "log_every_n_steps": 1, "rank": 0,
            "wandb": False, **more,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    """A CSV of ten pictures, two of which have a second caption."""
    folder = tmp_path_factory.mktemp("csv")
    lines = ["filepath\ttitle"]
    for number in range(NUM):
        picture(number).save(folder / f"{number}.png")
        lines.append(f"{folder}/{number}.png\tpicture {number}")
    lines += [f"{folder}/{number}.png\tagain {number}" for number in (3, 7)]
    (folder / "train.csv").write_text("\n".join(lines))
    return str(folder / "train.csv")


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> str:
    """Two shards whose keys repeat."""
    folder: Path = tmp_path_factory.mktemp("shards")
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(NUM // 2):
                image = io.BytesIO()
                picture(shard * NUM // 2 + number).save(image, "png")
                text = f"picture {shard} {number}".encode()
                for name, content in ((f"{number}.png", image.getvalue()), (f"{number}.txt", text)):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return f"{folder}/{{0..1}}.tar"


def csv_data(args):
    return clip_data.get_csv_dataset(args, preprocess, True, tokenizer=tokenizer)


def run(net, info, loss, args) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    train_one_epoch(net, {"train": info}, loss, 0, optimizer, None, None, None, args)


def emc2(num: int) -> EMC2Loss:
    return EMC2Loss(num, views="paired", denominator="all")


def importance(num: int) -> ImportanceLoss:
    return ImportanceLoss(num, proposals=Informed(4, alone=True), views="paired", denominator="all")


@pytest.mark.parametrize("build", [emc2, importance])
@pytest.mark.parametrize("more", [{}, {"accum_freq": 3}, {"precision": "amp_bf16"}])
def test_their_loop_trains_on_a_csv(table, build, more) -> None:
    args = arguments(table, **more)
    info, net = csv_data(args), model()
    positions = CsvPositions(info.dataloader.dataset)
    loss = IndexedClipLoss(build(len(positions)))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    run(net, loss.watch(info, positions, net), loss, args)
    assert int(loss.loss_fn.step) == 3 // args.accum_freq
    moved = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert {"logit_scale", "visual.proj", "text_projection"} <= moved
    assert loss.loss_fn.info["nonfinite_rows"] == 0


@pytest.mark.parametrize("build", [emc2, importance])
@pytest.mark.parametrize("precision", ["bf16", "pure_bf16"])
def test_pictures_are_of_the_models_type(table, build, precision) -> None:
    """Their loop gives a model in bfloat16 its pictures in bfloat16; so are those we ask for."""
    args = arguments(table, precision=precision)
    info, net = csv_data(args), model()
    positions = CsvPositions(info.dataloader.dataset)
    loss = IndexedClipLoss(build(len(positions)))
    watched = loss.watch(info, positions, net)
    if precision == "bf16":
        open_clip.model.convert_weights_to_lp(net, torch.bfloat16)
    else:
        net.to(torch.bfloat16)
    run(net, watched, loss, args)
    assert int(loss.loss_fn.step) == 3
    assert loss.loss_fn.info["nonfinite_rows"] == 0


@pytest.mark.parametrize("build", [emc2, importance])
def test_accumulated_batches_are_one_step_of_the_whole(table, build, monkeypatch) -> None:
    """Weights and state after it: carried and drawn items get their gradient once."""
    monkeypatch.setattr(CsvPositions, "texts", lambda self, ids: tokenizer(
        [f"picture {i}" for i in ids.tolist()]))  # fmt: skip

    def one_step(size: int, freq: int) -> tuple[dict, dict]:
        args = arguments(table, batch_size=size, accum_freq=freq)
        info, net = csv_data(args), model()
        net.logit_scale.requires_grad_(False)  # gets its gradient once per call, as with ClipLoss
        positions = CsvPositions(info.dataloader.dataset)
        loss = IndexedClipLoss(build(len(positions)))
        run(net, loss.watch(info, positions, net), loss, args)
        return snapshot(net), snapshot(loss)

    for whole, parts in zip(one_step(12, 1), one_step(4, 3), strict=True):
        assert_same(whole, parts, atol=1e-4)


@pytest.mark.parametrize("build", [emc2, importance])
def test_accumulation_fetches_once_and_encodes_batch_by_batch(table, build, monkeypatch) -> None:
    """Whoever accumulates has no memory for a pass of all batches, nor time to fetch in each."""
    fetched, passes = [], []
    images, encode = CsvPositions.images, open_clip.CLIP.encode_image

    def fetch(self, ids):
        fetched.extend(ids.tolist())
        return images(self, ids)

    def encoded(self, pictures, *more, **options):
        passes.append(len(pictures))
        return encode(self, pictures, *more, **options)

    args = arguments(table, batch_size=4, accum_freq=3)
    info, net = csv_data(args), model()
    positions = CsvPositions(info.dataloader.dataset)
    loss = IndexedClipLoss(build(len(positions)))
    loss.loss_fn.fill((lambda ids: torch.zeros(len(ids), 8),) * 2)
    loss.loss_fn.step += 1  # its tables are filled
    watched = loss.watch(info, positions, net)
    monkeypatch.setattr(CsvPositions, "images", fetch)
    monkeypatch.setattr(open_clip.CLIP, "encode_image", encoded)
    run(net, watched, loss, args)
    asked = 12 if build is emc2 else 4 + 1  # carried states; draws, and a row of the table
    assert len(fetched) <= asked and max(passes) <= 4
    assert not loss._kept


def test_batches_left_over_by_an_epoch_are_forgotten(table) -> None:
    args = arguments(table, accum_freq=2)  # three batches
    info, net = csv_data(args), model()
    positions = CsvPositions(info.dataloader.dataset)
    loss = IndexedClipLoss(SogCLRLoss(NUM, views="paired"))
    watched = loss.watch(info, positions)
    for _ in range(2):
        run(net, watched, loss, args)
    assert int(loss.loss_fn.step) == 2


def test_positions_belong_to_the_pictures(table) -> None:
    info = csv_data(arguments(table))
    positions = CsvPositions(info.dataloader.dataset)
    assert len(positions) == NUM and len(positions.of_row) == NUM + 2
    loss = IndexedClipLoss(SogCLRLoss(NUM, views="paired"))
    watched = loss.watch(info, positions)
    assert watched.dataloader.num_batches == len(watched.dataloader) == 3
    seen = []
    for images, _ in watched.dataloader:
        index = loss._recent[-1]
        torch.testing.assert_close(images, positions.images(index))
        loss.forget()
        seen += index.tolist()
    assert sorted(seen) == sorted([*range(NUM), 3, 7])
    texts = torch.stack([positions.texts(torch.tensor([3]))[0] for _ in range(20)])
    both = TOKENIZER(["picture 3", "again 3"])
    assert {tuple(t) for t in texts.tolist()} == {tuple(t) for t in both.tolist()}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves shards open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("resampled", [False, True])
@pytest.mark.parametrize("before", ["", "pipe:cat "])
def test_their_loop_trains_on_shards(shards, monkeypatch, before, resampled) -> None:
    shards = before + shards
    # open_clip pins webdataset <= 0.2.86; newer ones mark the end of a shard (open_clip issue 935)
    expand = clip_data.tar_file_expander
    if "eof_value" in inspect.signature(expand).parameters:
        monkeypatch.setattr(clip_data, "tar_file_expander", partial(expand, eof_value=None))
    args = arguments(shards, dataset_resampled=resampled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        info = clip_data.get_wds_dataset(args, preprocess, True, tokenizer=tokenizer)
    positions = ShardPositions(shards)
    assert len(positions) == NUM
    net = model()
    loss = IndexedClipLoss(EMC2Loss(NUM, views="paired", carried="cached"))
    with pytest.raises(ValueError, match="read in order"):
        loss.watch(info, positions, net)
    watched = loss.watch(info, positions)
    expected = torch.stack([preprocess(picture(n)) for n in range(NUM)])
    for images, _ in watched.dataloader:
        torch.testing.assert_close(images, expected[loss._recent[-1]])
        loss.forget()
    run(net, watched, loss, args)
    assert int(loss.loss_fn.step) == watched.dataloader.num_batches
    del watched, info
    gc.collect()


@pytest.mark.parametrize("build", [emc2, importance])
def test_two_processes_take_the_step_of_one(table, tmp_path, monkeypatch, build) -> None:
    """Under DDP, whose wrapper the towers of carried and drawn items go around."""
    monkeypatch.setattr(CsvPositions, "texts", lambda self, ids: tokenizer(
        [f"picture {i}" for i in ids.tolist()]))  # fmt: skip

    def step(rank: int, world: int) -> None:
        args, net = arguments(table, rank=rank, world_size=world), model()
        info = csv_data(args)
        size = (NUM + 2) // world
        loader = torch.utils.data.DataLoader(
            info.dataloader.dataset, size, sampler=range(rank * size, (rank + 1) * size)
        )
        loader.num_samples, loader.num_batches = NUM + 2, 1
        positions = CsvPositions(loader.dataset)
        loss = IndexedClipLoss(build(len(positions)))
        if world > 1:
            store = f"file://{tmp_path}/meet"
            torch.distributed.init_process_group("gloo", store, rank=rank, world_size=world)
        whole = torch.nn.parallel.DistributedDataParallel(net) if world > 1 else net
        info = loss.watch(replace(info, dataloader=loader), positions, whole)
        for _ in range(2):
            run(whole, info, loss, args)
        torch.save({**snapshot(net), **snapshot(loss)}, tmp_path / f"{rank}.pt")

    fork_ranks(2, step, 2)
    first, second = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in range(2))
    assert_same(first, second)
    step(0, 1)
    one = torch.load(tmp_path / "0.pt", weights_only=True)
    assert int(one["loss_fn.step"]) == 2
    assert_same(first, one, atol=1e-5)


@pytest.mark.parametrize("output_dict", [False, True])
def test_infonce_is_their_loss(output_dict) -> None:
    z = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    images, texts = torch.nn.functional.normalize(z, dim=-1).unbind()
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    loss = IndexedClipLoss(InfoNCELoss(NUM, views="paired"))
    loss.remember(torch.arange(6))
    values = [
        f(image_features=images, text_features=texts, logit_scale=scale, output_dict=output_dict)
        for f in (loss, open_clip.ClipLoss())
    ]
    if output_dict:
        assert values[0].keys() == values[1].keys() == {"contrastive_loss"}
        values = [v["contrastive_loss"] for v in values]
    ours_, theirs = (torch.autograd.grad(v, [z, scale], retain_graph=True) for v in values)
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(ours_, theirs)


def test_refusals(table) -> None:
    with pytest.raises(ValueError, match="views='paired'"):
        IndexedClipLoss(InfoNCELoss(NUM))
    loss = IndexedClipLoss(InfoNCELoss(NUM, views="paired"))
    info = csv_data(arguments(table))
    rows = info.dataloader.dataset  # two pictures are in two rows
    with pytest.raises(ValueError, match="built for 12 where there are 10"):
        IndexedClipLoss(emc2(len(rows))).watch(info, CsvPositions(rows), model())
    z = torch.randn(4, 8)
    with pytest.raises(ValueError, match="positions of 0"):
        loss(z, z, torch.tensor(1.0))
    with pytest.raises(ValueError, match="SigLIP"):
        loss(z, z, torch.tensor(1.0), torch.tensor(0.0))


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(ours).failed == 0


def test_the_example(tmp_path, capsys) -> None:
    example = load("with_open_clip")
    example.made_up(tmp_path, num=16)
    first = example.main(tmp_path, epochs=1)
    again = example.main(tmp_path, epochs=0, resume=True)
    assert int(first.loss_fn.step) == 2
    assert_same(snapshot(first), snapshot(again))
