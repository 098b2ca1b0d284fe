"""Load exports with transformers and peft alone, offline, and compute the logits of some conversations.

python reload_job.py JOB.json OUT.pt: JOB has `questions` (messages as transformers takes them) and `models`, name ->
{"model": folder, "adapter": folder or null, "processor": folder}.
"""

import json
import sys

import torch
from PIL import Image


def main(job_path, out_path):
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from transformers.utils import logging

    logging.disable_progress_bar()
    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)
    out = {}
    for name, what in job["models"].items():
        model = AutoModelForImageTextToText.from_pretrained(what["model"], local_files_only=True)
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        if what["adapter"]:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, what["adapter"])
        model = model.float().eval()
        processor = AutoProcessor.from_pretrained(what["processor"], local_files_only=True)
        answers = []
        for messages in job["questions"]:
            pictures = [Image.open(p["image"]) for m in messages for p in m["content"] if p["type"] == "image"]
            text = processor.apply_chat_template(messages, tokenize=False)
            inputs = processor(text=[text], images=pictures or None, return_tensors="pt")
            with torch.no_grad():
                answers.append({"ids": inputs["input_ids"][0].tolist(), "logits": model(**inputs).logits[0]})
        stop = model.generation_config.eos_token_id
        out[name] = {
            "dtype": dtype,
            "answers": answers,
            "stop": processor.tokenizer.convert_ids_to_tokens(stop if isinstance(stop, list) else [stop]),
            "rows": model.get_input_embeddings().weight.shape[0],
        }
    assert "litchi" not in sys.modules
    torch.save(out, out_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
