"""A module of ElasticDL's zoo: its names, its order of arguments, and its embedding by id."""

import os

import numpy as np
import torch
from elasticdl.python.elasticdl.layers.embedding import Embedding
from gate import scheduler as learning_rate_scheduler

__all__ = ["CustomModel", "dataset_fn", "eval_metrics_fn", "learning_rate_scheduler", "loss", "optimizer"]

name = "zoo"
epochs = 2
global_batch = 16
training_data = validation_data = os.environ.get("ZOO_RECORDS", "records.recordio")


class CustomModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.items = Embedding(4, mask_zero=True, combiner="mean")
        self.user = Embedding(4)
        self.dense = torch.nn.Linear(8, 1)

    def forward(self, items, user):
        rows = torch.cat([self.items(items), self.user(user)], dim=1)
        return self.dense(rows).squeeze(1)


def dataset_fn(data_list, mode, metadata):
    values = np.stack([np.frombuffer(one, np.int64) for one in data_list])
    features = {"items": torch.from_numpy(values[:, 2:].copy()), "user": torch.from_numpy(values[:, 1].copy())}
    return features, torch.from_numpy(values[:, 0].astype(np.float32))


def loss(labels, predictions):
    return torch.nn.functional.binary_cross_entropy_with_logits(predictions, labels)


def optimizer(lr=0.25):
    return lambda params: torch.optim.Adagrad(params, lr)


def eval_metrics_fn():
    return {"accuracy": lambda labels, outputs: ((outputs > 0).float() == labels).float().mean()}
