"""The presets are the paper's table, and they are valid settings."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from negchain.train.config import ConfigError, TrainConfig
from negchain.train.presets import DATA_DEFAULTS, FOLDER_DEFAULTS, PRESET_HELP, PRESETS
from negchain.train.resolve import resolve

# The appendix table row by row: model, beta, b, lr, d, weight decay, cache refresh, burn-in steps.
TABLE = {
    "stl10-b32": ("resnet18", 14.28, 32, 1e-4, 512, 1e-4, 0.01024, 31),
    "stl10-b256": ("resnet18", 5, 256, 1e-3, 512, 1e-4, 0.1, 255),
    "imagenet100-b256": ("resnet50", 14.28, 256, 1.2, 128, 1e-6, None, 255),
    "stl10-subset": ("resnet18", 5, 4, 1e-3, 512, 1e-4, 0.1, 3),
}
SIZES = {"stl10-b32": 96, "stl10-b256": 96, "imagenet100-b256": 224, "stl10-subset": 96}


@pytest.mark.parametrize("name", TABLE)
def test_preset_is_the_papers_row(name: str, tmp_path: Path) -> None:
    extra = {"data": str(tmp_path)} if name.startswith("imagenet") else {}
    config = resolve(name, extra)
    model, beta, batch, lr, dim, decay, refresh, burn_in_steps = TABLE[name]
    assert (config.encoder, config.beta, config.batch_size) == (model, beta, batch)
    assert (config.lr, config.embedding_dim, config.weight_decay) == (lr, dim, decay)
    assert refresh is None or config.refresh == refresh
    assert config.burn_in * (2 * batch - 2) == burn_in_steps
    assert config.image_size == SIZES[name]
    assert (config.norm, config.denominator, config.gamma) == ("none", "negatives", 0.9)
    assert config.preset == name


def test_table_matches_the_paper_source() -> None:
    source = Path(__file__).parents[3] / "shared" / "paper" / "emc2.tex"
    if not source.is_file():
        pytest.skip("the paper's source is not part of the package")
    table = source.read_text().split("label{table:dataset}")[1].split("label{table:hyperprms}")[0]
    rows = [row.split("&") for row in table.splitlines() if row.count("&") == 8][1:]
    assert len(rows) == len(TABLE)
    for row, (_, beta, batch, _, dim, _, refresh, burn_in_steps) in zip(
        rows, TABLE.values(), strict=True
    ):
        cells = [cell.strip(" \\") for cell in row]
        assert [float(cells[i]) for i in (2, 3, 5)] == [beta, batch, dim]
        assert cells[7] == ("-" if refresh is None else f"{refresh:g}")
        assert int(re.sub(r"\D", "", cells[8])) == burn_in_steps


def test_recipe_beyond_the_table(tmp_path: Path) -> None:
    adam, lars = resolve("stl10-b32", {}), resolve("imagenet100-b256", {"data": str(tmp_path)})
    sgd = resolve("stl10-subset", {})
    assert (adam.data, sgd.data) == ("stl10-unlabeled", "stl10")  # 100,000 images; the first 500
    assert (adam.optimizer, adam.epochs, adam.warmup_epochs) == ("adam", 100, 10.0)
    assert (lars.optimizer, lars.momentum, lars.epochs, lars.projector) == ("lars", 0.9, 800, "mlp")
    assert (sgd.optimizer, sgd.momentum, sgd.subset, sgd.augmentations) == ("sgd", 0.0, 500, 2)


def test_every_field_named_exists_and_every_preset_is_described() -> None:
    names = {f.name for f in fields(TrainConfig)}
    for values in (*PRESETS.values(), *DATA_DEFAULTS.values(), FOLDER_DEFAULTS):
        assert set(values) <= names and "steps" not in values  # steps would beat a user's --epochs
    assert PRESET_HELP.keys() == PRESETS.keys()


@pytest.mark.parametrize("method", ["infonce", "dcl", "sogclr", "negcache", "emc2", "isir"])
def test_every_method_runs_from_a_preset(method: str) -> None:
    assert resolve("stl10-b256", {"method": method}).method == method


def test_unknown_preset_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'stl10-b32'"):
        resolve("stl10_b32", {})


def test_imagenet_preset_asks_for_the_folder() -> None:
    with pytest.raises(ConfigError, match="needs --data PATH"):
        resolve("imagenet100-b256", {})
