"""Settings: every kind of error, all at once and with its place; round trip; what is refused; the derived figures."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from litchi.config import (
    LATER,
    LOSSES,
    METRICS,
    SAME_NUMBERS,
    Config,
    DataSource,
    Every,
    derive,
    known_keys,
    load_config,
    nearest,
    resolve_micro_batch_tokens,
    settings_markdown,
)
from litchi.config.sections import USUAL_MODES, Trainable
from litchi.config.train import Optim
from litchi.config.words import NAMES_ELSEWHERE, fields
from litchi.errors import UsageError

ROOT = Path(__file__).parent.parent
GIVEN = ("model.path=/models/m", "data.train=data/train.jsonl")


def load(*overrides: str, task: str = "rerank", need: tuple[str, ...] = ()) -> Config:
    return load_config(None, [f"task={task}", *overrides], need=need)


def problems(path, *overrides: str, need: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(UsageError) as caught:
        load_config(path, overrides, need=need)
    assert caught.value.status == 2
    return str(caught.value).split("\n")


def refusal(*overrides: str, task: str = "rerank", need: tuple[str, ...] = ()) -> str:
    (line,) = problems(None, f"task={task}", *overrides, need=need)
    return line


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write x.yaml and stand beside it, so that messages say `x.yaml`."""
    monkeypatch.chdir(tmp_path)

    def write_yaml(text: str) -> str:
        Path("x.yaml").write_text(text, encoding="utf-8")
        return "x.yaml"

    return write_yaml


# ------------------------------------------------------------------------------------------------------ defaults


def test_defaults_are_those_of_the_documentation():
    config = load()
    assert (config.loss.name, load(task="chat").loss.name) == ("bce", "ce")
    parts = config.trainable
    assert [parts.vision.mode, parts.merger.mode, parts.language.mode, parts.head.mode] == [
        *("frozen", "frozen", "lora", "frozen")
    ]
    assert (parts.lora.rank, parts.lora.alpha, parts.lora.dropout, parts.lora.targets) == (16, 32.0, 0.0, None)
    assert (config.data.max_length, config.data.overlong, config.data.verify) == (4096, "drop", "decoded")
    assert (config.optim.name, config.optim.lr, config.optim.schedule, config.optim.warmup) == (
        *("adamw", 1e-4, "cosine", 0.03),
    )
    assert (config.train.steps, config.train.epochs, config.train.global_batch_size) == (None, 1, 32)
    assert config.train.micro_batch_tokens is None
    assert (config.data.train, config.track, config.curriculum, config.output) == ((), None, (), "runs/rerank")


def test_settings_are_frozen():
    with pytest.raises(Exception, match="frozen"):
        load().optim.lr = 1.0


def test_usual_modes_are_the_defaults():
    assert {name: Trainable.model_fields[name].default.mode for name in USUAL_MODES} == USUAL_MODES


def test_short_forms():
    config = load("loss=pairwise", "trainable.vision=full", "parallel=auto", "data.train=a/b.v2.jsonl.gz", "track=[]")
    assert config.loss.name == "pairwise"
    assert (config.trainable.vision.mode, config.trainable.vision.lr) == ("full", None)
    assert config.data.train == (DataSource(path="a/b.v2.jsonl.gz", weight=1.0, name="b.v2"),)
    assert config.parallel == Config(task="rerank").parallel
    assert config.track == ()
    assert load("track=tensorboard").track == ("tensorboard",)
    language = load("trainable.language.lr=1e-5").trainable.language
    assert (language.mode, language.lr) == ("lora", 1e-5)
    assert load("trainable.lora.targets=all").trainable.lora.targets is None
    assert load("trainable.lora.targets=[q_proj]").trainable.lora.targets == ("q_proj",)
    assert load("train.micro_batch_tokens=auto").train.micro_batch_tokens is None


def test_settings_that_come_with_the_package():
    words = ["data.train=rows.jsonl"]
    shipped = load_config("builtin:rerank-tiny", words)
    assert shipped == load_config(ROOT / "configs/rerank-tiny.yaml", words) and shipped.output == "runs/rerank-tiny"
    (line,) = problems("builtin:rerank-tinny")
    assert line.startswith("no settings named builtin:rerank-tinny come with Litchi.") and "builtin:rerank-tiny" in line


def test_several_sources():
    config = load("data.train=[{path: a.jsonl, weight: 2}, b.jsonl]", "data.eval={path: dev.jsonl, name: shop}")
    assert [(s.path, s.weight, s.name) for s in config.data.train] == [("a.jsonl", 2.0, "a"), ("b.jsonl", 1.0, "b")]
    assert config.data.eval[0].name == "shop"
    line = refusal("data.eval=[a/dev.jsonl, b/dev.jsonl]")
    assert "data.eval has 2 sets named 'dev': give each its own `name`" in line


def test_distances():
    config = load("train.save_every=200", "train.eval_every=2 epochs")
    assert config.train.save_every == Every(steps=200)
    assert config.train.eval_every == Every(epochs=2)
    assert (Every(steps=200).in_steps(273), Every(epochs=2).in_steps(273)) == (200, 546)
    assert (Every(epochs=1).written(), Every(epochs=2).written(), Every(steps=5).written()) == (
        "1 epoch",
        "2 epochs",
        5,
    )


# ------------------------------------------------------------------------------------------------ YAML and command


def test_numbers_and_words_of_yaml(write):
    path = write("task: rerank\noptim: {lr: 1e-4, warmup: 1_0, clip: 5E-1}\ndata: {verify: off}\ntrain:\n")
    config = load_config(path, ["optim.weight_decay=2e-2"], need=())
    assert (config.optim.lr, config.optim.warmup, config.optim.clip) == (1e-4, 10, 0.5)
    assert config.optim.weight_decay == 0.02
    assert config.data.verify == "off"  # not False
    assert config.train.epochs == 1  # a group whose lines are commented out is empty
    assert config.output == "runs/x"


def test_the_command_line_wins(write):
    path = write("task: rerank\nloss: bce\ntrainable: {language: lora}\ntrain: {epochs: 3, keep: 2}\n")
    config = load_config(path, ["loss.weight=balanced", "trainable.language.lr=1e-5", "train.steps=20"], need=())
    assert (config.loss.name, config.loss.weight) == ("bce", "balanced")
    assert (config.trainable.language.mode, config.trainable.language.lr) == ("lora", 1e-5)
    assert (config.train.steps, config.train.epochs, config.train.keep) == (20, None, 2)
    assert load_config(path, ["optim.lr=1", "optim.lr=2"], need=()).optim.lr == 2.0
    assert load_config(path, ["optim.clip=null"], need=()).optim.clip is None


def test_all_problems_at_once_with_their_lines(write):
    path = write(
        "task: rerank\n"
        "optim:\n"
        "  lrr: 1e-4\n"
        "  schedule: cosin\n"
        "  lr: fast\n"
        "data:\n"
        "  train:\n"
        "    - path: a.jsonl\n"
        "      wieght: 2\n"
        "  eval: [a/dev.jsonl, b/dev.jsonl]\n"
        "trainable:\n"
        "  vision: lorra\n"
        "  merger:\n"
        "    lr: 1.0\n"
        "train:\n"
        "  keep: 0\n"
        "  keep: 3\n"
        "  steps: 5\n"
        "  epochs: 2\n"
        "eval:\n"
        "  metrics: [mrr@10, mrr@0]\n"
        "parallel:\n"
        "  pp_schedule: interleaved\n"
        "learning_rate: 1\n"
    )
    assert problems(path, "optim.clip=no", "train.sed=1", need=("model.path", "data.train")) == [
        "x.yaml: model.path is not given: a folder, a hub id, modelscope:ID, or builtin:tiny. "
        "Add model.path=... to the command",
        "x.yaml:3: optim.lrr: no such setting. Did you mean optim.lr?",
        "x.yaml:4: optim.schedule is 'cosin': one of cosine, linear, constant",
        "x.yaml:5: optim.lr is 'fast': a number from 0",
        "x.yaml:9: data.train[0].wieght: no such setting. Did you mean data.train.weight?",
        "x.yaml:10: data.eval has 2 sets named 'dev': give each its own `name`",
        "x.yaml:12: trainable.vision is 'lorra': frozen, lora, full, or {mode, lr}",
        "x.yaml:13: trainable.merger is frozen: it takes no lr",
        "x.yaml:16: train.keep is 0: a whole number above 0",
        "x.yaml:17: train.keep: given twice (first on line 16)",
        "x.yaml:18: train.steps and train.epochs are both given: give one of them",
        f"x.yaml:21: eval.metrics has 'mrr@0': with task rerank one of {', '.join(METRICS['rerank'])}",
        "x.yaml:23: parallel.pp_schedule=interleaved: several runs of layers on a stage is not part of this version "
        "yet; use 1f1b or gpipe",
        "x.yaml:24: learning_rate: no such setting. Did you mean optim.lr?",
        "command line: optim.clip=no: a number above 0, or null",
        "command line: train.sed: no such setting. Did you mean train.seed?",
    ]


def test_without_a_task_the_rest_is_checked_too():
    lines = problems(None, "optim.lr=fast", "loss=bcee", need=("model.path", "data.train"))
    assert "command line: task is not given: one of chat, rerank" in lines
    assert "command line: optim.lr=fast: a number from 0" in lines
    assert any("loss=bcee" in line for line in lines) and any("data.train is not given" in line for line in lines)
    assert len(lines) == 5
    assert problems(None, "task=rank") == ["command line: task=rank: one of chat, rerank"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the settings are empty"),
        ("# only a comment\n", "the settings are empty"),
        ("- task: chat\n", "the settings are a list"),
        ("chat\n", "the settings are a single value"),
        ("task: chat\noptim: {lr: [1\n", "(x.yaml:3): expected ',' or ']'"),
        ("task: chat\n\toptim: 1\n", "(x.yaml:2)"),
        ("task: chat\n---\ntask: chat\n", "(x.yaml:2)"),
        ("task: &a chat\nloss: *a\n", "(x.yaml:2): aliases"),
        ("task: !!python/name:os.system\n", "(x.yaml:1): could not determine a constructor"),
        ("task: !!int x\n", "not valid YAML (x.yaml)"),
    ],
)
def test_yaml_that_cannot_be_read(write, text, expected):
    (line,) = problems(write(text))
    assert expected in line


def test_files_that_cannot_be_read(tmp_path):
    missing = tmp_path / "no.yaml"
    assert problems(missing) == [
        f"cannot read the settings ({missing}): No such file or directory. Check the path of the YAML file."
    ]
    assert problems(tmp_path) == [f"the settings are a folder ({tmp_path}): a YAML file is needed"]
    (tmp_path / "latin.yaml").write_bytes(b"output: caf\xe9\n")
    assert "not UTF-8" in problems(tmp_path / "latin.yaml")[0]


def test_keys_that_are_no_words(write):
    lines = problems(write("task: chat\n1: 2\noptim.lr: 1\noptim: {[a]: 1}\n"))
    assert lines == [
        "x.yaml:2: the key 1 is not a word",
        "x.yaml:3: optim.lr: dots are for the command line. In YAML write the groups, each on its own line",
        "x.yaml:4: the key ['a'] is not a word",
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lr", "optim.lr: expected key=value"),
        ("=3", "=3: expected key=value"),
        ("optim..lr=3", "expected key=value"),
        ("optim.lr=", "optim.lr=: no value. Write null to unset it"),
        ("optim.lr= # 3", "no value"),
        ("optim.lr=[1", "the value is not valid YAML"),
        ("optim={lr: 1, lr: 2}", "optim={lr: 1, lr: 2}: lr: given twice"),
        ("optim={lr: fast}", "command line: optim.lr is 'fast': a number from 0"),
        ("optim.lrr=3", "optim.lrr: no such setting. Did you mean optim.lr?"),
        ("optim.lr.x=3", "optim.lr is {'x': 3}: a number from 0"),
        ("qqqqqq=1", "no such setting. docs/settings.md has them all"),
    ],
)
def test_overrides_that_are_wrong(override, expected):
    line = refusal(override)
    assert line.startswith("command line: ") and expected in line.replace(
        "optim={lr: fast}: optim.lr", override + ": optim.lr"
    )


def test_lists_are_set_as_a_whole(write):
    path = write("task: rerank\ndata: {train: [a.jsonl]}\n")
    (line,) = problems(path, "data.train.weight=2")
    assert line == "command line: data.train.weight=2: data.train is ['a.jsonl'] and is set as a whole"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.deterministic=yes", "true or false"),
        ("train.deterministic=1", "true or false"),
        ("train.steps=true", "a whole number above 0, or null"),
        ("train.steps=0", "a whole number above 0, or null"),
        ("train.steps=1.0", "a whole number above 0, or null"),
        ("train.steps=010", "a whole number above 0, or null"),
        ("train.global_batch_size=-4", "a whole number above 0"),
        ("train.seed=-1", "a whole number from 0"),
        ("train.hang_s=.inf", "a number above 0"),
        ("train.save_every=0 epochs", "steps, or epochs as in `1 epoch`, or null"),
        ("train.save_every=1.5", "steps, or epochs as in `1 epoch`, or null"),
        ("train.micro_batch_tokens=some", "auto (null), or tokens"),
        ("optim.lr=-1", "a number from 0"),
        ("optim.lr=.nan", "a number from 0"),
        ("optim.lr=true", "a number from 0"),
        ("optim.lr='1'", "a number from 0"),
        ("optim.warmup=1.0", "steps, or a fraction of the run below 1"),
        ("optim.warmup=-3", "steps, or a fraction of the run below 1"),
        ("optim.clip=0", "a number above 0, or null"),
        ("optim.betas=[0.9, 2]", "[beta1, beta2], each from 0 to below 1"),
        ("optim.betas=[0.9]", "[beta1, beta2], each from 0 to below 1"),
        ("trainable.lora.dropout=1.0", "a number from 0 below 1"),
        ("trainable.lora.rank=null", "a whole number above 0"),
        ("data.max_bad_fraction=1.1", "a number from 0 up to 1"),
        ("data.window=[5, 5]", "[low, high] with 0 <= low < high <= 65535, or null"),
        ("data.window=5", "[low, high] with 0 <= low < high <= 65535, or null"),
        ("data.train=5", "a path, {path, weight, name}, or a list of these"),
        ("loss.weight=0", "balanced, or a number above 0"),
        ("loss.weight=true", "balanced, or a number above 0"),
        ("model=qwen", "a group of settings"),
        ("parallel=fast", "auto, or sizes of axes"),
        ("track=[tensorboards]", "a list of tensorboard, trackio, wandb, mlflow, or null"),
        ("output=2024", "text (in quotes, so that it is not read as something else)"),
        ("data.overlong=cut", "one of drop, error"),
    ],
)
def test_wrong_values(override, expected):
    line = refusal(override)
    assert line.startswith("command line: ") and line.endswith(f": {expected}"), line
    assert override in line or "[1] is" in line or "[0] is" in line


def test_nothing_but_usage_errors_whatever_is_given():
    """Junk in every setting: always an answer, and one that names the setting or its group."""
    junk = ("null", "-1", "[]", "[1, {}]", "{}", "{a: 1}", "{lr: -1}", "{path: 5, weight: x}", "x y", ".nan", "9" * 40)
    for key in known_keys():
        for value in junk:
            try:
                load(f"{key}={value}")
            except UsageError as error:
                assert key.split(".")[0] in str(error), (key, value, error)


def test_two_wrong_things_in_one_place():
    wrong = ["data.train=[{weight: -1}, {pat: x, weight: 0}, 5]", "trainable.vision={mode: x, lr: -1, z: 1}"]
    lines = problems(None, "task=rerank", *wrong)
    assert len(lines) == 9, lines


@pytest.mark.parametrize(
    ("task", "overrides", "expected"),
    [
        ("rerank", ["loss=ce"], "loss.name is 'ce': with task rerank one of bce, group_softmax"),
        ("chat", ["loss=bce"], "loss.name is 'bce': with task chat one of ce"),
        ("rerank", ["loss={name: bce, margin: 1}"], "loss.margin is 1.0: it belongs to pairwise, not to bce"),
        ("chat", ["data.negatives=3"], "data.negatives is 3: it belongs to task rerank"),
        ("rerank", ["data.pixels={min: 9, max: 4}"], "data.pixels.min is 9: at most data.pixels.max, 4"),
        ("rerank", ["data.shuffle=false", "data.train={path: a, weight: 2}"], "data.shuffle is false"),
        ("rerank", ["trainable.head={mode: frozen, lr: 1}"], "trainable.head is frozen: it takes no lr"),
        ("rerank", ["train.steps=1", "train.epochs=1"], "both given"),
        ("rerank", ["model.placement=spread", "parallel.dp_shard=2"], "parallel.dp_shard is 2: model.placement=spread"),
        ("rerank", ["eval.metrics=[bleu]"], "eval.metrics has 'bleu'"),
        ("chat", ["eval.metrics=[mrr@10]"], "eval.metrics has 'mrr@10'"),
        ("rerank", ["train.best=mrr@x"], "train.best is 'mrr@x'"),
        ("chat", ["model.quantize=nf4", "trainable.language=full"], "packed weights cannot train. Set trainable.lang"),
        ("chat", ["model.quantize=nf4", "parallel.tp=2"], "packed weights cannot be cut by parallel.tp"),
        ("chat", ["trainable.merger=full", "parallel.vision_ranks=2"], "Set trainable.merger to frozen"),
        ("chat", ["train.features=cache", "trainable.vision=lora"], "they change while trainable.vision is lora"),
        ("chat", ["train.features=precompute", "trainable.merger=full"], "train.features is precompute: they change"),
        ("chat", ["train.features=cache", "parallel.vision_ranks=1"], "Leave one of the two out"),
    ],
)
def test_settings_that_do_not_go_together(task, overrides, expected):
    assert expected in refusal(*overrides, task=task)


def test_what_only_training_needs():
    need = ("model.path", "data.train")
    assert "every part is frozen" in refusal(*GIVEN, "trainable.language=frozen", need=need)
    assert "train.best is 'mrr@10': it needs data.eval" in refusal(*GIVEN, "train.best=mrr@10", need=need)
    watched = (*GIVEN, "data.eval=dev.jsonl", "train.early_stop=3")
    assert "it needs train.best and train.eval_every" in refusal(*watched, need=need)
    assert load(*watched, "train.best=loss", "train.eval_every=10", need=need).train.early_stop == 3
    assert load("trainable.language=frozen", "train.best=mrr@10").train.best == "mrr@10"


# -------------------------------------------------------------------------------------------------- not part yet

REFUSED = {  # a use of every key of LATER, and what may be used instead
    "parallel.pp_schedule": ("zero_bubble", "use 1f1b or gpipe"),
    "track": ("[tensorboard, wandb]", "use tensorboard"),
}


@pytest.mark.parametrize("key", [key for key in LATER])
def test_what_does_not_exist_yet_is_refused_by_name(key):
    value, instead = REFUSED[key]
    line = refusal(f"{key}={value}")
    assert line.startswith(f"command line: {key}=") and "is not part of this version yet" in line
    assert line.endswith(f"; {instead}")


def test_what_exists_is_not_refused():
    config = load(
        *(
            "parallel.dp_shard=2",
            "parallel.tp=1",
            "trainable.lora.variant=rslora",
            "track=tensorboard",
            "optim.name=sgd",
        )
    )
    assert (config.parallel.dp_shard, config.optim.name) == (2, "sgd")


# ------------------------------------------------------------------------------------------- keys, text, round trip


def test_nearest_key():
    assert nearest("optim.lrr") == "optim.lr"
    assert nearest("lr") == nearest("train.lr") == nearest("optim.learning_rate") == "optim.lr"
    assert nearest("batch_size") == "train.global_batch_size"
    assert nearest("modle") == "model"
    assert nearest("rank") == "trainable.lora.rank"
    assert nearest("zzzz") is None
    assert all(nearest(key) == key for key in known_keys())


def test_tables_name_known_keys():
    assert set(LATER) | set(SAME_NUMBERS) <= set(known_keys())
    assert set(NAMES_ELSEWHERE.values()) <= set(known_keys())
    assert set(LOSSES) == set(METRICS) == {"chat", "rerank"}


def test_names_are_those_of_what_they_stand_for():
    from litchi.evaluate import json_answers, ranking, text
    from litchi.parallel.estimate import STATES
    from litchi.train import losses

    assert LOSSES["rerank"] == tuple(losses.LOSSES)
    assert set(STATES) == set(get_args(Optim.model_fields["name"].annotation))
    cut = {f"{name}@k" for name in (*ranking._WHOLE, *ranking._CUT)}
    assert set(METRICS["rerank"]) == {*ranking._WHOLE, *cut}
    assert set(METRICS["chat"]) == {*text.METRICS, *json_answers.JSON_METRICS}
    assert all(load(f"eval.metrics=[{name}]").eval.metrics == (name,) for name in ranking.DEFAULT_METRICS)


def test_round_trip(tmp_path):
    plain = load(*GIVEN)
    rich = load(
        *("data.train=[{path: a.jsonl, weight: 0.5}, b.tar]", "data.eval=dev.jsonl", "train.save_every=1 epoch"),
        *("optim.lr=1e-5", "optim.warmup=20", "data.instruction='1e5'", "output='no'", "data.window=[0, 4095]"),
        *("trainable.merger={mode: full, lr: 3e-6}", "loss={name: bce, weight: balanced}", "eval.slices=[brand]"),
    )
    for config in (plain, rich, load("train.steps=7", task="chat")):
        path = tmp_path / "config.yaml"
        path.write_text(config.to_yaml(), encoding="utf-8")
        again = load_config(path, need=())
        assert again == config and again.numbers() == config.numbers()
        assert again.to_yaml() == config.to_yaml()
    assert rich.data.instruction == "1e5" and rich.output == "no"


def test_which_settings_change_the_numbers():
    base = load(*GIVEN).numbers()
    same = ("output=elsewhere", "data.workers=0", "train.keep=9", "data.eval=dev.jsonl", "parallel.dp_shard=4")
    assert all(load(*GIVEN, override).numbers() == base for override in same)
    other = ("optim.lr=1", "train.seed=1", "data.max_length=9", "trainable.head=full", "loss.weight=2", "model.path=x")
    assert all(load(*GIVEN, override).numbers() != base for override in other)


def test_every_setting_has_its_line_of_text():
    assert [key for key, info in fields().items() if not info.description] == []


def test_the_documentation_is_up_to_date():
    """To renew it: python -c "from litchi.config import *; print(settings_markdown(), end='')" > docs/settings.md"""
    assert (ROOT / "docs/settings.md").read_text(encoding="utf-8") == settings_markdown()


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.stem)
def test_shipped_settings_load_by_the_command_in_their_first_line(path):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# litchi train configs/")
    _, _, name, *overrides = shlex.split(first.lstrip("# "))
    assert name == f"configs/{path.name}"
    assert {override.split("=")[0] for override in overrides} <= {"model.path", "data.train"}
    config = load_config(path, overrides)
    assert config.output == f"runs/{path.stem}" and config.data.train[0].name == "train"


def test_the_contract_settings_need_a_model_and_data_only():
    for name, task in (("rerank-lychee", "rerank"), ("chat-qwen25vl", "chat")):
        assert load_config(ROOT / f"configs/{name}.yaml", GIVEN).task == task
        assert len(problems(ROOT / f"configs/{name}.yaml", need=("model.path", "data.train"))) == 2


def test_reading_settings_does_not_import_torch():
    code = "import sys, litchi.config; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# ------------------------------------------------------------------------------------------------------- derived


def test_derived_figures_by_hand():
    config = load("train.epochs=3", "train.micro_batch_tokens=2048", task="chat")
    found = derive(config, samples=8721, ranks=2, mean_tokens=410)
    # 8721 / 32 = 272.5 -> 273; 3 x 273 = 819; 3 % of 819 = 24.6 -> 25; 32 x 410 / (2 x 2048) = 3.2 -> 4
    assert (found.steps_per_epoch, found.steps, found.warmup_steps, found.accumulation) == (273, 819, 25, 4)
    assert found.lines() == (
        "steps 819 = 3 epochs x 273 (8,721 samples / 32, last one short)",
        "warm-up 25 = 3 % of 819",
        "accumulation ~4 = 32 samples x 410 tokens / (2 ranks x 2,048 tokens a micro-batch)",
    )


def test_derived_figures_of_given_steps():
    config = load("train.steps=100", "optim.warmup=7", "train.global_batch_size=8")
    found = derive(config, samples=400, ranks=1, mean_tokens=300, device_type="cuda")
    assert (found.steps_per_epoch, found.steps, found.epochs, found.warmup_steps) == (50, 100, None, 7)
    assert found.lines() == (
        "steps 100 = train.steps, 2 epochs of 50 (400 groups / 8)",
        "warm-up 7 = optim.warmup",
        "accumulation ~1 = 8 groups x 300 tokens / (1 rank x 16,384 tokens a micro-batch)",
    )
    short = derive(load("train.steps=3", "optim.warmup=7"), samples=1, ranks=1, mean_tokens=1)
    assert short.lines()[1] == "warm-up 7 = optim.warmup, longer than the run: the rate never reaches optim.lr"


@pytest.mark.parametrize(
    ("warmup", "steps", "expected"), [("0.07", 100, 7), ("0.03", 100, 3), ("0.03", 1, 1), ("0.0", 9, 0)]
)
def test_warmup_is_exact(warmup, steps, expected):
    config = load(f"optim.warmup={warmup}", f"train.steps={steps}")
    assert derive(config, samples=64, ranks=1, mean_tokens=1).warmup_steps == expected


def test_micro_batch_tokens():
    config = load()
    assert (resolve_micro_batch_tokens(config, "cpu"), resolve_micro_batch_tokens(config, "cuda")) == (8192, 16384)
    assert resolve_micro_batch_tokens(load("train.micro_batch_tokens=100"), "cuda") == 100
