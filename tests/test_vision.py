"""The vision tower called with everything worked out beforehand: the features are those of its own forward."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from litchi.data.media import picture_patches
from litchi.model.vision import blank_picture, encode_pictures, normalise_patches, vision_layout

# (height, width) in pixels; windows are 112 x 112, so only the second is a multiple of them
SIZES = [(84, 140), (112, 224), (56, 56), (196, 168)]


def noise(height, width):
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def cut(processor):
    """All pictures as Litchi cuts them: (patches, grids)."""
    done = [picture_patches(noise(*size), spec=processor.vision) for size in SIZES]
    return torch.from_numpy(np.concatenate([patches for patches, _ in done])), [grid for _, grid in done]


def hf_features(hf_model, values, grids):
    with torch.no_grad():
        return hf_model.model.visual(values, torch.tensor(grids)).pooler_output


def test_normalised_patches_equal_transformers(processor, hf_processor, cut):
    found = hf_processor.image_processor([Image.fromarray(noise(*size)) for size in SIZES], return_tensors="pt")
    assert found["image_grid_thw"].tolist() == [list(grid) for grid in cut[1]]
    torch.testing.assert_close(normalise_patches(cut[0], processor.vision), found["pixel_values"], atol=2e-6, rtol=0)
    assert found["pixel_values"].std() > 0.5


def test_features_of_many_grids_at_once_equal_transformers(loaded, hf_model, processor, cut):
    patches, grids = cut
    with torch.no_grad():
        found = encode_pictures(loaded.hf.model.visual, patches, grids, processor.vision)
    wanted = hf_features(hf_model, normalise_patches(patches, processor.vision), grids)
    assert found.shape == wanted.shape == (sum(h * w // 4 for _, h, w in grids), 128)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
    assert wanted.std(0).mean() > 0.01


def test_features_of_several_frames_equal_transformers(loaded, hf_model, processor, cut):
    """A grid of two frames beside one of three: no frame sees another."""
    grids = [(2, 6, 10), (3, 4, 4)]
    patches = cut[0][: sum(t * h * w for t, h, w in grids)]
    with torch.no_grad():
        found = encode_pictures(loaded.hf.model.visual, patches, grids, processor.vision)
    wanted = hf_features(hf_model, normalise_patches(patches, processor.vision), grids)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
    assert len(wanted) == 2 * 15 + 3 * 4


def test_gradients_of_the_tower_equal_transformers(loaded, hf_model, processor, cut):
    patches, grids = cut
    values = normalise_patches(patches, processor.vision)
    weight = torch.randn(sum(h * w // 4 for _, h, w in grids), 128, generator=torch.Generator().manual_seed(0))
    ours, theirs = loaded.hf.model.visual, hf_model.model.visual
    names = [name for name, _ in ours.named_parameters()]
    found = torch.autograd.grad(
        (encode_pictures(ours, patches, grids, processor.vision) * weight).sum(), list(ours.parameters())
    )
    wanted = torch.autograd.grad(
        (theirs(values, torch.tensor(grids)).pooler_output * weight).sum(), list(theirs.parameters())
    )
    for name, one, other in zip(names, found, wanted, strict=True):
        largest = float(other.abs().max())
        assert float((one - other).abs().max()) <= 1e-4 * largest + 1e-4, name
        assert largest > 0, name


def test_a_picture_does_not_depend_on_its_neighbours(loaded, processor, cut):
    patches, grids = cut
    ends = np.cumsum([0, *(h * w for _, h, w in grids)])
    with torch.no_grad():
        together = encode_pictures(loaded.hf.model.visual, patches, grids, processor.vision)
        for k, grid in enumerate(grids):
            alone = encode_pictures(loaded.hf.model.visual, patches[ends[k] : ends[k + 1]], [grid], processor.vision)
            torch.testing.assert_close(together[ends[k] // 4 : ends[k + 1] // 4], alone, atol=2e-5, rtol=1e-4)


def test_windows_are_pieces_and_frames_are_apart(processor):
    """Grid 2 x 6 x 18 patches, 3 x 9 tokens a frame: two windows of 3 x 4 and one of 3 x 1 tokens in each."""
    layout = vision_layout([(2, 6, 18)], processor.vision)
    assert [(p.q0, p.q1, p.count) for p in layout.plan.full] == [(0, 216, 2)]
    assert [(p.q0, p.q1, p.count) for p in layout.plan.window] == [
        (0, 96, 2),
        (96, 108, 1),
        (108, 204, 2),
        (204, 216, 1),
    ]
    assert sorted(layout.order.tolist()) == list(range(54)) and set(layout.order[:27].tolist()) == set(range(27))
    assert layout.order[:12].tolist() == [0, 1, 2, 3, 9, 10, 11, 12, 18, 19, 20, 21]
    assert layout.order[24:27].tolist() == [8, 17, 26]


def test_equal_pictures_are_one_piece(processor):
    """Three of 8 x 8 patches are one window each, stacked; the fourth is another shape."""
    plan = vision_layout([(1, 8, 8), (1, 8, 8), (1, 8, 8), (1, 4, 8)], processor.vision).plan
    assert [(p.q0, p.q1, p.count) for p in plan.full] == [(0, 192, 3), (192, 224, 1)]
    assert [(p.q0, p.q1, p.count) for p in plan.window] == [(0, 192, 3), (192, 224, 1)]


def test_without_windows_the_order_is_the_picture_s_own(processor):
    layout = vision_layout([(1, 6, 10), (1, 4, 4)], replace(processor.vision, window=None))
    assert layout.order.tolist() == list(range(19))


def test_coordinates_follow_the_merge_order(processor):
    layout = vision_layout([(1, 4, 4)], processor.vision)
    first = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert list(map(tuple, layout.coordinates[:8].tolist())) == first


def test_the_blank_picture_goes_through_the_tower(loaded, processor):
    pixels, grid = blank_picture(processor.vision, torch.device("cpu"))
    with torch.no_grad():
        found = encode_pictures(loaded.hf.model.visual, pixels, [grid], processor.vision)
    assert found.shape == (1, 128) and bool(found.isfinite().all())
