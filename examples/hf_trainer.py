"""Hugging Face's Trainer: an ``optimizers=`` pair, or a subclass of a few lines.

A tiny GPT-2 with random weights learns to count; nothing is downloaded.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from virtualgrad import SVGD

TOKENS = 32


class SVGDTrainer(Trainer):
    """For models that the Trainer makes itself (``model_init``), where no pair can be passed."""

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """SVGD instead of what ``TrainingArguments.optim`` says."""
        if self.optimizer is None:
            scaler = self.accelerator.scaler  # None, but with fp16=True
            model = model or self.model
            self.optimizer = SVGD(model, self.args.learning_rate, scale=0.1, grad_scaler=scaler)
        return self.optimizer


def tiny_gpt2() -> GPT2LMHeadModel:
    """GPT-2 with some ten thousand parameters; dropout is off."""
    config = GPT2Config(
        vocab_size=TOKENS,
        n_positions=16,
        n_embd=32,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def counting(samples: int = 256) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up from a random number."""
    starts = torch.randint(0, TOKENS, (samples, 1), generator=torch.Generator().manual_seed(0))
    tokens = (starts + torch.arange(12)) % TOKENS
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    """Train for some epochs."""
    torch.manual_seed(0)
    model = tiny_gpt2()
    optimizer = SVGD(model, lr=0.05, scale=0.1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=8,
            per_device_train_batch_size=32,
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=8,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=counting(), optimizers=(optimizer, None))
        trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
