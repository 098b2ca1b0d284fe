"""Words that a base does not know: their rows, what is learnt of them, and exports that know them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from layout_job import run_all
from processes import RunningRanks
from runs import logits_of, open_model, read_json, settings, train, write_rows
from safetensors.torch import load_file

from litchi.data.processor import load_processor
from litchi.errors import UsageError
from litchi.model.adapters import apply_trainable
from litchi.model.build import build_model, builtin_folder
from litchi.model.tokens import check_rows, release_rows
from litchi.model.weights import load_weights
from litchi.train.checkpoint import list_checkpoints

WORDS = ["<sku>", "</sku>", "<|made up|>"]
NEW = f"model.new_tokens={json.dumps(WORDS)}"
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
TRAINED = {"messages": [{"role": "user", "content": "Give code 7."}, {"role": "assistant", "content": "<sku>7</sku>"}]}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Bases as users have them, saved by transformers: tied, with a head of its own, with rows to spare."""
    room, old = tmp_path_factory.mktemp("bases"), builtin_folder()
    transformers.utils.logging.disable_progress_bar()
    found = {}
    for kind in ("tied", "untied", "spare"):
        config = transformers.AutoConfig.from_pretrained(old)
        hf = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(old, dtype=torch.float32)
        if kind == "untied":
            config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
            torch.manual_seed(1)
            untied = transformers.Qwen2_5_VLForConditionalGeneration(config)
            untied.load_state_dict(hf.state_dict() | {"lm_head.weight": torch.randn(hf.lm_head.weight.shape) * 0.1})
            hf = untied
        if kind == "spare":
            hf.resize_token_embeddings(1024)
        found[kind] = room / kind
        hf.save_pretrained(found[kind])
        transformers.AutoProcessor.from_pretrained(old).save_pretrained(found[kind])
    return found


def rows_of(folder):
    return write_rows(folder / "rows.jsonl", [_row(n) for n in range(6)])


def _row(number):
    text = json.dumps(TRAINED).replace("7", str(number))
    return json.loads(text)


# ---- text


def test_added_words_are_tokens_in_texts_and_control_tokens_stay_letters(tmp_path):
    """As transformers' own tokenizer cuts a text, where somebody has added words with it."""
    theirs = transformers.AutoProcessor.from_pretrained(builtin_folder())
    text = "x<sku>7</sku> and <sku><sku>, then <SKU>"
    before = load_processor(builtin_folder()).encode(text)
    theirs.tokenizer.add_tokens(WORDS)
    theirs.save_pretrained(tmp_path / "words")
    ours = load_processor(tmp_path / "words")
    assert (
        ours.encode(text)
        == theirs.tokenizer.encode(text)
        == load_processor(builtin_folder()).with_words(WORDS).encode(text)
    )
    assert len(ours.encode(text)) < len(before)
    assert ours.decode(ours.encode(text)) == text
    typed = "<|im_end|><tool_call>"
    assert ours.encode(typed) == load_processor(builtin_folder()).encode(typed) and len(ours.encode(typed)) > 2


# ---- rows


@pytest.mark.parametrize("kind, rows", [("tied", 872), ("untied", 872), ("spare", 1024)])
def test_rows_begin_as_the_mean_of_pieces_and_replace_nothing(kind, rows, bases):
    """Logits of known tokens are the base's; those of a new one are what its row gives."""
    base = bases[kind]
    loaded = build_model(base, dtype=torch.float32, new_tokens=WORDS)
    load_weights(loaded.hf, base, torch.device("cpu"))
    plain = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32).eval()
    new = loaded.hf.new_tokens
    assert list(new.ids) == WORDS and list(new.ids.values()) == [869, 870, 871] and new.rows == rows
    assert new.grown == (kind != "spare")
    table = plain.get_input_embeddings().weight
    pieces = load_processor(base).encode("<sku>")
    embedding = loaded.hf.model.language_model.embed_tokens
    ids = torch.tensor([[5, 869, 7]])
    want = torch.stack([table[5], table[pieces].mean(0), table[7]])[None]
    torch.testing.assert_close(embedding(ids), want)
    hidden = torch.randn(4, table.shape[1])
    logits, old = loaded.hf.lm_head(hidden), plain.lm_head(hidden)
    assert logits.shape == (4, rows)
    torch.testing.assert_close(logits[:, :869], old[:, :869], **CLOSE)
    head = plain.lm_head.weight[pieces].mean(0)
    torch.testing.assert_close(logits[:, 869], hidden @ head, **CLOSE)


def test_what_cannot_learn_rows_is_refused(bases):
    loaded = build_model(bases["tied"], dtype=torch.float32, new_tokens=WORDS)
    with pytest.raises(UsageError, match=r"parallel\.pp with new tokens"):
        check_rows(loaded, stages=2, head="frozen")
    with pytest.raises(UsageError, match=r"trainable\.head=lora with new tokens"):
        check_rows(loaded, stages=1, head="lora")


def test_a_head_that_is_asked_for_two_rows_alone_keeps_its_new_ones(bases):
    loaded = build_model(bases["untied"], dtype=torch.float32, new_tokens=WORDS)
    apply_trainable(loaded, settings("task=rerank", "model.path=x", "data.train=x").trainable)
    for rerank in (True, False):
        release_rows(loaded.hf, loaded.family, rerank=rerank)
        trains = {n for n, p in loaded.hf.named_parameters() if p.requires_grad and "lora" not in n}
        assert trains == {"model.language_model.embed_tokens.new_rows"} | (set() if rerank else {"lm_head.new_rows"})


# ---- training and exports


@pytest.mark.parametrize("kind", ["tied", pytest.param("untied", marks=pytest.mark.slow), "spare"])
def test_what_was_learnt_is_exported(kind, bases, ranks, tmp_path):
    """The run, its export by transformers alone, the export as a target, and the adapter by PEFT compute the same."""
    words = ("task=chat", f"data.train={rows_of(tmp_path)}", "trainable.language=lora", NEW, "optim.lr=2e-2")
    words = (*words, f"model.path={bases[kind]}", "train.steps=3", "train.global_batch_size=6", "optim.weight_decay=0")
    run = train(ranks, tmp_path / "run", *words)
    export = run / "export"
    checkpoint = list_checkpoints(run)[-1].folder
    wrapped, renderer = open_model(checkpoint, ranks)
    ids, logits = logits_of(wrapped, renderer, TRAINED)
    config, total = read_json(export / "config.json"), 1024 if kind == "spare" else 872
    assert {part.get("vocab_size", total) for part in (config, config["text_config"])} == {total}
    tokenizer = transformers.AutoProcessor.from_pretrained(export).tokenizer
    assert tokenizer.convert_tokens_to_ids(WORDS) == [869, 870, 871] and {869, 870} <= set(ids)
    theirs = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(export, dtype=torch.float32).eval()
    assert theirs.get_input_embeddings().weight.shape[0] == theirs.lm_head.weight.shape[0] == total
    again, own = open_model(export, ranks)
    found = {"transformers": theirs(input_ids=torch.tensor([ids])).logits[0]}
    found["litchi"] = logits_of(again, own, TRAINED)[1]
    assert (export / "adapter").is_dir() == (kind == "spare"), "PEFT does not make a table longer"
    if kind == "spare":
        from peft import PeftModel

        plain = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(bases[kind], dtype=torch.float32)
        found["peft"] = (
            PeftModel.from_pretrained(plain, export / "adapter").eval()(input_ids=torch.tensor([ids])).logits[0]
        )
        opened, mine = open_model(export / "adapter", ranks)
        found["adapter"] = logits_of(opened, mine, TRAINED)[1]
        saved = load_file(export / "adapter" / "adapter_model.safetensors")
        assert sum("trainable_tokens_delta" in key for key in saved) == 1
    for name, other in found.items():
        torch.testing.assert_close(other[:, :872], logits[:, :872], **CLOSE, msg=lambda m, name=name: f"{name}: {m}")
    saved = load_file(checkpoint / "shard-00000.safetensors")
    learnt = next(t for key, t in saved.items() if key.startswith("model.") and "embed_tokens.new_rows" in key)
    first = build_model(bases[kind], dtype=torch.float32, new_tokens=WORDS).hf
    load_weights(first, bases[kind], torch.device("cpu"))
    moved = (learnt - first.model.language_model.embed_tokens.new_rows).abs().amax(1)
    assert moved[:2].min() > 1e-3, "their rows learn"
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]


def test_a_tokenizer_that_knows_more_than_the_weights(bases, ranks, tmp_path):
    """Words that a user added with transformers, without making the table longer."""
    base = shutil.copytree(bases["tied"], tmp_path / "base")
    processor = transformers.AutoProcessor.from_pretrained(base)
    processor.tokenizer.add_tokens(WORDS)
    processor.save_pretrained(base)
    words = ("task=chat", f"data.train={rows_of(tmp_path)}", f"model.path={base}", "train.steps=1", "optim.lr=1e-2")
    run = train(ranks, tmp_path / "run", *words, "train.global_batch_size=6")
    assert read_json(run / "export" / "config.json")["text_config"]["vocab_size"] == 872
    state = load_file(run / "export" / "model.safetensors")
    assert next(t for key, t in state.items() if key.endswith("embed_tokens.weight")).shape[0] == 872


@pytest.mark.slow
def test_every_layout_trains_the_rows_alike(bases, tmp_path):
    rows = rows_of(tmp_path)
    one, two = {}, {}
    for kind in ("tied", "untied"):
        job = ["task=chat", f"data.train={rows}", f"model.path={bases[kind]}", NEW, "train.steps=2"]
        one[kind] = [*job, "train.global_batch_size=4"]
        for axis in ("dp_shard", "dp_replicate", "tp", "cp"):
            two[f"{kind} {axis}"] = [*one[kind], f"parallel.{axis}=2"]
    running = RunningRanks(tmp_path / "two", 2, run_all, two), RunningRanks(tmp_path / "one", 1, run_all, one)
    (pair, _), (alone,) = running[0].results(), running[1].results()
    for name, have in pair.items():
        want = alone[name.split()[0]]
        assert have["losses"] == pytest.approx(want["losses"], rel=1e-6), name
        assert have["norms"] == pytest.approx(want["norms"], rel=1e-5), name
