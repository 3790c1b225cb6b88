"""transformers' Trainer on shards of one sequence: the losses and weights of one process."""

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from helpers.processes import run
from torch.utils.data import DataLoader

import tilewise.distributed as td

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tilewise.integrations import transformers as integration  # noqa: E402

SEQLEN, STEPS = 40, 3


class LongSequenceTrainer(transformers.Trainer):
    """All ranks take the same batches, and each trains on its shard of them."""

    def get_train_dataloader(self):
        order = torch.Generator().manual_seed(self.args.seed)
        options = dict(batch_size=self._train_batch_size, collate_fn=self.data_collator)
        return DataLoader(self.train_dataset, shuffle=True, generator=order, **options)

    def training_step(self, model, inputs, num_items_in_batch=None):
        ids, labels = inputs["input_ids"], inputs["labels"]
        layout = td.zigzag(ids.shape[1])
        labels = layout.shard(layout.shifted(labels))
        inputs = dict(input_ids=layout.shard(ids), position_ids=layout.positions[None])
        inputs |= dict(labels=labels, shift_labels=labels)
        count = num_items_in_batch // layout.ranks  # each rank has counted the whole batch's
        with td.context_parallel(layout):
            return super().training_step(model, inputs, count)


def trained(kind, recomputes=False, **options):
    """A trainer after its steps, whose losses are logged."""
    integration.register()
    sizes = dict(hidden_size=32, intermediate_size=48, vocab_size=64, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    config = transformers.LlamaConfig(**sizes, **heads, pad_token_id=0)
    torch.manual_seed(0)
    make = transformers.AutoModelForCausalLM.from_config
    model = make(config, attn_implementation="tilewise", dtype=torch.float32)
    if recomputes:  # by its newest name
        name = "activation_checkpointing_enable"
        getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()
    rows = torch.randint(1, 64, (2 * STEPS, SEQLEN))
    data = [dict(input_ids=x, labels=torch.where(x < 9, -100, x)) for x in rows]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            report_to=[],
            max_steps=STEPS,
            per_device_train_batch_size=1,
            learning_rate=0.1,
            optim="sgd",
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )
        trainer = kind(model, arguments, train_dataset=data)
        trainer.train()
    losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    return losses, [x.detach() for x in model.parameters()]


def shards(rank, options, losses, weights):
    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
    names |= dict(MASTER_ADDR="localhost", MASTER_PORT=0)  # of a group that is there already
    os.environ.update({name: str(x) for name, x in names.items()})
    found, mine = trained(LongSequenceTrainer, **options)
    assert found == pytest.approx(losses, rel=1e-4)
    for weight, expected in zip(mine, weights):
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow),  # the other does all that this does
        pytest.param(
            dict(gradient_accumulation_steps=2, recomputes=True), id="accumulated and recomputed"
        ),
    ],
)
def test_losses_and_weights_are_those_of_one_process(options):
    class Alone(LongSequenceTrainer):
        training_step = transformers.Trainer.training_step

    losses, weights = trained(Alone, **options)
    assert len(losses) == STEPS
    run(shards, 2, options, losses, weights)
