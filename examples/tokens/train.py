"""A tagger over sequences of unequal length: a collate_fn that pads, and gradients accumulated by tokens.

python examples/tokens/train.py                        one process
trueline run examples/tokens/train.py --workers 3      three, any of which may be killed

The loss is a mean over the tokens of the whole step, whatever the lengths: `weight` is the number of tokens in a batch,
and micro_batch the number of sequences in one forward.
"""

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import trueline

PADDING = -100


class Sequences(Dataset):
    """Each item: token numbers of a length of its own, and for each token whether it is even."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(2, 12, (size,), generator=generator).tolist()
        self.tokens = [torch.randint(1, 32, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int):
        return self.tokens[index], (self.tokens[index] % 2 == 0).long()


def collate(items):
    tokens, tags = zip(*items, strict=True)
    padded = pad_sequence(tags, batch_first=True, padding_value=PADDING)
    return pad_sequence(tokens, batch_first=True), padded


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = DataLoader(Sequences(256), collate_fn=collate)  # its batches are not used: the job makes them
    job = trueline.Elastic(
        model, optimizer, loader, global_batch=32, epochs=options.epochs, options=trueline.Options(micro_batch=8)
    )
    for batch in job:
        logits, tags = model(batch.inputs), batch.labels
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=PADDING)
        job.step(loss, weight=(tags != PADDING).sum())

    tokens = torch.arange(1, 32)
    correct = (model(tokens).argmax(dim=1) == (tokens % 2 == 0).long()).float().mean().item()
    if job.leads:
        print(f"{job.steps} steps, {correct:.2f} of the tokens are known")


if __name__ == "__main__":
    main()
