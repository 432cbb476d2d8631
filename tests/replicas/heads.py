"""Small random heads on an embedding, one of each kind, and the torch networks they are."""

import torch
from torch import nn

from gpuclassify.models.head_network import HeadNetwork

TOPICS = ["News", "Games", "Science"]
TAGS = ["spam", "adult"]


def network(*modules, seed):
    """A torch network whose linear layers are random and far from 0."""
    torch.manual_seed(seed)
    made = nn.Sequential(*modules)
    for layer in made:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.5)
            nn.init.normal_(layer.bias)
    return made.requires_grad_(False)


def networks(width):
    """One of each kind: a regression with a sigmoid, topics, and tags."""
    return {
        "edu": network(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid(), seed=0),
        "topic": network(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 3), seed=1),
        "tag": network(nn.Linear(width, 2), seed=2),
    }


def save_heads(folder, width, backbone=None, names=("edu", "topic", "tag")):
    """Write the networks as heads, and return their directories by name."""
    kinds = {
        "edu": ("regression", ["score"], "relu", "sigmoid"),
        "topic": ("single_label_classification", TOPICS, "tanh", None),
        "tag": ("multi_label_classification", TAGS, None, None),
    }
    for name in names:
        problem_type, labels, hidden, output = kinds[name]
        linears = [layer for layer in networks(width)[name] if isinstance(layer, nn.Linear)]
        layers = [(layer.weight.numpy(), layer.bias.numpy()) for layer in linears]
        HeadNetwork(layers, problem_type, labels, hidden, output, backbone).save(folder / name)
    return {name: folder / name for name in names}
