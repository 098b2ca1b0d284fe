"""Write the golden losses of chat training: a tiny model and a few rows, measured by TRL and by LLaMA-Factory.

    python tests/golden/make_chat_loss.py inputs          # draws chat_loss/: pictures, rows, tokenizer, weights
    python tests/golden/make_chat_loss.py trl             # with TRL installed: its section of chat_loss.json
    python tests/golden/make_chat_loss.py llamafactory    # with LLaMA-Factory installed: its section

The peers are imported and run as their users run them, in fp32 on a CPU: TRL's `SFTTrainer` with
`assistant_only_loss=True`, LLaMA-Factory's `sft` stage. Each row is a batch of its own, then all rows are one padded
batch. `inputs` changes the weights, so the other two must follow it.

What an answer's labels are: its text, `<|im_end|>` and the newline behind it. TRL takes them from the template's
`generation` block, so its block must end behind that newline. It does in the template TRL itself puts in place of
Qwen2.5-VL's ("training"), which is what its users get, and in the one of `chat_loss/model` ("folder"). A block that
ends before the newline ("no_newline") trains one token less per answer; it is measured too, to show that this is all.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch

torch.set_num_threads(1)

GOLDEN = Path(__file__).with_name("chat_loss.json")
FOLDER = Path(__file__).with_name("chat_loss")
MODEL = FOLDER / "model"
ROWS = FOLDER / "rows.jsonl"
LIBRARIES = ("torch", "torchvision", "transformers", "tokenizers", "datasets", "pillow", "numpy")

# ---------------------------------------------------------------------------------------------------------- inputs

# name -> width, height, ground, shape, colour, box. Some are above or below the pixel budget, or no multiple of 28.
PICTURES = {
    "circle": (112, 84, "white", "ellipse", "red", (10, 20, 60, 70)),
    "square": (140, 168, "navy", "rectangle", "yellow", (40, 30, 120, 110)),
    "wide": (250, 61, "orange", "ellipse", "purple", (150, 5, 240, 55)),
    "small": (40, 33, "green", "rectangle", "white", (3, 3, 20, 30)),
    "large": (300, 220, "gray", "rectangle", "blue", (30, 60, 260, 130)),
}


def say(role: str, *parts: str) -> dict:
    """A turn; `@name` is a picture."""
    content = [
        {"type": "image", "image": f"{p[1:]}.png"} if p[0] == "@" else {"type": "text", "text": p} for p in parts
    ]
    return {"role": role, "content": content}


def ask(*parts: str) -> dict:
    return say("user", *parts)


def answer(text: str) -> dict:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


CONVERSATIONS = {
    "one-picture": [ask("@circle", "What shape is drawn?"), answer("A red circle on a white ground.")],
    "picture-last": [ask("Which colour is the shape?", "@square"), answer("Yellow.")],
    "enlarged": [ask("@small", "Describe the picture."), answer("A white bar.\nThe ground is green.")],
    "shrunk": [ask("@large", "How many shapes are there?"), answer("1")],
    "turns": [
        ask("@wide", "What is left of the shape?"),
        answer("Nothing but the ground."),
        ask("And right of it?"),
        answer("The edge, ten pixels away."),
        ask("Thanks!"),
        answer("You are welcome."),
    ],
    "system": [
        say("system", "Answer with one word."),
        ask("@circle", "Is there a circle?"),
        answer("yes"),
        ask("A square?"),
        answer("no"),
    ],
    "two-pictures": [ask("@circle", "@wide", "Which one is wider?"), answer("The second.")],
    "pictures-between": [
        ask("First ", "@square", ", then ", "@small", ": are they alike?"),
        answer("No: the first is larger."),
        ask("And this one?", "@square"),
        answer("It is the first again."),
    ],
    "text-only": [ask("Name three colours."), answer("Red, green and blue.")],
    "text-turns": [say("system", "Be brief."), ask("2 + 2?"), answer("4"), ask("3 * 3?"), answer("9")],
    "empty-answer": [ask("@circle", "Say nothing."), answer("")],
    "chinese": [
        ask("@square", "图中是什么形状？"),
        answer("深蓝色背景上有一个黄色的正方形。"),
        ask("几个？"),
        answer("一个"),
    ],
}

CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONTROLS += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]

# As Qwen2.5-VL's: a default system turn, pictures between their marks, a newline behind every turn.
TEMPLATE = """\
{%- macro body(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part['type'] == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part['type'] == 'video' -%}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if messages[0]['role'] != 'system' -%}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{ body(message['content']) + '<|im_end|>\\n' }}{%- endgeneration -%}
{%- else -%}{{ body(message['content']) + '<|im_end|>\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
NEWLINE_IN, NEWLINE_OUT = "'<|im_end|>\\n' }}{%- endgeneration -%}", "'<|im_end|>' }}{%- endgeneration -%}{{ '\\n' }}"


def make_inputs() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    MODEL.mkdir(parents=True)
    draw_pictures()
    rows = [{"id": name, "messages": messages} for name, messages in CONVERSATIONS.items()]
    ROWS.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    make_model(make_processor())


def draw_pictures() -> None:
    from PIL import Image, ImageDraw

    for name, (width, height, ground, shape, colour, box) in PICTURES.items():
        image = Image.new("RGB", (width, height), ground)
        getattr(ImageDraw.Draw(image), shape)(box, fill=colour)
        image.save(FOLDER / f"{name}.png", optimize=True)


def write(name: str, value: dict) -> None:
    (MODEL / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def make_processor() -> dict[str, int]:
    """Train a byte-level BPE on the rows, with Qwen's way of cutting words. Returns the ids of the control tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    words += r"|\s+(?!\S)|\s+"
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    turns = [turn for messages in CONVERSATIONS.values() for turn in messages]
    corpus = [part["text"] for turn in turns for part in turn["content"] if part["type"] == "text"]
    corpus += ["You are a helpful assistant.", "system\nuser\nassistant\n"] * 20
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=440, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROLS])
    tokenizer.save(str(MODEL / "tokenizer.json"))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "processor_class": "Qwen2_5_VLProcessor", "errors": "replace"}
    settings |= {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None, "unk_token": None}
    settings |= {"add_prefix_space": False, "clean_up_tokenization_spaces": False, "model_max_length": 4096}
    write("tokenizer_config.json", settings)
    picture = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    picture |= {"min_pixels": 3136, "max_pixels": 50176, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    picture |= {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    write("preprocessor_config.json", picture)
    (MODEL / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return {token: tokenizer.token_to_id(token) for token in CONTROLS}


def make_model(ids: dict[str, int]) -> None:
    """Random weights, large enough that every picture and every position moves the loss. Stored in bf16."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {"model_type": "qwen2_5_vl", "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    vision |= {"in_chans": 3, "out_hidden_size": 32, "patch_size": 14, "spatial_patch_size": 14, "hidden_act": "silu"}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2, "window_size": 112}
    config = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "vocab_size": 448}
    config |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "hidden_act": "silu"}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10.0}
    config |= {"max_position_embeddings": 4096, "max_window_layers": 2, "sliding_window": 4096}
    config |= {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "use_sliding_window": False}
    config |= {"tie_word_embeddings": False, "attention_dropout": 0.0, "torch_dtype": "bfloat16"}
    config |= {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}
    config |= {f"{name}_token_id": ids[f"<|{name}|>"] for name in ("vision_start", "vision_end")}
    config |= {f"{name}_token_id": ids[f"<|{name}_pad|>"] for name in ("image", "video")}
    write("config.json", config | {"vision_config": vision | {"fullatt_block_indexes": [1]}})
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_pretrained(MODEL))
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=chance)
            if weight.ndim == 1:
                weight.copy_(0.1 * noise + (0 if name.endswith("bias") else 1))
            else:
                weight.copy_(noise if "embed_tokens" in name else 1.5 * noise / weight[0].numel() ** 0.5)
    with tempfile.TemporaryDirectory() as scratch:
        model.bfloat16().save_pretrained(scratch)
        shutil.copyfile(Path(scratch) / "model.safetensors", MODEL / "model.safetensors")


# ----------------------------------------------------------------------------------------------------------- peers


def read_rows() -> list[dict]:
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def pictures_of(row: dict) -> list[str]:
    parts = [part for turn in row["messages"] for part in turn["content"]]
    return [str(FOLDER / part["image"]) for part in parts if part["type"] == "image"]


def measure(trainer, names: list[str]) -> dict:
    """The loss of each row alone and of all rows as one batch, by the trainer's own collator and loss."""
    features = [trainer.train_dataset[i] for i in range(len(names))]
    trainer.model.eval()

    def loss_of(some: list[dict]) -> tuple[float, torch.Tensor, torch.Tensor]:
        inputs = trainer.data_collator([dict(feature) for feature in some])
        mask, labels = inputs["attention_mask"].bool(), inputs["labels"].clone()
        with torch.no_grad():
            return trainer.compute_loss(trainer.model, inputs).item(), mask, labels

    rows = []
    for name, feature in zip(names, features, strict=True):
        mean, mask, labels = loss_of([feature])
        targets = labels[labels != -100].tolist()
        rows.append({"id": name, "tokens": int(mask.sum()), "loss_sum": mean * len(targets), "targets": targets})
    mean, _, labels = loss_of(features)
    return {"rows": rows, "all": {"loss_mean": mean, "targets": int((labels != -100).sum())}}


def record(peer: str, package: str, found: dict) -> None:
    versions = {name: importlib.metadata.version(name) for name in (package, *LIBRARIES)}
    golden = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    golden[peer] = {"command": f"python tests/golden/make_chat_loss.py {peer}", "versions": versions, **found}
    text = json.dumps(golden, indent=1, sort_keys=True)
    GOLDEN.write_text(compact_lists(text) + "\n", encoding="utf-8")


def compact_lists(text: str) -> str:
    """Put lists of numbers on one line."""
    import re

    return re.sub(r"\[[\d\s,]*\]", lambda found: re.sub(r"\s+", " ", found.group()), text)


def measure_trl() -> None:
    from datasets import Dataset, Image, List
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration
    from trl import SFTConfig, SFTTrainer
    from trl.chat_template_utils import qwen2_5_vl_chat_template

    rows = read_rows()
    asked = [{"messages": strip_paths(row["messages"]), "images": pictures_of(row)} for row in rows]
    dataset = Dataset.from_list(asked).cast_column("images", List(Image()))
    templates = {
        "training": qwen2_5_vl_chat_template,  # SFTTrainer puts its training template in its place
        "folder": TEMPLATE,
        "no_newline": TEMPLATE.replace(NEWLINE_IN, NEWLINE_OUT),
    }
    found = {}
    for name, template in templates.items():
        processor = AutoProcessor.from_pretrained(MODEL)
        processor.chat_template = processor.tokenizer.chat_template = template
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32)
        with tempfile.TemporaryDirectory() as scratch:
            fp32 = {"use_cpu": True, "bf16": False, "report_to": "none"}
            args = SFTConfig(scratch, assistant_only_loss=True, max_length=None, **fp32)
            found[name] = measure(
                SFTTrainer(model, args=args, train_dataset=dataset, processing_class=processor),
                [row["id"] for row in rows],
            )
    assert found["training"] == found["folder"], "the folder's template is not TRL's in effect"
    record("trl", "trl", {**found["training"], "no_newline": found["no_newline"]})


def strip_paths(messages: list[dict]) -> list[dict]:
    """Pictures as TRL expects them: a mark in the turn, the picture in a column of its own."""
    bare = [[{k: v for k, v in part.items() if k != "image"} for part in turn["content"]] for turn in messages]
    return [{"role": turn["role"], "content": parts} for turn, parts in zip(messages, bare, strict=True)]


def measure_llamafactory() -> None:
    from llamafactory.data import SFTDataCollatorWith4DAttentionMask, get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_model, load_tokenizer
    from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

    rows = read_rows()
    with tempfile.TemporaryDirectory() as scratch:
        write_tagged(Path(scratch), rows)
        settings = {"model_name_or_path": str(MODEL), "stage": "sft", "do_train": True, "finetuning_type": "full"}
        settings |= {"image_min_pixels": 784, "image_max_pixels": 12845056}  # leave the resizing to the processor
        settings |= {"dataset": "rows", "dataset_dir": scratch, "template": "qwen2_vl", "cutoff_len": 4096}
        settings |= {"output_dir": scratch, "overwrite_cache": True, "preprocessing_num_workers": 1, "use_cpu": True}
        settings |= {"bf16": False, "report_to": "none", "flash_attn": "sdpa", "disable_gradient_checkpointing": True}
        settings |= {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}
        model_args, data_args, training_args, finetuning_args, _ = get_train_args(settings)
        tools = load_tokenizer(model_args)
        template = get_template_and_fix_tokenizer(tools["tokenizer"], data_args)
        data = get_dataset(template, model_args, data_args, training_args, stage="sft", **tools)
        model = load_model(tools["tokenizer"], model_args, finetuning_args, is_trainable=True)
        collator = SFTDataCollatorWith4DAttentionMask(template=template, model=model, **tools)
        trainer = CustomSeq2SeqTrainer(
            model=model, args=training_args, finetuning_args=finetuning_args, data_collator=collator, **data, **tools
        )
        record("llamafactory", "llamafactory", measure(trainer, [row["id"] for row in rows]))


def write_tagged(folder: Path, rows: list[dict]) -> None:
    """The rows as LLaMA-Factory reads them: text with `<image>` marks and a list of pictures."""
    tagged = []
    for row in rows:
        messages = [
            {"role": turn["role"], "content": "".join(part.get("text", "<image>") for part in turn["content"])}
            for turn in row["messages"]
        ]
        tagged.append({"messages": messages, "images": pictures_of(row)})
    (folder / "rows.json").write_text(json.dumps(tagged), encoding="utf-8")
    names = {"role_tag": "role", "content_tag": "content", "system_tag": "system"}
    names |= {"user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    info = {"rows": {"file_name": "rows.json", "formatting": "sharegpt", "columns": columns, "tags": names}}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")


if __name__ == "__main__":
    {"inputs": make_inputs, "trl": measure_trl, "llamafactory": measure_llamafactory}[sys.argv[1]]()
