"""Images in the plugin's own terms, and what vLLM's settings become."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config.multimodal import MultiModalConfig
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem, MultiModalSharedField
from vllm.sampling_params import SamplingParams
from vllm_tt_plugin.errors import StepError
from vllm_tt_plugin.images import Image, Inputs, PrefillImages, refused_items, settle, whole_items
from vllm_tt_plugin.platform import TTPlatform

from .plans import image_feature
from .strict_adapters import HostSampled, Seeing


def test_what_vllm_processed() -> None:
    image = Image.of(image_feature(3, 7, 9))
    assert (image.start, image.end, int(image.pixel_values)) == (3, 7, 9)
    assert image.grid_thw is not None
    assert image.grid_thw.tolist() == [1, 2, 2]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"modality": "video"}, "modality 'video' came with .'image_grid_thw', 'pixel_values'."),
        ({"data": None}, "'image' came with ..; expected an image with pixel_values"),
    ],
)
def test_what_is_no_processed_image(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(StepError, match=problem):
        Image.of(image_feature(3, 7, 9, **changes))


def test_rows_hold_the_images_that_their_chunks_reach() -> None:
    first, second = (Image.of(image_feature(start, start + 4, start)) for start in (2, 10))
    bare = {"pixel_values": MultiModalFieldElem(torch.tensor([5]), MultiModalSharedField(batch_size=1))}
    no_grid = Image.of(image_feature(0, 1, 5, data=MultiModalKwargsItem(bare)))
    both = [first, second]
    rows = PrefillImages.of([(both, 14), (both, 10), (both, 2), ([], 9), ([no_grid], 9)])
    values = [
        [first.pixel_values, second.pixel_values],
        [first.pixel_values],
        None,
        None,
        [no_grid.pixel_values],
    ]
    assert rows.pixel_values == values
    assert [row and len(row) for row in rows.image_grid_thw] == [2, 1, None, None, None]


@given(data=st.data())
def test_chunks_finish_a_prompt_and_cut_no_image(data: st.DataObject) -> None:
    """vLLM leaves room for an item that a chunk starts with; smaller chunks are made of that here."""
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=6))
    items, place = [], 0
    for gap, length in lengths:
        items.append(image_feature(place + gap, place + gap + length, 1))
        place += gap + length
    at, total = 0, place + data.draw(st.integers(1, 9))
    while at < total:
        most = min(total - at, data.draw(st.integers(9, 20)))
        chunk = whole_items(items, at, data.draw(st.integers(1, most)), most)
        assert 0 < chunk <= most
        at += chunk
        assert not any(i.mm_position.offset < at < i.mm_position.offset + i.mm_position.length for i in items)


def test_inside_an_image_all_of_its_rest_is_taken_or_nothing() -> None:
    """A prefix hit may end there."""
    items = [image_feature(4, 12, 1)]
    assert whole_items(items, start=8, count=2, most=6) == 4
    assert whole_items(items, start=8, count=2, most=3) == 0
    assert whole_items(items, start=8, count=0, most=6) == 0


@pytest.mark.parametrize(
    ("items", "refused"),
    [
        (None, []),
        ({"image": [{"pixel_values": 1}, {"address": 2}, None]}, []),
        ({"image": [{"pixel_values": 1}, {"image_embeds": 1}]}, ["image"]),
        ({"video": [{"pixel_values": 1}], "image": [{"pixel_values": 1}]}, ["video"]),
    ],
)
def test_items_that_no_prefill_could_pass_on(items: Any, refused: list[str]) -> None:
    assert refused_items({"type": "token"} if items is None else {"mm_kwargs": items}) == refused
    request: Any = {"mm_kwargs": items}
    if refused:
        with pytest.raises(VLLMValidationError, match=f"items of {refused[0]} came"):
            TTPlatform.validate_request(request, SamplingParams())
    else:
        TTPlatform.validate_request(request, SamplingParams())


def config(multimodal: MultiModalConfig | None, uses_mrope: bool = True) -> Any:
    model = SimpleNamespace(
        multimodal_config=multimodal,
        is_multimodal_model=multimodal is not None,
        uses_mrope=uses_mrope,
        max_model_len=100,
    )
    return SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(max_num_seqs=4))


def test_inputs_are_those_that_the_model_has_and_the_class_takes() -> None:
    images = MultiModalConfig()
    assert Inputs.of(Seeing, config(images)) == Inputs(images=True, rope_deltas=True)
    assert Inputs.of(Seeing, config(None, uses_mrope=False)) == Inputs()
    assert Inputs.of(HostSampled, config(images)) == Inputs()


def test_images_come_whole_unrationed_and_alone() -> None:
    multimodal = MultiModalConfig()
    served = config(multimodal)
    for _ in range(2):
        settle(served, Inputs(images=True))
    scheduler = served.scheduler_config
    assert scheduler.disable_chunked_mm_input is True
    assert scheduler.max_num_encoder_input_tokens == scheduler.encoder_cache_size == 400
    assert multimodal.get_limit_per_prompt("image") > 1
    assert [multimodal.get_limit_per_prompt(other) for other in ("video", "audio")] == [0, 0]


def test_a_class_that_takes_no_images_gets_text_alone() -> None:
    multimodal = MultiModalConfig()
    settle(config(multimodal), Inputs())
    assert multimodal.get_limit_per_prompt("image") == 0
    settle(config(None), Inputs())
