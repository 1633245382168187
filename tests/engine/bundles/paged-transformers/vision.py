"""A Qwen 2 VL: images, processed by vLLM's own code for this family, and RoPE positions that hang on them."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from paged import LayerCache, PagedModel, Reload, Step
from torch import Tensor
from transformers import Qwen2VLForConditionalGeneration
from tt_sampling import TTSamplingParams
from vllm.model_executor.models.qwen2_vl import (
    Qwen2VLDummyInputsBuilder,
    Qwen2VLMultiModalProcessor,
    Qwen2VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

Images = Sequence[Sequence[Tensor] | None]


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2VLMultiModalProcessor, info=Qwen2VLProcessingInfo, dummy_inputs=Qwen2VLDummyInputsBuilder
)
class PagedQwen2VL(PagedModel):
    network_class = Qwen2VLForConditionalGeneration
    attention: ClassVar[Any] = {"text_config": "paged", "vision_config": "sdpa"}
    supports_multimodal = True
    supports_mrope = True

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._deltas = [0] * self.rows

    def prefill_forward(
        self,
        *,
        tokens: Tensor,
        page_table: Tensor,
        kv_cache: list[LayerCache],
        enable_trace: bool,
        prompt_lens: Sequence[int],
        start_pos: Sequence[int],
        empty_slots: Sequence[int],
        pixel_values: Images,
        image_grid_thw: Images,
        sampling_params: TTSamplingParams | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits ``[N, 1, V]`` or ids ``[N]``, and how far RoPE positions are off behind each chunk."""
        rows, deltas = [], []
        places = zip(tokens, start_pos, prompt_lens, pixel_values, image_grid_thw, strict=True)
        for row, start, end, pixels, grids in places:
            inputs, delta = self._with_images(row[: int(end)].long(), int(start), pixels, grids)
            rows.append((int(start), int(end), inputs))
            deltas.append(delta)
        tables = self.tables_of(len(kv_cache), page_table, None, len(tokens))
        return self.prefill(kv_cache, rows, tables, empty_slots, sampling_params), deltas

    def _with_images(
        self, tokens: Tensor, start: int, pixels: Sequence[Tensor] | None, grids: Sequence[Tensor] | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Embeddings and RoPE positions of ``tokens[start:]``, whose images are computed again from the first
        on: transformers counts them so."""
        model = self.network.model
        embeddings = model.get_input_embeddings()(tokens[None])
        if pixels is None or grids is None:
            positions = torch.arange(start, len(tokens))[None]
            return {"inputs_embeds": embeddings[:, start:], "position_ids": positions}, torch.tensor(0)
        of_image = tokens[None] == self.network.config.image_token_id
        grid = torch.stack(list(grids))
        with torch.inference_mode():
            features = model.get_image_features(torch.cat(list(pixels)), grid).pooler_output
        embeddings = embeddings.masked_scatter(of_image[..., None], torch.cat(features))
        positions, delta = model.get_rope_index(tokens[None], of_image.int(), grid)
        return {"inputs_embeds": embeddings[:, start:], "position_ids": positions[..., start:]}, delta[0, 0]

    def decode_forward(
        self,
        *,
        tokens: Tensor,
        page_table: Tensor,
        kv_cache: list[LayerCache],
        start_pos: Tensor,
        enable_trace: bool,
        read_from_device: bool,
        rope_deltas_all_users: list[int] | None,
        sampling_params: TTSamplingParams | None = None,
        reload_inputs: bool,
        reload_page_table: bool,
        reload_sampling_params: bool,
        reset_sampling_state: bool,
    ) -> Tensor:
        """Logits ``[B, 1, V]``, or ids ``[B]``. Without new RoPE deltas, those of the last decode hold."""
        if rope_deltas_all_users is not None:
            self._deltas = rope_deltas_all_users
        commands = Reload(reload_inputs, reload_page_table, reload_sampling_params)
        return self.decode(kv_cache, (tokens, start_pos, page_table, None), sampling_params, commands)

    def decode_inputs(self, rows: Tensor, step: Step) -> dict[str, Any]:
        return {"position_ids": step.positions + torch.tensor(self._deltas)[rows, None]}
