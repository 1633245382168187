"""A Llama as ttnn programs that read and write a paged KV cache, split over the columns of a mesh.

Shapes: 32 rows of a decode, S tokens of a prefill, H hidden size, D head size, V vocabulary, P devices. Each
device holds its part of the heads, of the MLP and of the vocabulary, and adds up with the others after each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import ttnn
from safetensors.torch import load_file
from torch import Tensor
from ttnn_inputs import ROWS, Chunk, put

Cache = tuple[Any, Any]  # keys and values of a layer, each [blocks, heads of a device, block size, D]
Attend = Callable[[Any, Cache], Any]  # queries, keys and values [1, 1, S, _] -> mixed values [1, 1, S, _]


class CheckpointError(ValueError):
    """A model directory that this network cannot serve; the message says what is wrong with it."""


@dataclass(frozen=True)
class Layer:
    input_norm: Any
    qkv: Any
    output: Any
    mlp_norm: Any
    gate: Any
    up: Any
    down: Any


class TtnnLlama:
    """The network on a mesh. Calls enqueue programs, and wait for nothing."""

    def __init__(
        self, config: Any, directory: Path, mesh: Any, max_seq_len: int, weight_type: Any = ttnn.bfloat16
    ) -> None:
        """Read the safetensors of a Hugging Face model directory. Raises CheckpointError."""
        self.devices: int = mesh.shape[1]
        self._config, self._mesh, self._weight_type = config, mesh, weight_type
        self._check(directory, tuple(mesh.shape))
        files = sorted(directory.glob("*.safetensors"))
        self._weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        try:
            embedding = self._weights["model.embed_tokens.weight"]
            self._embedding = put(mesh, embedding, layout=ttnn.ROW_MAJOR_LAYOUT)
            self._layers = [self._layer(f"model.layers.{i}") for i in range(config.num_hidden_layers)]
            self._norm = self._whole("model.norm")
            tied = config.tie_word_embeddings
            self._head = self._columns(embedding if tied else self._weights["lm_head.weight"])
        except KeyError as missing:
            raise CheckpointError(f"{directory} lacks {missing} among {len(self._weights)} tensors") from None
        self._weights = {}  # the host's memory is needed for other things
        self._cos, self._sin = (
            put(mesh, table, layout=ttnn.ROW_MAJOR_LAYOUT) for table in rope_tables(config, max_seq_len)
        )
        grid = mesh.compute_with_storage_grid_size()
        self._row_per_core = ttnn.create_sharded_memory_config(
            shape=(ROWS, config.head_dim),
            core_grid=ttnn.num_cores_to_corerangeset(ROWS, grid, row_wise=True),
            strategy=ttnn.ShardStrategy.HEIGHT,
            use_height_and_width_as_shard_shape=True,
        )
        self._grid = grid

    def _check(self, directory: Path, mesh_shape: tuple[int, int]) -> None:
        config, parts = self._config, self.devices
        heads, features = ("num_attention_heads", "num_key_value_heads"), ("intermediate_size", "vocab_size")
        wrong = [
            f"{name} is {getattr(config, name)}; expected a multiple of {unit * parts} on {parts} devices"
            for names, unit in ((heads, 1), (features, 32))
            for name in names
            if getattr(config, name) % (unit * parts)
        ]
        if config.head_dim != 32 and config.head_dim % 64:
            wrong.append(f"head_dim is {config.head_dim}; expected 32 or a multiple of 64")
        if config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
            wrong.append("it has biases or another activation than silu, which this network does not know")
        if mesh_shape[0] != 1:
            wrong.append(f"the mesh is {mesh_shape[0]}x{parts}; expected one row of devices")
        if wrong:
            raise CheckpointError(f"{directory}: {'; '.join(wrong)}")

    def _whole(self, name: str) -> Any:
        return put(self._mesh, self._weights[f"{name}.weight"][None, None, None])

    def _columns(self, weight: Tensor) -> Any:
        """A checkpoint's [outputs, inputs]: each device computes a part of the outputs."""
        return put(self._mesh, weight.T[None, None], self._weight_type, split=3)

    def _rows(self, weight: Tensor) -> Any:
        """Each device multiplies the part of the inputs that it has; the results are to be added up."""
        return put(self._mesh, weight.T[None, None], self._weight_type, split=2)

    def _layer(self, name: str) -> Layer:
        attention, mlp = (
            {part: self._weights[f"{name}.{block}.{part}_proj.weight"] for part in parts}
            for block, parts in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down")))
        )
        heads = zip(*(attention[part].chunk(self.devices) for part in "qkv"), strict=True)
        return Layer(
            input_norm=self._whole(f"{name}.input_layernorm"),
            qkv=self._columns(torch.cat([part for of_device in heads for part in of_device])),
            output=self._rows(attention["o"]),
            mlp_norm=self._whole(f"{name}.post_attention_layernorm"),
            gate=self._columns(mlp["gate"]),
            up=self._columns(mlp["up"]),
            down=self._rows(mlp["down"]),
        )

    def decode(self, tokens: Any, positions: Any, page_table: Any, kv_cache: list[Cache]) -> Any:
        """Logits [1, 1, 32, V / P] of one token of each row.

        tokens: uint32 [1, 32]. positions: int32 [32]; a row with -1 writes nothing, and its logits mean
        nothing. page_table: int32 [32, W].
        """
        known = ttnn.maximum(ttnn.to_layout(ttnn.reshape(positions, (1, ROWS)), ttnn.TILE_LAYOUT), 0)
        places = ttnn.to_layout(ttnn.typecast(known, ttnn.uint32), ttnn.ROW_MAJOR_LAYOUT)
        cos, sin = (
            ttnn.to_memory_config(
                ttnn.reshape(self._looked_up(places, table), (1, ROWS, 1, self._config.head_dim)),
                self._row_per_core,
            )
            for table in (self._cos, self._sin)
        )

        def attend(qkv: Any, cache: Cache) -> Any:
            query, key, value = ttnn.experimental.nlp_create_qkv_heads_decode(
                qkv, **self._heads, memory_config=ttnn.L1_HEIGHT_SHARDED_MEMORY_CONFIG
            )
            query = ttnn.experimental.rotary_embedding_hf(query, cos, sin, is_decode_mode=True)
            key = ttnn.experimental.rotary_embedding_hf(key, cos, sin, is_decode_mode=True)
            for cached, new in zip(cache, (key, value), strict=True):
                ttnn.experimental.paged_update_cache(
                    cached, new, update_idxs_tensor=positions, page_table=page_table
                )
            mixed = ttnn.transformer.paged_scaled_dot_product_attention_decode(
                query, *cache, page_table, cur_pos_tensor=positions
            )
            mixed = ttnn.experimental.nlp_concat_heads_decode(
                ttnn.to_memory_config(mixed, self._row_per_core), num_heads=self._heads["num_heads"]
            )
            return ttnn.to_memory_config(mixed, ttnn.DRAM_MEMORY_CONFIG)

        return self._logits(self._hidden(tokens, kv_cache, attend))

    def prefill(self, chunk: Chunk, kv_cache: list[Cache]) -> Any:
        """Write a chunk to the cache; logits [1, 1, 32, V / P] of its last token, 32 times."""
        cos, sin = (
            ttnn.unsqueeze_to_4D(self._looked_up(chunk.positions, table)) for table in (self._cos, self._sin)
        )
        block_size = kv_cache[0][0].shape[2]
        program = ttnn.SDPAProgramConfig(
            compute_with_storage_grid_size=self._grid,
            q_chunk_size=block_size,  # both must divide every position at which a chunk may begin
            k_chunk_size=block_size,
            exp_approx_mode=False,
        )

        def attend(qkv: Any, cache: Cache) -> Any:
            query, key, value = ttnn.experimental.nlp_create_qkv_heads(
                qkv, **self._heads, transpose_k_heads=False
            )
            query = ttnn.experimental.rotary_embedding_hf(query, cos, sin)
            key = ttnn.experimental.rotary_embedding_hf(key, cos, sin)
            for cached, new in zip(cache, (key, value), strict=True):
                ttnn.experimental.paged_fill_cache(cached, new, chunk.own_blocks, batch_idx=0)
            mixed = ttnn.transformer.chunked_scaled_dot_product_attention(
                query,
                *cache,
                chunk.page_table,
                chunk_start_idx_tensor=chunk.start,
                program_config=program,
            )
            return ttnn.experimental.nlp_concat_heads(mixed)

        hidden = self._hidden(chunk.tokens, kv_cache, attend)
        # A slice would be a program for each place; a look-up is one for all.
        rows = ttnn.to_layout(hidden, ttnn.ROW_MAJOR_LAYOUT)
        return self._logits(ttnn.unsqueeze_to_4D(self._looked_up(chunk.last, rows)))

    @property
    def _heads(self) -> dict[str, int]:
        config = self._config
        return {
            "num_heads": config.num_attention_heads // self.devices,
            "num_kv_heads": config.num_key_value_heads // self.devices,
        }

    def _looked_up(self, places: Any, table: Any) -> Any:
        return ttnn.embedding(places, table, layout=ttnn.TILE_LAYOUT)

    def _hidden(self, tokens: Any, kv_cache: list[Cache], attend: Attend) -> Any:
        """[1, 1, S, H] of all layers."""
        hidden = ttnn.unsqueeze_to_4D(self._looked_up(tokens, self._embedding))
        for layer, cache in zip(self._layers, kv_cache, strict=True):
            mixed = attend(ttnn.linear(self._normed(hidden, layer.input_norm), layer.qkv), cache)
            hidden = ttnn.add(hidden, self._summed(ttnn.linear(mixed, layer.output)))
            normed = self._normed(hidden, layer.mlp_norm)
            gated = ttnn.multiply(
                ttnn.linear(normed, layer.gate, activation="silu"), ttnn.linear(normed, layer.up)
            )
            hidden = ttnn.add(hidden, self._summed(ttnn.linear(gated, layer.down)))
        return hidden

    def _normed(self, hidden: Any, weight: Any) -> Any:
        return ttnn.rms_norm(hidden, epsilon=self._config.rms_norm_eps, weight=weight)

    def _summed(self, part: Any) -> Any:
        return part if self.devices == 1 else ttnn.all_reduce(part, cluster_axis=1)

    def _logits(self, hidden: Any) -> Any:
        return ttnn.linear(self._normed(hidden, self._norm), self._head)


def rope_tables(config: Any, max_seq_len: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max_seq_len, D] of all positions. Raises CheckpointError for an unknown kind."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope, scale = config.rope_parameters, 1.0
    kind = rope["rope_type"]
    if kind == "default":
        frequencies = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    elif kind in ("linear", "llama3", "yarn"):
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    else:
        raise CheckpointError(f"rope_type is {kind!r}; expected default, linear, llama3 or yarn")
    angles = torch.arange(max_seq_len)[:, None] * frequencies.repeat(2)
    return angles.cos() * scale, angles.sin() * scale
