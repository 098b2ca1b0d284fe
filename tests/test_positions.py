"""M-RoPE positions: by hand where the definition can be followed by eye, against transformers where it has one."""

import numpy as np
import pytest
import torch
from rendering import chat, draw, pack, render, renderer_for, say

from litchi.batch.positions import forest_positions


def columns(*positions):
    """[(t, h, w), ...] as the array of positions; a number stands for a text token."""
    return np.array([p if isinstance(p, tuple) else (p, p, p) for p in positions]).T


def test_text_counts_up():
    assert (forest_positions([(0, 4, -1)], {}, 2) == columns(0, 1, 2, 3)).all()


def test_one_picture_of_two_by_three_tokens():
    """Grid 4 x 6 patches behind two tokens of text; the text behind it follows the largest position, 2 + 2."""
    picture = [(2, 2, 2), (2, 2, 3), (2, 2, 4), (2, 3, 2), (2, 3, 3), (2, 3, 4)]
    assert (forest_positions([(0, 10, -1)], {2: (1, 4, 6)}, 2) == columns(0, 1, *picture, 5, 6)).all()


def test_two_pictures_side_by_side_and_text_behind():
    """A tall one (3 x 1 tokens) at 0, so the next (1 x 2) is at 3 and the text behind that at 5."""
    tall, wide = [(0, 0, 0), (0, 1, 0), (0, 2, 0)], [(3, 3, 3), (3, 3, 4)]
    pictures = {0: (1, 6, 2), 3: (1, 2, 4)}
    assert (forest_positions([(0, 6, -1)], pictures, 2) == columns(*tall, *wide, 5)).all()


def test_children_go_on_where_their_parent_ended():
    """A prefix of two tokens and a picture, two children of two tokens, one of them with a grandchild, another root."""
    spans = [(0, 6, -1), (6, 8, 0), (8, 10, 0), (10, 12, 2), (12, 13, -1)]
    picture = [(2, 2, 2), (2, 2, 3), (2, 3, 2), (2, 3, 3)]
    expected = columns(0, 1, *picture, 4, 5, 4, 5, 6, 7, 0)
    assert (forest_positions(spans, {2: (1, 4, 4)}, 2) == expected).all()


def test_a_picture_in_a_child_starts_where_the_parent_ended():
    spans = [(0, 2, -1), (2, 5, 0), (5, 7, 0)]
    assert (forest_positions(spans, {2: (1, 2, 4)}, 2) == columns(0, 1, (2, 2, 2), (2, 2, 3), 4, 2, 3)).all()


def test_text_behind_several_frames_follows_the_largest_position():
    """Five frames of 1 x 2 tokens: time runs to 1 + 4, width to 1 + 1, so the text goes on at 6."""
    frames = [(1 + t, 1, 1 + w) for t in range(5) for w in range(2)]
    assert (forest_positions([(0, 12, -1)], {1: (5, 2, 4)}, 2) == columns(0, *frames, 6)).all()


def test_time_of_a_video_by_hand():
    """Three frames of the grid of 1 x 2 tokens, 1.5 s apart, at 2 positions a second: 3, 6, 9 behind three tokens; the
    text goes on at 10, though the video is only two tokens wide."""
    frames = [(3 + 3 * t, 3, 3 + w) for t in range(3) for w in range(2)]
    found = forest_positions([(0, 10, -1)], {3: (3, 2, 4)}, 2, {3: 1.5 * 2})
    assert (found == columns(0, 1, 2, *frames, 10)).all()


def test_time_is_rounded_down():
    """0.7 positions a frame: 0, 0.7, 1.4, 2.1 -> 0, 0, 1, 2; a tall video's text follows its height."""
    frames = [(t, h, 0) for t in (0, 0, 1, 2) for h in range(5)]
    assert (forest_positions([(0, 21, -1)], {0: (4, 10, 2)}, 2, {0: 0.7}) == columns(*frames, 5)).all()
    tenths = forest_positions([(0, 11, -1)], {0: (11, 2, 2)}, 2, {0: 0.1})
    assert tenths[0].tolist() == [0] * 10 + [1]  # ten times 0.1 s is a second


def test_a_minute_in_a_prefix():
    """30 frames of the grid 2 s apart at 4 positions a second: the last at 1 + 29 * 8; both children go on behind."""
    spans = [(0, 31, -1), (31, 33, 0), (33, 34, 0)]
    found = forest_positions(spans, {1: (30, 2, 2)}, 2, {1: 2.0 * 4})
    assert found[0, 1:31].tolist() == [1 + 8 * k for k in range(30)]
    assert (found[:, 31:] == [234, 235, 234]).all()


@pytest.mark.parametrize("pictures", [0, 1, 3])
def test_positions_of_pictures_equal_transformers(pictures, processor, hf_model, tmp_path):
    sizes = [(84, 140), (196, 112), (56, 56)][:pictures]
    paths = [draw(tmp_path / f"{k}.png", *size, seed=k) for k, size in enumerate(sizes)]
    renderer = renderer_for("chat", processor)
    turns = (("user", say("What is it?", *paths)), ("assistant", "a bag"), ("user", say("And?", *paths[:1])))
    example = render(renderer, chat(renderer, *turns, ("assistant", "a hat")))
    batch = pack(renderer, [example])
    grids = [list(example.media[number].grid) for number, _ in example.media_at]
    is_picture = torch.zeros(1, batch.tokens, dtype=torch.int32)
    is_picture[0, batch.image_at] = 1
    expected, _ = hf_model.model.get_rope_index(
        batch.ids[None],
        is_picture,
        image_grid_thw=torch.tensor(grids) if grids else None,
        attention_mask=torch.ones_like(is_picture),
    )
    assert torch.equal(batch.positions, expected[:, 0])
    assert (batch.positions[1] != batch.positions[2]).any() == bool(pictures)
