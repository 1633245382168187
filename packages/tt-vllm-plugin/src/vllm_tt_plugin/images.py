"""Images of requests: where they stand in the prompt, and the form in which adapters take them."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from vllm_tt_plugin.errors import StepError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec

OTHER_MODALITIES = ("video", "audio", "vision_chunk")


@attrs.frozen(eq=False)
class Image:
    """One processed image, which the tokens from ``start`` to ``end`` of its prompt stand for."""

    start: int
    end: int
    pixel_values: torch.Tensor
    grid_thw: torch.Tensor | None
    """``[3]``: patches in time, height and width; None for processors that have no such grid."""

    @classmethod
    def of(cls, feature: "MultiModalFeatureSpec") -> "Image":
        """Raises ``StepError`` for another modality or form, which are refused where requests arrive."""
        data = None if feature.data is None else feature.data.get_data()
        if feature.modality != "image" or data is None or "pixel_values" not in data:
            raise StepError(
                f"an item of modality {feature.modality!r} came with {sorted(data or ())}; expected an image"
                " with pixel_values"
            )
        place = feature.mm_position
        pixels: Any = data["pixel_values"]
        grid: Any = data.get("image_grid_thw")
        return cls(place.offset, place.offset + place.length, pixels, grid)


Rows = list[list[torch.Tensor] | None]
"""For each row of a prefill None, or one entry for each image."""


@attrs.frozen(eq=False)
class PrefillImages:
    """The images of a prefill, row by row: those that begin before the end of a row's chunk."""

    pixel_values: Rows
    image_grid_thw: Rows

    @classmethod
    def of(cls, rows: Iterable[tuple[Sequence[Image], int]]) -> "PrefillImages":
        """``rows``: the images of each request, and where its chunk ends. Chunks never split an image."""
        pixels: Rows = []
        grids: Rows = []
        for images, end in rows:
            known = [image for image in images if image.start < end]
            pixels.append([image.pixel_values for image in known] or None)
            grids.append([image.grid_thw for image in known if image.grid_thw is not None] or None)
        return cls(pixels, grids)


@attrs.frozen
class Inputs:
    """What a model is given beside tokens: known from the checkpoint, and from what its class takes."""

    images: bool = False
    rope_deltas: bool = False
    """RoPE positions of a request depend on its images: prefills return how far they are off, decodes are
    told."""

    @classmethod
    def of(cls, adapter_class: type[Any], config: "VllmConfig") -> "Inputs":
        model = config.model_config
        return cls(
            images=model.is_multimodal_model and _takes(adapter_class.prefill_forward, "pixel_values"),
            rope_deltas=model.uses_mrope and _takes(adapter_class.decode_forward, "rope_deltas_all_users"),
        )


def settle(config: "VllmConfig", inputs: Inputs) -> None:
    """Make vLLM's settings those of a model that is given whole images with its prompts, and nothing else.

    Other modalities are then refused by vLLM itself, request by request. No encoder's output is kept beside
    the KV cache, so there is nothing to ration, and rations would cut prompts where nothing may be cut.
    """
    multimodal = config.model_config.multimodal_config
    if multimodal is None:
        return
    if not inputs.images:
        multimodal.language_model_only = True
        return
    from vllm.config.multimodal import BaseDummyOptions

    for modality in OTHER_MODALITIES:
        multimodal.limit_per_prompt[modality] = BaseDummyOptions(count=0)
    scheduler = config.scheduler_config
    scheduler.disable_chunked_mm_input = True
    everything = config.model_config.max_model_len * scheduler.max_num_seqs
    scheduler.max_num_encoder_input_tokens = scheduler.encoder_cache_size = everything


def refused_items(processed_inputs: Mapping[str, Any]) -> list[str]:
    """Modalities of a request's processed items that no prefill could pass on; empty for most requests.

    Items without data are known to the engine from an earlier request, and those in shared memory tell their
    address alone; both were looked at when they came.
    """
    return [
        modality
        for modality, items in (processed_inputs.get("mm_kwargs") or {}).items()
        if modality != "image" or not all(map(_has_pixels, items))
    ]


def _has_pixels(item: Mapping[str, Any] | None) -> bool:
    return item is None or "pixel_values" in item or "address" in item


def _takes(method: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(method).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def whole_items(items: Iterable["MultiModalFeatureSpec"], start: int, count: int, most: int) -> int:
    """The length of a chunk of about ``count`` tokens from ``start`` on, at most ``most``, that cuts no item.

    It ends before the item, or behind one that it starts with; 0 if that is too long.
    """
    end = start + count
    for item in items:
        first, behind = item.mm_position.offset, item.mm_position.offset + item.mm_position.length
        if first < end < behind:
            if start < first:
                return first - start
            return behind - start if count and behind - start <= most else 0
    return count
