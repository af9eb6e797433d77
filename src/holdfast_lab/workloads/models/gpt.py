"""A small GPT that predicts the next character, with the shape of A. Karpathy's nanoGPT."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from holdfast.errors import ConfigError
from holdfast_lab.workloads.models.blocks import Block, NetworkLayout
from holdfast_lab.workloads.models.layers import draw_normal

_STD = 0.02  # of initial weights, as in GPT-2


def gpt(
    num_classes: int, *, context: int = 256, layers: int = 6, heads: int = 6, width: int = 384, dropout: float = 0.2
) -> NetworkLayout:
    """Return a transformer with learned positions, pre-norm attention and MLP, and no biases.

    The head is **not tied** to the embedding, because a tied matrix would be in the first and in the last stage of a
    pipeline. So with 65 characters (Shakespeare's) and the settings below it has 10,770,048 parameters, 24,960 more
    than nanoGPT's, which is tied.

    Args:
        num_classes: Number of distinct characters.
        context: Maximum number of positions.
        layers: Number of layers, each with attention and an MLP; each layer is a block.
        heads: Attention heads; must divide ``width``.
        width: Length of the vectors.
        dropout: Probability, for embeddings, attention and residual branches.

    Returns:
        A layout of a module that takes character numbers, int64 of shape ``(samples, places)``, and returns scores of
        the next one at each position, of shape ``(samples, places, num_classes)``.

    Raises:
        ConfigError: if a size is below 1, dropout is not in [0, 1), or heads do not divide the width.
    """
    for name, value in {"context": context, "layers": layers, "heads": heads, "width": width}.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if width % heads:
        raise ConfigError(f"width must be a multiple of heads ({heads}), got {width}")
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout must be at least 0 and below 1, got {dropout}")
    std = _STD / math.sqrt(2 * layers)
    blocks = (
        Block("embedding", partial(CharacterEmbedding, num_classes, context, width, dropout)),
        *(Block(f"layer{number}", partial(TransformerLayer, width, heads, dropout, std)) for number in range(layers)),
        Block("head", partial(_head, width, num_classes)),
    )
    return NetworkLayout(blocks, (context,), torch.int64)


class CharacterEmbedding(nn.Module):
    """Character embeddings plus position embeddings.

    Args:
        characters: Number of distinct characters.
        context: Maximum number of positions.
        width: Length of the vectors.
        dropout: Probability.
    """

    def __init__(self, characters: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.characters = nn.Parameter(torch.empty(characters, width))
        self.places = nn.Parameter(torch.empty(context, width))
        self.dropout = nn.Dropout(dropout)
        for table in (self.characters, self.places):
            draw_normal(table, _STD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take character numbers, ``(samples, places)``."""
        places, context = x.shape[1], len(self.places)
        if places > context:
            raise ConfigError(
                f"a text must not be longer than the context of the network ({context}), got {places} characters"
            )
        return self.dropout(F.embedding(x, self.characters) + self.places[:places])  # type: ignore[no-any-return]


class TransformerLayer(nn.Module):
    """Causal attention, then an MLP, each pre-normed and with a residual connection.

    Args:
        width: Length of the vectors.
        heads: Attention heads, which divide the width.
        dropout: Probability.
        std: Standard deviation of the initial output matrices of both branches.
    """

    def __init__(self, width: int, heads: int, dropout: float, std: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.norm_mlp = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = _linear(width, 3 * width), _linear(width, width, std)
        self.mlp = nn.Sequential(_linear(width, 4 * width), nn.GELU(), _linear(4 * width, width, std))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take vectors, ``(samples, places, width)``."""
        samples, places, width = x.shape
        qkv = self.qkv(self.norm(x)).view(samples, places, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropped = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropped)
        x = x + self._thinned(self.out(seen.transpose(1, 2).reshape(samples, places, width)))
        return x + self._thinned(self.mlp(self.norm_mlp(x)))

    def _thinned(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training)


def _head(width: int, characters: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width, bias=False), _linear(width, characters))


def _linear(inputs: int, outputs: int, std: float = _STD) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    draw_normal(layer.weight, std)
    return layer
