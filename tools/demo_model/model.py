"""The network: qwen3's architecture at a small size, in PyTorch, for training only."""

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@attrs.frozen
class Shape:
    """Everything that `export.py` writes to the metadata; equal to what qwen3 calls these things."""

    n_vocab: int
    width: int = 192
    n_layers: int = 6
    n_heads: int = 6
    n_kv_heads: int = 2
    head_width: int = 32
    ffn_width: int = 416
    n_context: int = 2048
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


def rope_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (n_context, head_width / 2)."""
    half = shape.head_width // 2
    frequencies = shape.rope_base ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(shape.n_context, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (batch, heads, length, head_width) as NeoX and qwen3 do: pairs are half a head apart."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q = nn.Linear(shape.width, shape.n_heads * shape.head_width, bias=False)
        self.k = nn.Linear(shape.width, shape.n_kv_heads * shape.head_width, bias=False)
        self.v = nn.Linear(shape.width, shape.n_kv_heads * shape.head_width, bias=False)
        self.out = nn.Linear(shape.n_heads * shape.head_width, shape.width, bias=False)
        self.q_norm = RMSNorm(shape.head_width, shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_width, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (part(x).view(n, length, -1, self.shape.head_width).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k, v = rotate(self.q_norm(q.float()), cos, sin), rotate(self.k_norm(k.float()), cos, sin), v.float()
        # In float32: the CPU kernel for bfloat16 is slower than the one for float32, unlike the matrix products.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(n, length, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.ffn_width, bias=False)
        self.up = nn.Linear(shape.width, shape.ffn_width, bias=False)
        self.down = nn.Linear(shape.ffn_width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.width, shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = RMSNorm(shape.width, shape.norm_eps)
        self.ffn = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.n_vocab, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.n_layers))
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        cos, sin = rope_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.cos: Tensor
        self.sin: Tensor
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.04)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the normed last states, (batch, length, width), of token ids (batch, length)."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """The head is the embedding, transposed: a tied head spends no parameters of its own."""
        return hidden @ self.embedding.weight.T
