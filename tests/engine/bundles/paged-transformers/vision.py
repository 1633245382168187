"""A Qwen 2 VL: images in prompts, and RoPE positions that depend on them.

vLLM's own module for this family needs torchvision; so the bundle brings a processor for vLLM of its own, as
any bundle may for an architecture that vLLM does not know.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from paged import LayerCache, PagedModel, Reload, Step
from PIL import Image
from torch import Tensor
from transformers import BatchFeature, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from tt_sampling import TTSamplingParams
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
)

LARGEST = 24
"""Tokens of the largest image."""
Images = Sequence[Sequence[Tensor] | None]


class ProcessingInfo(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None, "video": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"image": LARGEST}


class DummyInputs(BaseDummyInputsBuilder[ProcessingInfo]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return "<|image_pad|>" * mm_counts.get("image", 0)

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> Any:
        return {"image": [Image.new("RGB", (8, 8))] * mm_counts.get("image", 0)}


class Processor(BaseMultiModalProcessor[ProcessingInfo]):
    def _call_hf_processor(self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, object]) -> Any:
        processor = Qwen2VLImageProcessorPil.from_pretrained(self.info.model_id)
        return processor(images=hf_data["images"], return_tensors="pt")

    def _get_mm_fields_config(self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Any) -> Any:
        grids = hf_inputs.get("image_grid_thw", torch.empty((0, 3), dtype=torch.long))
        return {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image"),
        }

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Any:
        config = self.info.get_hf_config()
        merged = config.vision_config.spatial_merge_size**2

        def placeholders(index: int) -> list[int]:
            grid = out_mm_kwargs["image"][index]["image_grid_thw"].data
            return [config.image_token_id] * (int(grid.prod()) // merged)

        return [PromptReplacement("image", target=[config.image_token_id], replacement=placeholders)]


@MULTIMODAL_REGISTRY.register_processor(Processor, info=ProcessingInfo, dummy_inputs=DummyInputs)
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
