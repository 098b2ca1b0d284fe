"""The picture decoder: pixels as a viewer shows them, and an error for whatever cannot be read in full."""

import io
import pickle
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms

from litchi.data.media import (
    MAX_PIXELS,
    Header,
    MediaError,
    decode_image,
    fit_size,
    grid_of,
    media_warnings,
    picture_patches,
    read_header,
)
from litchi.types import Media, VisionSpec

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def noise(height, width, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(image, format="PNG", **options):
    """Return a picture as Media that hold the bytes of a file."""
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return Media("image", data=stream.getvalue())


def png(width, height, depth, colour, rows, *chunks, after=()):
    """Write a PNG by hand: `rows` are packed bytes, `chunks` stand before the pixels, `after` behind them."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    body = header + b"".join(chunk(*c) for c in chunks) + pixels + b"".join(chunk(*c) for c in after)
    return Media("image", data=b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b""))


def refused(media, **options):
    with pytest.raises(MediaError) as error:
        decode_image(media, **options)
    return error.value


# ---------------------------------------------------------------- orientation

# where the corners red (top left), green (top right), blue (bottom left) of the stored picture are shown
SHOWN = {
    1: ("tl", "tr", "bl"),
    2: ("tr", "tl", "br"),
    3: ("br", "bl", "tr"),
    4: ("bl", "br", "tl"),
    5: ("tl", "bl", "tr"),
    6: ("tr", "br", "tl"),
    7: ("br", "tr", "bl"),
    8: ("bl", "tl", "br"),
}
CORNERS = {"tl": (0, 0), "tr": (0, -1), "bl": (-1, 0), "br": (-1, -1)}


def corners():
    rgb = np.full((48, 80, 3), 255, np.uint8)
    rgb[:16, :16], rgb[:16, -16:], rgb[-16:, :16] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    return Image.fromarray(rgb)


@pytest.mark.parametrize("orientation", SHOWN)
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF", "AVIF"])
def test_orientation_is_applied(orientation, format):
    exif = Image.Exif()
    exif[0x0112] = orientation
    media = encoded(corners(), format, exif=exif)
    rgb, header = decode_image(media), read_header(media)
    assert rgb.shape[:2] == ((48, 80) if orientation < 5 else (80, 48)) == (header.height, header.width)
    for channel, corner in enumerate(SHOWN[orientation]):
        assert rgb[CORNERS[corner]].argmax() == channel and rgb[CORNERS[corner]].min() < 40


def test_orientation_that_stands_behind_the_pixels_of_a_png():
    exif = Image.Exif()
    exif[0x0112] = 6
    rows = [b"\xff\x00\x00" + b"\xff\xff\xff", b"\xff\xff\xff" * 2, b"\xff\xff\xff" * 2]
    media = png(2, 3, 8, 2, rows, after=[(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))])
    assert read_header(media) == Header(3, 2, 1)
    assert decode_image(media)[0, -1].tolist() == [255, 0, 0]


def test_damaged_metadata_leaves_the_picture_as_it_lies():
    media = encoded(corners(), exif=b"Exif\0\0no tiff header")
    assert (decode_image(media) == np.array(corners())).all()


# ---------------------------------------------------------------- transparency and modes


@pytest.mark.parametrize(("alpha", "red"), [(255, (255, 0, 0)), (128, (255, 127, 127)), (0, (255, 255, 255))])
def test_alpha_is_put_on_white(alpha, red):
    assert decode_image(encoded(Image.new("RGBA", (8, 8), (255, 0, 0, alpha))))[0, 0].tolist() == list(red)
    grey = decode_image(encoded(Image.new("LA", (8, 8), (0, alpha))))
    assert grey[0, 0].tolist() == [255 - alpha] * 3


def palette():
    image = Image.new("P", (8, 8), 0)
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    image.paste(1, (4, 0, 8, 8))
    return image


@pytest.mark.parametrize(
    ("transparency", "left", "right"),
    [
        (0, [255, 255, 255], [40, 50, 60]),
        (b"\xff\x00", [10, 20, 30], [255, 255, 255]),
        (None, [10, 20, 30], [40, 50, 60]),
    ],
)
def test_palettes(transparency, left, right):
    options = {} if transparency is None else {"transparency": transparency}
    for format in ["PNG"] + ["GIF"] * (not isinstance(transparency, bytes)):
        rgb = decode_image(encoded(palette(), format, **options))
        assert (rgb[0, 0].tolist(), rgb[0, -1].tolist()) == (left, right), format


@pytest.mark.parametrize(
    ("depth", "row", "level", "shown"),
    [
        (1, b"\x40", 1, [0, 255]),  # pixels 0, 1
        (2, b"\x60", 1, [255, 170]),  # pixels 1, 2
        (4, b"\x3a", 3, [255, 170]),  # pixels 3, 10
        (8, b"\x07\x64", 7, [255, 100]),
        (16, b"\x01\x01\x64\x64", 0x101, [255, 100]),
    ],
)
def test_transparent_level_of_grey_pngs(depth, row, level, shown):
    media = png(2, 1, depth, 0, [row], (b"tRNS", struct.pack(">H", level)))
    assert decode_image(media)[0, :, 0].tolist() == shown


@pytest.mark.parametrize("depth", [8, 16])
def test_transparent_colour_of_rgb_pngs(depth):
    def pack(*rgb):
        return bytes(rgb) if depth == 8 else b"".join(bytes([c, c]) for c in rgb)

    level = struct.pack(">HHH", *((1, 2, 3) if depth == 8 else (0x101, 0x202, 0x303)))
    media = png(2, 1, depth, 2, [pack(1, 2, 3) + pack(1, 2, 4)], (b"tRNS", level))
    assert decode_image(media)[0].tolist() == [[255, 255, 255], [1, 2, 4]]


@pytest.mark.parametrize("order", ["<u2", ">u2"])
def test_grey_of_16_bits_is_divided_by_257_or_mapped_from_a_window(order):
    levels = np.array([[0, 128, 129, 257, 1000, 40000, 65535]], dtype=order)
    image = Image.frombytes("I;16" if order == "<u2" else "I;16B", levels.shape[::-1], levels.tobytes())
    for format in ("TIFF", "PNG"):
        rgb = decode_image(encoded(image, format))
        assert rgb[0, :, 0].tolist() == [0, 0, 1, 1, 4, 156, 255]
        assert (rgb == rgb[..., :1]).all()
    assert decode_image(encoded(image), window=(128, 1000))[0, :, 1].tolist() == [0, 0, 0, 38, 255, 255, 255]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_grey_of_no_known_range_needs_a_window(mode):
    levels = np.array([[-5, 70000]], dtype=np.int32 if mode == "I" else np.float32)
    media = encoded(Image.fromarray(levels), "TIFF")
    error = refused(media)
    assert error.code == "unreadable_media" and "-5 to 70000" in error.reason and "data.window" in error.reason
    assert decode_image(media, window=(-5, 70000))[0, :, 0].tolist() == [0, 255]


@pytest.mark.parametrize("mode", ["L", "1", "CMYK", "YCbCr"])
def test_other_modes_become_rgb(mode):
    format = {"CMYK": "TIFF", "YCbCr": "JPEG"}.get(mode, "PNG")
    rgb = decode_image(encoded(Image.new("RGB", (40, 40), "white").convert(mode), format))
    assert rgb.shape == (40, 40, 3) and rgb.dtype == np.uint8 and rgb.min() > 250


def test_lab_becomes_rgb():
    srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    image = ImageCms.profileToProfile(Image.new("RGB", (9, 9), (200, 40, 90)), srgb, lab, outputMode="LAB")
    assert np.abs(decode_image(encoded(image, "TIFF"))[4, 4].astype(int) - (200, 40, 90)).max() <= 4


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_the_first_frame_counts(format):
    frames = [Image.new("RGB", (16, 12), colour) for colour in ("red", "lime", "blue")]
    media = encoded(
        frames[0], format, save_all=True, append_images=frames[1:], **{"lossless": True} if format == "WEBP" else {}
    )
    assert read_header(media) == Header(16, 12, 3)
    assert (decode_image(media) == (255, 0, 0)).all()
    assert media_warnings(read_header(media)) == [("animated", "3 frames: only the first is used")]
    assert media_warnings(Header(16, 12, 1)) == []


def test_previews_in_a_photo_are_no_animation():
    media = encoded(corners(), "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))])
    assert read_header(media) == Header(80, 48, 1)


# ---------------------------------------------------------------- damage


@pytest.mark.filterwarnings("ignore:Corrupt EXIF", "ignore:Truncated File")
@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
        ("PNG", {"compress_level": 0}),
        ("WEBP", {}),
        ("BMP", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("AVIF", {}),
        ("JPEG2000", {}),
    ],
)
def test_a_file_cut_anywhere_is_refused(format, options):
    data = encoded(Image.fromarray(noise(60, 80)), format, **options).data
    for kept in (
        0,
        3,
        20,
        len(data) // 2,
        len(data) - 200,
        len(data) - 40,
        len(data) - 9,
        len(data) - 2,
        len(data) - 1,
    ):
        assert refused(Media("image", data=data[:kept])).code == "unreadable_media", kept
    assert decode_image(Media("image", data=data)).shape == (60, 80, 3)


def test_a_gif_cut_in_its_first_frame_is_refused():
    data = encoded(Image.fromarray(noise(60, 80)), "GIF").data
    assert refused(Media("image", data=data[:-40])).code == "unreadable_media"


@pytest.mark.parametrize("level", [0, 9])
def test_a_flipped_bit_in_a_png_is_refused(level):
    data = encoded(Image.fromarray(noise(30, 40)), compress_level=level).data
    for at in range(40, len(data) - 12, 131):
        damaged = bytearray(data)
        damaged[at] ^= 4
        assert refused(Media("image", data=bytes(damaged))).code == "unreadable_media"


def test_a_jpeg_filled_up_with_zeros_is_refused():
    data = encoded(Image.fromarray(noise(60, 80)), "JPEG").data
    filled = data[: len(data) // 2] + bytes(len(data) // 2)
    assert refused(Media("image", data=filled)).reason == "JPEG cut off: its end is missing"
    assert decode_image(Media("image", data=data + b"trailer")).shape == (60, 80, 3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "an empty file"),
        (b"<!DOCTYPE html><html>404</html>", "an HTML page"),
        (b"\n<html><body>no</body></html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a Git LFS pointer, run git lfs pull"),
        (b'<?xml version="1.0"?><svg xmlns="x"/>', "an SVG drawing"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "a HEIC picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture that is read"),
    ],
)
def test_what_stands_where_a_picture_should_is_named(tmp_path, content, reason):
    path = tmp_path / "picture.jpg"
    path.write_bytes(content)
    for look in (read_header, decode_image):
        with pytest.raises(MediaError, match=reason) as error:
            look(Media("image", path=str(path)))
        assert error.value.code == "unreadable_media"
        assert str(error.value).startswith(f"{path}: ")


def test_missing_files_folders_and_videos_are_refused(tmp_path):
    missing = refused(Media("image", path=str(tmp_path / "none.png")))
    assert (missing.code, missing.reason) == ("media_missing", "cannot be opened: No such file or directory")
    assert refused(Media("image", path=str(tmp_path))).reason == "a folder, not a file"
    assert refused(Media("video", path="v.mp4")).code == "video_unsupported"
    copy = pickle.loads(pickle.dumps(missing))
    assert (copy.code, copy.reason, copy.status, str(copy)) == (missing.code, missing.reason, 3, str(missing))


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize("side", [MAX_PIXELS // 9000 + 1, 65000])
def test_too_many_pixels_are_refused_before_they_are_decoded(side):
    media = png(9000 if side < 65000 else side, side, 1, 0, [b"\0"])  # a header only; the pixels would not suffice
    for look in (read_header, decode_image):
        with pytest.raises(MediaError) as error:
            look(media)
        assert error.value.code == "media_too_large"


def test_extreme_shapes_are_refused():
    assert decode_image(encoded(Image.new("L", (400, 2)))).shape == (2, 400, 3)
    assert refused(encoded(Image.new("L", (401, 2)))).code == "extreme_aspect"
    with pytest.raises(MediaError, match="401 x 2"):
        fit_size(2, 401, factor=28, min_pixels=3136, max_pixels=10**6)


# ---------------------------------------------------------------- patches


def spec(**changes):
    return VisionSpec(**{"patch": 14, "merge": 2, "temporal": 2, "window": 112, "min_pixels": 56 * 56,
                         "max_pixels": 28 * 28 * 1280, "mean": MEAN, "std": STD} | changes)  # fmt: skip


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([28, 32]), st.integers(1, 64), st.integers(0, 2000))
def test_sizes_are_multiples_within_the_budget(height, width, factor, low, more):
    if max(height, width) > 200 * min(height, width):
        return
    budget = {"min_pixels": low * factor**2, "max_pixels": (low + more) * factor**2}
    h, w = fit_size(height, width, factor=factor, **budget)
    assert h % factor == w % factor == 0 and h > 0 and w > 0
    # rounding up to the lower limit, and sides of one factor, can pass the upper one: so it is in the family
    assert h * w >= budget["min_pixels"] or height * width > budget["max_pixels"]
    assert (w, h) == fit_size(width, height, factor=factor, **budget)


def test_sizes_equal_those_of_the_familys_processor():
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    rng = np.random.default_rng(1)
    for height, width, low, high in rng.integers([1, 1, 1, 4], [4000, 4000, 64, 1280], (2000, 4)).tolist():
        if max(height, width) <= 200 * min(height, width):
            budget = {"min_pixels": 784 * low, "max_pixels": 784 * max(low, high)}
            assert fit_size(height, width, factor=28, **budget) == smart_resize(height, width, 28, **budget)


@pytest.mark.parametrize(
    ("height", "width", "limits"),
    [
        (56, 84, (3136, 10**6)),  # stays
        (11, 17, (3136, 10**6)),  # grows
        (300, 211, (3136, 28 * 28 * 20)),  # shrinks
        (333, 77, (3136, 10**6)),  # odd sides
        (37, 900, (28 * 28 * 64, 28 * 28 * 128)),
    ],
)
def test_patches_equal_those_of_the_familys_processor(height, width, limits):
    import torch
    from transformers import Qwen2VLImageProcessor

    rgb, ours = noise(height, width), spec(min_pixels=limits[0], max_pixels=limits[1])
    patches, grid = picture_patches(rgb, spec=ours)
    processor = Qwen2VLImageProcessor(min_pixels=limits[0], max_pixels=limits[1])
    theirs = processor(Image.fromarray(rgb), return_tensors="pt")
    assert grid == tuple(theirs["image_grid_thw"][0].tolist()) == grid_of(Header(width, height, 1), ours)
    assert patches.dtype == np.uint8 and patches.flags.c_contiguous

    x = torch.from_numpy(patches).float().reshape(-1, 3, 1, 14 * 14) / 255
    x = (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    x = x.expand(-1, -1, 2, -1).reshape(len(x), -1)
    assert x.std() > 0.2
    torch.testing.assert_close(x, theirs["pixel_values"], atol=1e-5, rtol=0)


def test_patches_of_one_token_stand_together():
    rgb = np.zeros((56, 84, 3), np.uint8)
    for row in range(4):
        for column in range(6):
            rgb[14 * row : 14 * row + 14, 14 * column : 14 * column + 14] = 10 * row + column
    rgb[0, 1] = (101, 102, 103)
    patches, grid = picture_patches(rgb, spec=spec(min_pixels=28 * 28))
    assert grid == (1, 4, 6)
    # two rows of three tokens, in each the four patches of its square
    assert patches[:, -1].tolist() == [
        0,
        1,
        10,
        11,
        2,
        3,
        12,
        13,
        4,
        5,
        14,
        15,
        20,
        21,
        30,
        31,
        22,
        23,
        32,
        33,
        24,
        25,
        34,
        35,
    ]
    assert patches[0, [1, 14 * 14 + 1, 2 * 14 * 14 + 1]].tolist() == [101, 102, 103]
