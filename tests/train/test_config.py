"""A config is valid or refused in one sentence; nothing in between."""

import inspect
import json
import math
import os
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from negchain import MH, EMC2Loss, InBatch, tasks, train
from negchain.methods import METHODS, LossSettings, Method, trained
from negchain.train.config import (
    ConfigError,
    TrainConfig,
    from_saved,
    same_run,
    setting_of,
)
from negchain.train.presets import OPTIMIZER_LR, PRESETS
from negchain.train.resolve import continued, resolve
from negchain.train.run_folder import load_run_config
from negchain.train.step import build_loss

HINTS = get_type_hints(TrainConfig)
BUILT_IN_DATA = ("digits", "cifar10", "stl10", "stl10-unlabeled")


def refusal(preset: Any = None, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(preset, overrides)
    return one_sentence(str(caught.value))


def one_sentence(message: str) -> str:
    assert message and "\n" not in message and len(message) < 600
    assert message.isprintable()
    return message


# ---- help and defaults ------------------------------------------------------------------------


def test_every_field_has_help_that_fits_the_screen() -> None:
    for field in fields(TrainConfig):
        text = setting_of(field.name).help
        assert text.endswith(".") and "\n" not in text and len(text) < 100
    assert "beta = 1/temperature" in setting_of("beta").help


def test_the_fixed_options_of_the_command_line_are_fields() -> None:
    fixed = (
        "data method batch_size epochs steps beta burn_in carried denominator encoder norm "
        "optimizer lr seed device out preset"
    )
    assert set(fixed.split()) <= HINTS.keys()


def test_defaults_follow_the_data(tmp_path: Path) -> None:
    plain = replace(TrainConfig(), root=os.path.abspath("data"), proposal="both")
    assert resolve(None, {}) == plain
    cifar = resolve(None, {"data": "cifar10"})
    assert (cifar.encoder, cifar.recipe, cifar.image_size) == ("resnet18", "cifar", 32)
    folder = resolve(None, {"data": str(tmp_path)})
    assert (folder.encoder, folder.recipe, folder.image_size) == ("resnet18", "simclr-stl10", 96)


def test_layers_in_order() -> None:
    """Field default < data set's default < preset < what the user gave; None is not given."""
    config = resolve("stl10-b32", {"beta": 7, "epochs": None})
    assert config.beta == 7.0 and type(config.beta) is float
    assert config.lr == 1e-4  # preset, over 3e-4 for stl10
    assert config.probe_samples == 2000  # stl10, over 1000
    assert config.epochs == 100
    assert resolve("stl10-b32", {"preset": "stl10-b256"}).preset == "stl10-b256"


def test_zero_takes_back_a_preset(tmp_path: Path) -> None:
    config = resolve("stl10-subset", {"augmentations": 0, "subset": 0, "image_size": 0})
    assert config.augmentations is config.subset is config.image_size is None


def test_defaults_that_depend_on_other_choices() -> None:
    assert resolve(None, {"optimizer": "sgd"}).lr == 0.05
    assert resolve(None, {"optimizer": "lars", "batch_size": 256}).lr == 1.2  # the paper's rate
    assert resolve(None, {"optimizer": "sgd", "lr": 0.3}).lr == 0.3
    assert resolve("stl10-b32", {"optimizer": "adam"}).lr == 1e-4
    assert set(OPTIMIZER_LR) == set(get_args(get_type_hints(TrainConfig)["optimizer"]))
    photographs = {"data": "stl10", "method": "negcache"}
    assert resolve(None, photographs).lr == 1e-4  # a third of the others'
    assert resolve(None, {**photographs, "method": "dcl"}).lr == 3e-4
    assert resolve(None, {**photographs, "lr": 3e-4}).lr == 3e-4
    assert resolve("stl10-b256", {"method": "negcache"}).lr == 1e-3  # a preset's stays
    assert resolve(None, {"method": "negcache"}).lr == 1e-3  # digits name none
    assert resolve(None, {"epochs": 2}).warmup_epochs == 0.2
    assert resolve(None, {"method": "infonce"}).denominator == "all"
    assert resolve(None, {"method": "dcl", "denominator": "negatives"}).method == "dcl"


def test_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pics").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve(None, {"data": "pics"}).data == str(tmp_path / "pics")


# ---- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"method": "emc"}, "did you mean 'emc2'"),
        ({"methd": "emc2"}, "did you mean 'method'"),
        ({"data": "cifar-10"}, "did you mean cifar10"),
        ({"encoder": "resnt18"}, "did you mean 'resnet18'"),
        ({"optimizer": "adamW"}, "did you mean 'adamw'"),
        ({"recipe": "simclr-stl"}, "did you mean 'simclr-stl10'"),
        ({"preset": "stl10-b23"}, "did you mean 'stl10-b32'"),
    ],
)
def test_unknown_names_get_the_nearest(overrides: dict[str, Any], words: str) -> None:
    assert words in refusal(**overrides)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 1),
        ("batch_size", 2.5),
        ("batch_size", True),
        ("batch_size", "64"),
        ("epochs", 0),
        ("steps", 0),
        ("beta", 0),
        ("beta", float("nan")),
        ("beta", float("inf")),
        ("beta", 10**400),
        ("burn_in", 1.5),
        ("burn_in", -0.1),
        ("burn_in", float("inf")),
        ("burn_in", True),
        ("gamma", 0.0),
        ("lr", -1e-3),
        ("weight_decay", float("nan")),
        ("augmentations", 1),
        ("image_size", 7),
        ("seed", -1),
        ("seed", 2**32),
        ("keep_checkpoints", 0),
        ("graph", 1),
        ("out", ""),
        ("out", "a\0b"),
        ("data", ["digits"]),
    ],
)
def test_wrong_values_are_named(name: str, value: Any) -> None:
    method = {"gamma": "sogclr"}.get(name, "emc2")
    assert "--" + name.replace("_", "-") in refusal(**{"method": method, name: value})


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"method": "dcl", "carried": "encode"}, ("--carried", "--method emc2 or isir")),
        ({"method": "sogclr", "proposal": "batch"}, ("--proposal", "--method")),
        (
            {"method": "isir", "proposal": "both", "augmentations": 2},
            ("--proposal both", "--augmentations", "--method isir"),
        ),
        ({"proposal": "informed", "augmentations": 2}, ("--proposal informed", "--augmentations")),
        ({"method": "isir", "burn_in": 0.5}, ("--burn-in", "--method emc2")),
        ({"method": "emc2", "gamma": 0.9}, ("--gamma", "--method sogclr")),
        ({"method": "emc2", "refresh": 0.1}, ("--refresh", "--proposal informed")),
        ({"method": "infonce", "denominator": "negatives"}, ("--denominator", "--method dcl")),
        ({"method": "dcl", "denominator": "all"}, ("--denominator", "--method infonce")),
        ({"epochs": 3, "steps": 30}, ("--epochs", "--steps")),
        ({"epochs": 3, "warmup_epochs": 4}, ("--warmup-epochs 4", "--epochs 3")),
        ({"optimizer": "adam", "momentum": 0.5}, ("--momentum", "--optimizer sgd or lars")),
        ({"data": "digits", "download": True}, ("--download", "--data cifar10 or stl10")),
        ({"batch_size": 64, "subset": 32}, ("--batch-size 64", "--subset")),
    ],
)
def test_contradictions_name_both_sides(overrides: dict[str, Any], named: tuple[str, ...]) -> None:
    message = refusal(**overrides)
    assert all(word in message for word in named), message
    assert any(word in message for word in ("leave out", "choose", "give one", "lower")), message


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, 62),
        ({"proposal": "batch"}, 31),
        ({"proposal": "informed"}, 63),
        ({"augmentations": 2}, 62),
        ({"augmentations": 2, "proposal": "batch"}, 31),
    ],
)
def test_a_burn_in_from_1_on_is_a_number_of_proposals(given: dict[str, Any], steps: int) -> None:
    """The paper's P, less than R; the loss that is built knows the same R."""
    settings = {"method": "emc2", "batch_size": 32, "subset": 64, **given}
    config = resolve(None, {**settings, "burn_in": steps - 1})
    assert config.burn_in == steps - 1
    saved = from_saved(json.loads(json.dumps(asdict(config))))
    assert continued(saved, {"burn_in": steps - 1}) == saved == config
    with pytest.raises(ConfigError, match=f"--burn-in was {steps - 1}.0 and is now 0.5"):
        continued(saved, {"burn_in": 0.5})
    message = refusal(**settings, burn_in=steps)
    words = ("--burn-in", f"got {steps},", "--batch-size 32", f"has {steps};", config.proposal)
    assert all(word in message for word in words), message
    task = tasks.load(config)
    loss_fn = build_loss(task, SimpleNamespace(embedding_dim=8))
    assert loss_fn.kernel.burn_in == steps - 1
    loss_fn.check_batch_size(32)
    loss_fn.kernel = replace(loss_fn.kernel, burn_in=steps)
    with pytest.raises(ValueError, match=f"offers {steps} at batch size 32"):
        loss_fn.check_batch_size(32)


def test_1_is_a_step_and_less_a_share() -> None:
    assert resolve(None, {"burn_in": 1}) == resolve(None, {"burn_in": 1.0})
    assert type(resolve(None, {"burn_in": 1}).burn_in) is float
    assert resolve(None, {"burn_in": 0.99}).burn_in == 0.99
    assert resolve(None, {"burn_in": 0}).burn_in == 0
    refusal(burn_in=1, batch_size=2, proposal="batch")  # of one proposal
    words = "below 1 their share, from 1 their number (the paper's P)"
    assert words in setting_of("burn_in").help


def test_the_papers_burn_in_can_be_asked_for() -> None:
    """P = b - 1 of its table; of as many proposals as the presets have it is refused."""
    for name, steps in (("stl10-b32", 31), ("stl10-b256", 255), ("stl10-subset", 3)):
        assert resolve(name, {"burn_in": steps, "proposal": "both"}).burn_in == steps
    assert "has 31;" in refusal("stl10-b32", burn_in=31)


def test_a_burn_in_that_another_method_leaves_unused_is_not_refused() -> None:
    saved = TrainConfig(method="emc2", burn_in=127.0, proposal="both")
    assert resolve(None, {"method": "dcl"}, saved).burn_in == 127
    with pytest.raises(ConfigError, match="has 126;"):
        resolve(None, {"batch_size": 64}, saved)


def test_a_method_of_ones_own_is_asked_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(s: LossSettings) -> EMC2Loss:
        return EMC2Loss(s.num_samples, s.beta, MH(burn_in=9), proposals=InBatch())

    own = Method("own", "own", ("#000", "#fff"), build)
    monkeypatch.setitem(METHODS, "own", own)
    given = {"method": "own", "subset": 64, "batch_size": 8, "steps": 1, "device": "cpu"}
    with pytest.raises(ValueError, match="burn_in .* got 9 steps"):
        train.run(**given, out=str(tmp_path / "run"))
    assert not list(tmp_path.iterdir())


def test_both_views_are_refused_for_the_reason_there_is(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("image,caption\n")
    message = refusal(data=str(tmp_path), method="emc2", proposal="both")
    assert "--proposal both" in message and "captions" in message
    assert "--augmentations" not in message  # there emc2 is offered both


@pytest.mark.parametrize(
    ("preset", "given", "proposal"),
    [
        (None, {"method": "isir"}, "both"),
        (None, {"method": "emc2"}, "both"),
        (None, {"method": "emc2", "proposal": "batch"}, "batch"),
        (None, {"method": "isir", "augmentations": 2}, "batch"),
        (None, {"method": "emc2", "augmentations": 2}, "both"),
        ("stl10-b32", {"method": "emc2", "augmentations": 2}, "both"),
        (None, {"method": "emc2", "augmentations": 2, "proposal": "batch"}, "batch"),
        (None, {"method": "dcl"}, "batch"),
        ("stl10-b32", {"method": "isir"}, "batch"),
    ],
)
def test_both_views_are_proposed_where_that_is_the_default(preset, given, proposal) -> None:
    assert resolve(preset, given).proposal == proposal


@pytest.mark.parametrize(
    ("first", "then", "proposal"),
    [
        ({"method": "isir", "proposal": "batch"}, {}, "batch"),
        ({"method": "emc2", "proposal": "batch"}, {"seed": 1}, "batch"),
        ({"method": "emc2", "proposal": "informed"}, {}, "informed"),
        ({"method": "emc2", "proposal": "batch"}, {"proposal": "both"}, "both"),
        ({"method": "dcl"}, {"method": "emc2"}, "both"),  # DCL's was nobody's choice
        ({"method": "emc2"}, {"method": "dcl"}, "batch"),
        ({"method": "emc2"}, {"augmentations": 2}, "both"),
        ({"method": "emc2", "proposal": "batch"}, {"augmentations": 2}, "both"),
        ({"method": "emc2", "augmentations": 2}, {"method": "isir"}, "batch"),
        ({"method": "emc2", "augmentations": 2, "proposal": "batch"}, {"seed": 1}, "batch"),
        ({"method": "emc2", "augmentations": 2}, {"augmentations": 0}, "both"),
    ],
)
def test_a_saved_proposal_stays_where_it_still_can(first, then, proposal) -> None:
    saved = resolve(None, first)
    assert resolve(None, then, saved).proposal == proposal
    assert resolve(None, {}, saved) == saved


def test_defaults_never_contradict() -> None:
    """Only what was given can: gamma, burn-in and the rest keep their defaults unused."""
    for method in trained():
        for preset in (None, "stl10-b32", "stl10-b256", "stl10-subset"):
            resolve(preset, {"method": method})
    assert resolve(None, {"proposal": "informed", "refresh": 0.1}).refresh == 0.1
    assert resolve(None, {"data": "digits", "download": False}).download is False


def test_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--device cpu" in refusal(device="cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert resolve(None, {"device": "cuda"}).device == "cuda"


def test_timm_names_are_known() -> None:
    assert resolve(None, {"encoder": "convnext_tiny"}).encoder == "convnext_tiny"


# ---- JSON and resuming ------------------------------------------------------------------------


def test_json_is_strict_but_forgives_missing_keys() -> None:
    assert from_saved({}) == TrainConfig()
    for values in ({"beta": math.nan}, {"beta": None}, {"batch_sise": 3}, {"lr": "1"}):
        with pytest.raises(ConfigError) as caught:
            from_saved(values)
        one_sentence(str(caught.value))
    with pytest.raises(ConfigError, match="did you mean 'batch_size'"):
        from_saved({"batch_sise": 3})


def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    for text in ("[]", "{", '{"beta": NaN}', "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError) as caught:
            load_run_config(tmp_path)
        one_sentence(str(caught.value))


def test_a_setting_of_a_run_folder_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    for text in ('{"batch_sise": 3}', '{"beta": 0}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'config.json'}: ")):
            load_run_config(tmp_path)


def test_reading_a_config_does_not_need_its_machine() -> None:
    settings = TrainConfig(data="/gone", device="cuda", encoder="from_another_timm")
    text = json.dumps(asdict(settings))
    assert from_saved(json.loads(text)).data == "/gone"


def test_resume_keeps_what_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pics").mkdir()
    command = {"data": "pics", "batch_size": 8, "subset": 0, "method": "dcl"}
    saved = from_saved(json.loads(json.dumps(asdict(resolve(None, command)))))
    assert continued(saved, command) == saved  # the same command line, with --resume
    assert continued(saved, {"workers": 5, "device": "cpu", "eval_every": 1}).workers == 5
    with pytest.raises(ConfigError, match="--batch-size was 8 and is now 16") as caught:
        continued(saved, {"batch_size": 16, "seed": 7})
    assert "--seed was 0 and is now 7" in one_sentence(str(caught.value))
    with pytest.raises(ConfigError, match="--preset"):
        continued(saved, {"preset": "stl10-b32"})


FREE = (
    "out device graph eval_every checkpoint_every keep_checkpoints root download strict workers "
    "resident_gb log_every name logger shard_encoder"
).split()
CHANGED: dict[str, Any] = {
    "data": "cifar10", "steps": 5, "embedding_dim": 8, "image_size": 16, "augmentations": 2,
    "subset": 500, "out": "x", "preset": "stl10-b32", "root": "r", "encoder": "resnet50",
    "method": "dcl", "pretrained": "timm", "task": "other", "name": "x", "patience": 3,
    "text_encoder": "x",
}  # fmt: skip


@pytest.mark.parametrize("name", HINTS)
def test_same_run_looks_at_every_field(name: str, monkeypatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "other", tasks.TASKS["images"])
    old = getattr(TrainConfig(), name)
    hint = HINTS[name]
    if name in CHANGED:
        new = CHANGED[name]
    elif get_args(hint):
        new = next(value for value in get_args(hint) if value != old)
    elif hint is bool:
        new = not old
    else:
        new = old + 1 if hint is int else old / 2
    found = same_run(TrainConfig(), replace(TrainConfig(), **{name: new}))
    assert len(found) == (name not in FREE)


# ---- fuzzing ----------------------------------------------------------------------------------

JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.just(10**5000),
    st.lists(st.integers(), max_size=2), st.binary(max_size=3), st.just("x" * 10_000),
)  # fmt: skip


def plausible(name: str) -> st.SearchStrategy[Any]:
    hint = HINTS[name]
    if name == "data":
        return st.sampled_from([*BUILT_IN_DATA, ".", "/nowhere", "cifar"])
    if name == "encoder":
        return st.sampled_from(["small-cnn", "resnet18", "resnet50", "resnet"])
    if name == "preset":
        return st.sampled_from([*PRESETS, "stl"])
    if get_origin(hint) is not None and isinstance(get_args(hint)[0], str):
        return st.sampled_from(get_args(hint))
    kind = (get_args(hint) or (hint,))[0]
    return {
        int: st.integers(-1, 600),
        float: st.floats(-0.5, 20.0) | st.integers(0, 2),
        bool: st.booleans(),
        str: st.text(max_size=8),
    }[kind]


OVERRIDES = st.sets(st.sampled_from(sorted(HINTS)), max_size=6).flatmap(
    lambda names: st.fixed_dictionaries({name: plausible(name) for name in sorted(names)})
)
WILD = st.dictionaries(st.sampled_from(sorted(HINTS)) | st.text(max_size=8), JUNK, max_size=4)


def runs_or_is_refused(preset: Any, overrides: dict[str, Any]) -> bool:
    try:
        config = resolve(preset, overrides)
    except ConfigError as error:
        one_sentence(str(error))
        return False
    assert from_saved(json.loads(json.dumps(asdict(config), allow_nan=False))) == config
    assert continued(config, {}) == config
    assert asdict(config).keys() == HINTS.keys()
    return True


@settings(max_examples=250, deadline=None, derandomize=True)
@given(preset=st.none() | st.sampled_from([*PRESETS, "none"]), overrides=OVERRIDES)
def test_plausible_settings_run_or_are_refused(preset: Any, overrides: dict[str, Any]) -> None:
    runs_or_is_refused(preset, overrides)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(preset=st.none() | JUNK, overrides=WILD)
@example(preset=None, overrides={"encoder": "\ud800"})
@example(preset=None, overrides={"data": "\ud800"})
@example(preset=None, overrides={"out": "\ud800\n"})
@example(preset=None, overrides={"data": "x" * 300})
@example(preset=None, overrides={"data": "x" * 10_000})
@example(preset=None, overrides={"out": "x" * 10_000})
@example(preset=None, overrides={"encoder": "x" * 10_000, "task": "retrieval"})
@example(preset=None, overrides={"encoder": "x" * 10_000, "task": "image-text"})
@example(preset=None, overrides={"text_encoder": "x" * 10_000, "task": "image-text"})
@example(preset=None, overrides={"data": "x" * 10_000, "task": "retrieval"})
@example(preset=None, overrides={"data": "x" * 10_000, "task": "image-text"})
@example(preset=None, overrides={"seed": 10**5000})
@example(preset=10**5000, overrides={})
def test_wild_settings_run_or_are_refused(preset: Any, overrides: dict[str, Any]) -> None:
    runs_or_is_refused(preset, overrides)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None, derandomize=False)
@given(preset=st.none() | JUNK, overrides=WILD | OVERRIDES)
def test_a_new_search_of_settings_every_time(preset: Any, overrides: dict[str, Any]) -> None:
    runs_or_is_refused(preset, overrides)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    method=st.sampled_from(trained()),
    batch_size=st.integers(2, 4096),
    beta=st.floats(1e-3, 1000),
    seed=st.integers(0, 2**32 - 1),
    data=st.sampled_from(BUILT_IN_DATA),
)
def test_valid_settings_always_run(**overrides: Any) -> None:
    assert runs_or_is_refused(None, overrides)


def test_every_setting_is_an_option_of_the_command_line() -> None:
    from negchain.cli.train import command

    options = inspect.signature(command).parameters
    assert {field.name for field in fields(TrainConfig)} <= set(options)


# ---- other names ------------------------------------------------------------------------------


def test_temperature_is_one_over_beta() -> None:
    assert resolve(None, {"temperature": 0.1}).beta == pytest.approx(10)
    assert "beta = 1/temperature" in refusal(temperature=0.1, beta=5)
    for wrong in (0, -1, float("nan"), float("inf"), "hot"):
        assert "--temperature must be" in refusal(temperature=wrong)


def test_simclr_is_infonce() -> None:
    assert resolve(None, {"method": "simclr"}) == resolve(None, {"method": "infonce"})


def test_timm_tags_name_weights() -> None:
    assert resolve(None, {"encoder": "resnet18.a1_in1k"}).encoder == "resnet18.a1_in1k"
    assert "did you mean 'a1_in1k'" in refusal(encoder="resnet18.a1_in1")


# ---- starting from a run's settings -----------------------------------------------------------


def test_a_run_is_repeated_from_its_config(tmp_path: Path) -> None:
    saved = resolve("stl10-b32", {"method": "sogclr", "gamma": 0.3, "optimizer": "sgd"})
    assert resolve(None, {}, saved=saved) == saved
    other = resolve(None, {"method": "infonce", "epochs": 3}, saved=saved)
    assert (other.denominator, other.epochs, other.lr) == ("all", 3, saved.lr)
    stepped = resolve(None, {"epochs": 3}, saved=replace(saved, steps=7))
    assert stepped.steps is None and stepped.epochs == 3
    with pytest.raises(ConfigError, match="give one of them"):
        resolve(None, {"preset": "stl10-b32"}, saved=saved)


def test_a_run_can_be_extended_but_not_shortened() -> None:
    by_epochs = resolve(None, {"epochs": 4})
    assert continued(by_epochs, {"epochs": 9}).epochs == 9
    assert continued(by_epochs, {"epochs": 4}) == by_epochs
    by_steps = resolve(None, {"steps": 40})
    assert continued(by_steps, {"steps": 41}).steps == 41
    for saved, longer, words in (
        (by_epochs, {"epochs": 3}, "--epochs was 4 and is now 3"),
        (by_epochs, {"steps": 10**6}, "set by --epochs"),
        (by_steps, {"epochs": 100}, "set by --steps"),
    ):
        with pytest.raises(ConfigError, match=words):
            continued(saved, longer)


def test_pretrained_is_timm_or_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--pretrained must be timm, a run folder" in refusal(pretrained="nowhere.pt")
    (tmp_path / "a.pt").write_bytes(b"")
    assert resolve(None, {"pretrained": "a.pt"}).pretrained == str(tmp_path / "a.pt")
    assert resolve(None, {"pretrained": "timm"}).pretrained == "timm"
