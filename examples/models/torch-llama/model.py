"""A Llama in plain torch that reads and writes a paged KV cache.

Shapes: R rows (requests of one step), T tokens a row, W blocks a row, G key/value heads, D head size,
L cached tokens that a step can see. Attributes are named as in the checkpoint: weights load by name.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

LayerCache = tuple[Tensor, Tensor]  # keys and values, each [blocks, G, block size, D]


class CheckpointError(ValueError):
    """A model directory that this network cannot serve; the message names the place and what is wrong."""


@dataclass(frozen=True)
class Step:
    """Where the tokens of one forward pass stand, and what they see; the same for every layer."""

    cos: Tensor  # [R, 1, T, D / 2]
    sin: Tensor
    blocks: Tensor  # [R, T] the cache block that each token's key and value are written to
    offsets: Tensor  # [R, T] and the place in it
    context: Tensor  # [R, G, L / block size] what holds a row's past and present: block * G + head
    mask: Tensor  # [R, 1, T, L] True where a token sees a cached one


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim: int = config.head_dim
        queries = config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)

    def forward(self, hidden: Tensor, step: Step, cache: LayerCache) -> Tensor:
        split = (*hidden.shape[:2], -1, self.head_dim)
        query = _rotate(self.q_proj(hidden).view(split).transpose(1, 2), step)
        key = _rotate(self.k_proj(hidden).view(split).transpose(1, 2), step)
        keys, values = cache
        keys[step.blocks, :, step.offsets] = key.transpose(1, 2)
        values[step.blocks, :, step.offsets] = self.v_proj(hidden).view(split)

        mixed = functional.scaled_dot_product_attention(
            query, _gather(keys, step), _gather(values, step), attn_mask=step.mask, enable_gqa=True
        )
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output


def _rotate(heads: Tensor, step: Step) -> Tensor:
    """RoPE: turn dimension i together with dimension i + D / 2. heads: [R, heads, T, D]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * step.cos - second * step.sin, second * step.cos + first * step.sin), dim=-1)


def _gather(cache: Tensor, step: Step) -> Tensor:
    """What each row can see: [R, G, L, D]. One copy, block by block and head by head."""
    rows, heads, _ = step.context.shape
    seen = cache.flatten(0, 1).index_select(0, step.context.flatten())
    return seen.view(rows, heads, -1, cache.shape[-1])


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        sizes, bias = (config.hidden_size, config.intermediate_size), config.mlp_bias
        self.gate_proj = nn.Linear(*sizes, bias=bias)
        self.up_proj = nn.Linear(*sizes, bias=bias)
        self.down_proj = nn.Linear(*sizes[::-1], bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class Norm(nn.Module):
    """RMS norm, computed in float32 whatever the network's type is."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps: float = config.rms_norm_eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(hidden.dtype)


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.input_layernorm = Norm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, step: Step, cache: LayerCache) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), step, cache)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Decoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config)


class PagedLlama(nn.Module):
    """The network. Make one with `load`; `config` is a transformers LlamaConfig."""

    def __init__(self, config: Any, frequencies: Tensor, rope_scale: float) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.key_value_heads: int = config.num_key_value_heads
        self._frequencies = frequencies  # [D / 2]
        self._rope_scale = rope_scale

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @classmethod
    def load(cls, config: Any, directory: Path, max_seq_len: int, dtype: torch.dtype) -> "PagedLlama":
        """Read the safetensors of a Hugging Face model directory, for sequences up to `max_seq_len` tokens.

        Raises CheckpointError for files or tensors that are missing or misshapen, and for what a config asks
        that this network does not do.
        """
        if config.hidden_act != "silu":
            raise CheckpointError(f"{directory}: hidden_act is {config.hidden_act!r}; expected 'silu'")
        frequencies, rope_scale = rope_frequencies(config, max_seq_len)
        with torch.device("meta"):  # names and shapes only: the tensors of the files take these places
            network = cls(config, frequencies, rope_scale)
        wanted = network.state_dict()
        weights: dict[str, Tensor] = {}
        for name, tensor, file in _read_tensors(directory):
            if name in wanted and tensor.shape != wanted[name].shape:
                shapes = f"{list(tensor.shape)}, and config.json says {list(wanted[name].shape)}"
                raise CheckpointError(f"{file}: {name} has the shape {shapes}")
            weights[name] = tensor.to(dtype)
        if config.tie_word_embeddings and "model.embed_tokens.weight" in weights:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        if missing := [name for name in wanted if name not in weights]:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise CheckpointError(f"{_listing(directory)} lacks {', '.join(missing[:5])}{more}")
        network.load_state_dict(weights, strict=False, assign=True)
        return network.requires_grad_(False)

    def forward(
        self, tokens: Tensor, positions: Tensor, page_table: Tensor, kv_cache: list[LayerCache]
    ) -> Tensor:
        """Write R rows of T tokens to the cache; returns float32 logits [R, vocab] of each row's last token.

        All int64. tokens, positions: [R, T]. page_table: [R, W]; block i of a row holds the keys and values
        of its tokens from position i * block size on.
        """
        if not len(tokens):
            return torch.empty(0, self.lm_head.out_features)
        step = self._step(positions, page_table, block_size=kv_cache[0][0].shape[2])
        hidden = self.model.embed_tokens(tokens)
        for layer, cache in zip(self.model.layers, kv_cache, strict=True):
            hidden = layer(hidden, step, cache)
        logits: Tensor = self.lm_head(self.model.norm(hidden[:, -1]))
        return logits.float()

    def _step(self, positions: Tensor, page_table: Tensor, block_size: int) -> Step:
        angles = positions[:, None, :, None].float() * self._frequencies
        used = int(positions.max()) // block_size + 1
        cached = torch.arange(used * block_size)
        heads = torch.arange(self.key_value_heads)[:, None]
        return Step(
            cos=(angles.cos() * self._rope_scale).to(self.dtype),
            sin=(angles.sin() * self._rope_scale).to(self.dtype),
            blocks=page_table.gather(1, positions // block_size),
            offsets=positions % block_size,
            context=page_table[:, None, :used] * self.key_value_heads + heads,
            mask=cached <= positions[:, None, :, None],
        )


def rope_frequencies(config: Any, max_seq_len: int) -> tuple[Tensor, float]:
    """The inverse frequencies [D / 2] of `config.rope_parameters`, and the factor on cosine and sine.

    Raises CheckpointError for a kind whose frequencies would change while a sequence grows: the keys in the
    cache would have to be turned again.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    kind = rope["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        return 1.0 / rope["rope_theta"] ** exponents, 1.0
    limit = rope.get("original_max_position_embeddings", config.max_position_embeddings)
    if kind in ("dynamic", "longrope") and max_seq_len > limit:
        raise CheckpointError(f"{kind!r} RoPE needs max_model_len <= {limit} here, and it is {max_seq_len}")
    if kind not in ROPE_INIT_FUNCTIONS:
        raise CheckpointError(f"unknown rope_type {kind!r}; known: default, {', '.join(ROPE_INIT_FUNCTIONS)}")
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies, float(scale)


def _listing(directory: Path) -> Path:
    """What says which tensors a checkpoint has: the index of its shards, or its only file."""
    index = directory / "model.safetensors.index.json"
    return index if index.is_file() else directory / "model.safetensors"


def _read_tensors(directory: Path) -> Iterator[tuple[str, Tensor, Path]]:
    """Each tensor of a checkpoint, with its name and file."""
    listing = _listing(directory)
    files = [listing]
    if listing.suffix == ".json":
        shards = json.loads(listing.read_text())["weight_map"].values()
        files = [directory / name for name in sorted(set(shards))]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist; give a directory with a model's safetensors files")
        for name, tensor in load_file(file).items():
            yield name, tensor, file
