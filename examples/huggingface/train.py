"""A Hugging Face transformer in an elastic loop: a small DistilBERT with random weights learns a rule about tokens.

    trueline run examples/huggingface/train.py --workers 2

Nothing is downloaded: the sentences are drawn here, and a sentence is positive when it has more even than odd tokens.
Why a loop and not transformers.Trainer: docs/guides/own-loop.md.
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import DistilBertConfig, DistilBertForSequenceClassification

import trueline

VOCABULARY, LENGTH = 32, 7


class Sentences(Dataset):
    """Items are what a tokenizer gives: a dict of inputs, and the label."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(1, VOCABULARY, (size, LENGTH), generator=generator)
        self.labels = ((self.tokens % 2 == 0).sum(dim=1) > LENGTH // 2).long()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int):
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, self.labels[index]


def build() -> torch.nn.Module:
    torch.manual_seed(0)  # every worker begins with the same weights
    config = DistilBertConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        dim=32,
        hidden_dim=64,
        n_layers=2,
        n_heads=2,
        num_labels=2,
    )
    return DistilBertForSequenceClassification(config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--records", type=int, default=1024)
    options = parser.parse_args()

    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    job = trueline.Elastic(model, optimizer, Sentences(options.records), global_batch=64, epochs=options.epochs)
    for batch in job:
        job.step(model(**batch.inputs, labels=batch.labels).loss)

    held_out = Sentences(options.records + 512)
    tokens, labels = held_out.tokens[options.records :], held_out.labels[options.records :]
    with torch.no_grad():
        guesses = model.eval()(input_ids=tokens).logits.argmax(dim=1)
    print(f"{job.steps} steps, accuracy on 512 new sentences {(guesses == labels).float().mean():.3f}")


if __name__ == "__main__":
    main()
