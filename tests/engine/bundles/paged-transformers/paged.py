"""Models of transformers over a paged cache: what is common to the bundles of this folder.

transformers' own network runs; only its attention is replaced, by one that writes keys and values to blocks
and reads them back through page tables. So the tokens are comparable with those that transformers generates,
and any wrong block, position or window changes them.

Shapes: N rows of a prefill, B rows of a decode, R rows of one pass, T tokens a row, W blocks a row, G
key/value heads, D head size, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface
from tt_sampling import TTSamplingParams, sample

LayerCache = tuple[Tensor, Tensor]  # keys and values, each [lanes * blocks, G, block size, D]
Layers = Sequence[tuple[Sequence[int], torch.dtype, int]]
UNWRITTEN = 3.0  # whoever reads a place that nobody wrote gets other tokens


@attrs.frozen(eq=False)
class Step:
    """Where the tokens of one pass stand ``[R, T]``, and for each layer its cache and page table."""

    positions: Tensor
    caches: list[LayerCache]
    tables: list[Tensor]


@attrs.frozen
class Reload:
    """The reload commands that matter to a model whose sampling keeps no state."""

    inputs: bool
    page_table: bool
    params: bool


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    step: Step,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers calls this for each layer: query ``[R, heads, T, D]``, key and value ``[R, G, T, D]``."""
    keys, values = step.caches[module.layer_idx]
    table, positions = step.tables[module.layer_idx], step.positions
    size = keys.shape[2]
    blocks, offsets = table.gather(1, positions // size), positions % size
    keys[blocks, :, offsets] = key.transpose(1, 2)
    values[blocks, :, offsets] = value.transpose(1, 2)
    used = table[:, : int(positions.max()) // size + 1]
    distance = positions[:, None, :, None] - torch.arange(used.shape[1] * size)
    mask = (distance >= 0) & (distance < (sliding_window or positions.max() + 1))
    mixed = functional.scaled_dot_product_attention(
        query, _gather(keys, used), _gather(values, used), attn_mask=mask, scale=scaling, enable_gqa=True
    )
    return mixed.transpose(1, 2), None


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    return cache[blocks].transpose(1, 2).flatten(2, 3)


AttentionInterface.register("paged", paged_attention)


class PagedModel(torch.nn.Module):
    """An adapter around a causal model of transformers, with version 1 of the reload commands."""

    network_class: ClassVar[Any]
    attention: ClassVar[Any] = "paged"
    model_capabilities: ClassVar[dict[str, Any]] = {
        "supports_prefix_caching": True,
        "supports_chunked_prefill": True,
        "supports_async_decode": True,
        "supports_sample_on_device": True,
        "folds_dp_into_lanes": True,
    }
    decode_input_update_contract = 1

    def __init__(self, *, network: Any, rows: int, lanes: int, vllm_config: object = None) -> None:
        super().__init__()
        # vllm_config is never given: vLLM's inspection of the class looks for a parameter of that name.
        self.network = network
        self.rows, self.lanes = rows, lanes
        self._tokens = torch.zeros(rows, dtype=torch.long)
        self._positions = torch.full((rows,), -1)
        self._tables: list[Tensor] = []
        self._params: TTSamplingParams | None = None

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: Any,
        mesh_device: object,
        max_batch_size: int,
        max_seq_len: int = 4096,
        tt_data_parallel: int = 1,
        optimizations: str | None = None,
    ) -> "PagedModel":
        network = cls.network_class.from_pretrained(
            Path(hf_config._name_or_path), dtype=torch.float32, attn_implementation=cls.attention
        )
        return cls(network=network.eval(), rows=max_batch_size, lanes=tt_data_parallel)

    def allocate_kv_cache(
        self, shape: Sequence[int], dtype: torch.dtype, num_layers: int
    ) -> list[LayerCache]:
        return self.allocate_kv_cache_per_layer([(shape, dtype, index) for index in range(num_layers)])

    def allocate_kv_cache_per_layer(self, per_layer_specs: Layers) -> list[LayerCache]:
        """One process holds what the devices of all lanes would: all heads, the lanes one after another."""
        config = self.network.config.get_text_config()
        buffers: dict[int, LayerCache] = {}
        with torch.inference_mode(False):
            for (blocks, _, size, width), _, index in per_layer_specs:
                whole = (self.lanes * blocks, config.num_key_value_heads, size, width)
                if index not in buffers:
                    buffers[index] = torch.full(whole, UNWRITTEN), torch.full(whole, UNWRITTEN)
                require(buffers[index][0].shape == whole, "layers of two shapes in one buffer")
        return [buffers[index] for _, _, index in per_layer_specs]

    def warmup_model_prefill(self, *, kv_cache: Any, enable_trace: bool, can_sample_on_device: bool) -> None:
        """Nothing to compile."""

    def warmup_model_decode(
        self,
        *,
        kv_cache: Any,
        max_batch_size: int,
        num_blocks: int,
        can_sample_on_device: bool,
        enable_trace: bool,
    ) -> None:
        """Nothing to compile."""

    def tables_of(
        self, layers: int, page_table: Tensor, by_layer: list[Tensor] | None, rows: int
    ) -> list[Tensor]:
        """A table ``[rows, W]`` for each layer, checked against the contract."""
        if by_layer is None:
            return [page_table.long()] * layers
        wanted = (self.rows, page_table.shape[1])
        require(len(by_layer) == layers, f"{len(by_layer)} page tables for {layers} layers")
        for table in by_layer:
            require(tuple(table.shape) == wanted and table.dtype == torch.int32, f"a table of {table.shape}")
            require(not table[rows:].any(), "a table is not padded with 0")
        require(any(torch.equal(page_table, table[:rows]) for table in by_layer), "a table of no layer")
        return [table[:rows].long() for table in by_layer]

    def _in_lanes(self, tables: list[Tensor], slots: Tensor, caches: list[LayerCache]) -> list[Tensor]:
        """Where blocks lie in the whole cache: every lane counts its own from 0."""
        lane = slots // (self.rows // self.lanes)
        return [
            table + lane[:, None] * (len(keys) // self.lanes)
            for table, (keys, _) in zip(tables, caches, strict=True)
        ]

    def last_logits(self, step: Step, **inputs: Any) -> Tensor:
        """``[R, V]``, of each row's last token. ``inputs`` hold its tokens, or what stands for them."""
        inputs = {"position_ids": step.positions, **inputs}
        with torch.inference_mode():
            logits: Tensor = self.network(step=step, use_cache=False, logits_to_keep=1, **inputs).logits
        return logits[:, -1]

    def prefill(
        self,
        kv_cache: list[LayerCache],
        rows: Sequence[tuple[int, int, dict[str, Any]]],
        tables: list[Tensor],
        slots: Sequence[int],
        sampling_params: TTSamplingParams | None,
    ) -> Tensor:
        """Logits ``[N, 1, V]``, or ids ``[N]``. ``rows``: start, end and inputs of each chunk."""
        tables = self._in_lanes(tables, torch.tensor(slots), kv_cache)
        last = []
        for row, (start, end, inputs) in enumerate(rows):
            step = Step(torch.arange(start, end)[None], kv_cache, [table[row, None] for table in tables])
            last.append(self.last_logits(step, **inputs))
        logits = torch.cat(last)
        if sampling_params is None:
            return logits[:, None]
        return sample(logits, sampling_params, [end for _, end, _ in rows]).ids

    def decode(
        self,
        kv_cache: list[LayerCache],
        inputs: tuple[Tensor, Tensor, Tensor, list[Tensor] | None],
        sampling_params: TTSamplingParams | None,
        commands: Reload,
    ) -> Tensor:
        """Logits ``[B, 1, V]`` with NaN in empty rows, or ids ``[B]``, after the reload commands."""
        tokens, positions, page_table, by_layer = inputs
        require(not (commands.inputs and commands.page_table), "both reload commands")
        if commands.inputs:
            self._tokens, self._positions = tokens[:, 0].long(), positions.long()
        if commands.inputs or commands.page_table:
            self._tables = self.tables_of(len(kv_cache), page_table, by_layer, len(page_table))
        if commands.params:
            self._params = sampling_params
        rows = (self._positions >= 0).nonzero()[:, 0]
        tables = self._in_lanes([table[rows] for table in self._tables], rows, kv_cache)
        step = Step(self._positions[rows, None], kv_cache, tables)
        logits = torch.full((len(self._tokens), self.network.config.get_text_config().vocab_size), torch.nan)
        tokens = self._tokens[rows, None]
        logits[rows] = self.last_logits(step, input_ids=tokens, **self.decode_inputs(rows, step))
        if sampling_params is None:
            return logits[:, None]
        assert self._params is not None, "sampled before any parameters came"
        ids = sample(logits.nan_to_num(), self._params, (self._positions + 1).tolist()).ids
        self._tokens, self._positions = ids.long(), self._positions + (self._positions >= 0)
        return ids

    def decode_inputs(self, rows: Tensor, step: Step) -> dict[str, Any]:
        """What the network is given beside tokens and their places."""
        return {}

    # vLLM inspects these where it does not know an architecture by itself. The plugin calls none of them.

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError


def require(holds: Any, what: str) -> None:
    """Fail for what contradicts the contract."""
    if not holds:
        raise AssertionError(what)
