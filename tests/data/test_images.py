import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from ssl_influence import config
from ssl_influence.data import images

# pytest puts its own filters of warnings in the place of the module's.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")

AS_THEY_ARE = config.DataConfig()
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8)
RGB = Image.fromarray(PIXELS)
GRAY = Image.fromarray(PIXELS[..., 0])


def encoded(image, file_format="PNG", **options):
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def decoded(data, **settings):
    return images.decode(data, "x.png", config.DataConfig(**settings))


def png(width, height, bits, color_type, scanlines=b""):
    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, bits, color_type, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(scanlines))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("file_format", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_formats_give_back_gray_with_one_channel_and_color_with_three(file_format):
    np.testing.assert_array_equal(decoded(encoded(RGB, file_format)), PIXELS)
    np.testing.assert_array_equal(decoded(encoded(GRAY, file_format)), PIXELS[..., :1])
    assert decoded(encoded(RGB, file_format)).dtype == np.uint8


def test_lossy_formats_give_nearly_the_image():
    smooth = np.linspace(0, 255, 32 * 32 * 3).reshape(32, 32, 3).astype(np.uint8)
    for file_format in ("JPEG", "WEBP"):
        found = decoded(encoded(Image.fromarray(smooth), file_format, quality=95))
        assert found.shape == smooth.shape
        assert np.abs(found.astype(int) - smooth).mean() < 3
    assert decoded(encoded(GRAY, "JPEG")).shape == (5, 7, 1)


def test_cmyk_jpegs_become_rgb():
    pixels = np.zeros((16, 16, 3), np.uint8) + np.array([200, 40, 90], np.uint8)
    data = encoded(Image.fromarray(pixels).convert("CMYK"), "JPEG", quality=95)
    assert Image.open(io.BytesIO(data)).mode == "CMYK"
    assert np.abs(decoded(data).astype(int) - pixels).max() < 6


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_as_pillow_would(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    for file_format in ("JPEG", "PNG", "TIFF"):
        data = encoded(RGB, file_format, exif=exif)
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        np.testing.assert_array_equal(decoded(data), np.asarray(expected))


def test_a_camera_held_on_its_side_gives_the_upright_picture():
    exif = Image.Exif()
    exif[0x0112] = 6  # row 0 is the right side
    np.testing.assert_array_equal(decoded(encoded(RGB, exif=exif)), np.rot90(PIXELS, -1))


@pytest.mark.parametrize("transparency", [None, 1, bytes([0, 255, 128])])
def test_palettes_become_their_colors_with_or_without_transparency(recwarn, transparency):
    palette = np.array([[10, 20, 30], [200, 100, 0], [0, 0, 255]], np.uint8)
    indices = RNG.integers(0, 3, (5, 7), dtype=np.uint8)
    image = Image.fromarray(indices, "L")
    image.putpalette(palette.tobytes())
    options = {} if transparency is None else {"transparency": transparency}
    data = encoded(image, **options)
    assert Image.open(io.BytesIO(data)).mode == "P"
    np.testing.assert_array_equal(decoded(data), palette[indices])
    assert not recwarn.list


def test_transparency_is_dropped_and_not_blended():
    alpha = RNG.integers(0, 256, (5, 7, 1), dtype=np.uint8)
    color = Image.fromarray(np.concatenate([PIXELS, alpha], axis=2))
    np.testing.assert_array_equal(decoded(encoded(color)), PIXELS)
    gray = Image.merge("LA", [GRAY, Image.fromarray(alpha[..., 0])])
    np.testing.assert_array_equal(decoded(encoded(gray)), PIXELS[..., :1])


def test_black_and_white_images_are_gray_of_0_and_255():
    bits = RNG.integers(0, 2, (5, 7)).astype(bool)
    found = decoded(encoded(Image.fromarray(bits)))
    np.testing.assert_array_equal(found[..., 0], bits * 255)


def test_every_16_bit_gray_goes_to_the_nearest_of_256():
    wide = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    nearest = np.rint(wide / 257).astype(np.uint8)[..., np.newaxis]
    pgm = b"P5 256 256 65535\n" + wide.astype(">u2").tobytes()
    for data in (encoded(Image.fromarray(wide)), encoded(Image.fromarray(wide), "TIFF"), pgm):
        np.testing.assert_array_equal(decoded(data), nearest)


def test_a_tiff_whose_0_is_white_is_inverted_with_16_bits_as_with_8():
    wide = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    white_is_zero = encoded(Image.fromarray(wide), "TIFF", tiffinfo={262: 0})  # pixels as they are
    np.testing.assert_array_equal(decoded(white_is_zero)[..., 0].ravel(), np.arange(256)[::-1])


def test_a_tiff_of_12_bits_is_refused():
    data = encoded(Image.fromarray(np.zeros((2, 2), np.uint16)), "TIFF")
    entry = struct.pack("<HHIHH", 258, 3, 1, 16, 0)  # BitsPerSample
    assert entry in data
    with pytest.raises(config.ConfigError, match="^x.png has 12 bits"):
        decoded(data.replace(entry, struct.pack("<HHIHH", 258, 3, 1, 12, 0)))


def test_16_bit_colors_keep_their_upper_byte():
    wide = RNG.integers(0, 65536, (2, 3, 3)).astype(">u2")
    scanlines = b"".join(b"\0" + row.tobytes() for row in wide)
    np.testing.assert_array_equal(decoded(png(3, 2, 16, 2, scanlines)), wide >> 8)


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "TIFF"])
def test_of_an_animation_the_first_picture_is_taken(file_format):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = encoded(frames[0], file_format, save_all=True, append_images=frames[1:], **options)
    assert Image.open(io.BytesIO(data)).n_frames == 3
    np.testing.assert_array_equal(decoded(data), np.full((8, 8, 3), [255, 0, 0]))


def test_channels_are_converted_as_asked():
    gray = np.asarray(RGB.convert("L"))[..., np.newaxis]
    np.testing.assert_array_equal(decoded(encoded(RGB), image_channels=1), gray)
    np.testing.assert_array_equal(
        decoded(encoded(GRAY), image_channels=3), np.repeat(PIXELS[..., :1], 3, axis=2)
    )


@pytest.mark.parametrize("size", [(3,), (4, 4), (3, 7), (20, 6), (5, 7), (1, 1)])
@pytest.mark.parametrize("shape", [(5, 7), (64, 40), (1, 90)])
def test_images_are_scaled_to_cover_the_size_and_cut_to_the_middle(shape, size):
    image = Image.fromarray(RNG.integers(0, 256, (*shape, 3), dtype=np.uint8))
    fitted = ImageOps.fit(image, (size[-1], size[0]), Image.Resampling.BILINEAR)
    found = decoded(encoded(image), image_size=size)
    assert found.shape == (size[0], size[-1], 3)
    assert np.abs(found.astype(int) - np.asarray(fitted)).max() <= 1


def test_of_a_wide_image_the_middle_square_stays():
    pixels = np.zeros((4, 12, 1), np.uint8)
    pixels[:, 4:8] = 255
    data = encoded(Image.fromarray(pixels[..., 0]))
    np.testing.assert_array_equal(decoded(data, image_size=(4,)), np.full((4, 4, 1), 255))


def test_images_decoded_elsewhere_are_fitted_alike():
    many = RNG.integers(0, 256, (3, 9, 8, 3), dtype=np.uint8)
    settings = config.DataConfig(image_size=(4, 5), image_channels=1)
    fitted = images.fit(many, settings)
    assert fitted.shape == (3, 4, 5, 1)
    expected = [images.decode(encoded(Image.fromarray(i)), "x", settings) for i in many]
    np.testing.assert_array_equal(fitted.read(np.arange(3)), expected)
    assert images.fit(many, AS_THEY_ARE) is many
    assert images.fit(many, config.DataConfig(image_size=(9, 8), image_channels=3)) is many
    assert fitted.digest() != images.fit(many[::-1], settings).digest()
    from_gray = images.fit(many[..., :1], config.DataConfig(image_channels=3))
    np.testing.assert_array_equal(
        from_gray.read(np.array([2]))[0], many[2, :, :, [0] * 3].T.swapaxes(0, 1)
    )


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_000, 20_000, 60_000])  # Pillow warns of the first alone
def test_decompression_bombs_are_refused_before_their_pixels_are_read(side):
    with pytest.raises(config.ConfigError, match="^x.png has more than 89478485 pixels"):
        decoded(png(side, side, 8, 0))


def test_where_pillow_warns_there_is_the_error_alone(tmp_path):
    paths = [tmp_path / "large.png", tmp_path / "damaged.tif"]
    paths[0].write_bytes(png(10_000, 10_000, 8, 0))
    paths[1].write_bytes(encoded(RGB, "TIFF")[:60])
    script = (
        "import pathlib, sys\n"
        "from ssl_influence import config\n"
        "from ssl_influence.data import images\n"
        "for path in sys.argv[1:]:\n"
        "  try: images.decode(pathlib.Path(path).read_bytes(), 'x', config.DataConfig())\n"
        "  except config.ConfigError as error: print(error)"
    )
    run = subprocess.run(
        [sys.executable, "-W", "default", "-c", script, *paths], capture_output=True, text=True
    )
    assert run.stderr == ""
    large, damaged = run.stdout.splitlines()
    assert large.startswith("x has more than 89478485 pixels")
    assert damaged.startswith("x is not an image")


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM"])
def test_files_cut_short_anywhere_in_their_pixels_are_refused(file_format):
    data = encoded(Image.fromarray(RNG.integers(0, 256, (16, 16, 3), np.uint8)), file_format)
    for length in range(0, int(0.9 * len(data)), 7):
        with pytest.raises(config.ConfigError, match="^x.png (is|has)") as error:
            decoded(data[:length])
        assert "\n" not in str(error.value)


def test_random_damage_gives_an_image_or_one_line():
    for file_format in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM"):
        data = np.frombuffer(encoded(RGB, file_format), np.uint8)
        for seed in range(60):
            rng = np.random.default_rng(seed)
            damaged = data.copy()
            damaged[rng.integers(0, len(data), 3)] = rng.integers(0, 256, 3)
            try:
                assert decoded(damaged.tobytes()).dtype == np.uint8
            except config.ConfigError as error:
                assert str(error).startswith("x.png ") and "\n" not in str(error)


def examples_of(files, where="folder:birds", **settings):
    return images.examples_of(
        lambda row: files[row],
        [f"{row}.png" for row in range(len(files))],
        np.arange(len(files), dtype=np.int32) % 2,
        "stamp",
        config.DataConfig(**settings),
        where=where,
    )


def test_images_are_read_when_they_are_asked_for():
    asked = []

    def read_bytes(row):
        asked.append(row)
        return encoded(Image.fromarray(np.full((4, 4), row, np.uint8)))

    many = images.examples_of(
        read_bytes, ["n"] * 50, np.zeros(50, np.int32), "s", AS_THEY_ARE, where="w"
    )
    assert asked == [0] and many.inputs.shape == (50, 4, 4, 1)
    assert many.inputs.read(np.array([7, 3]))[:, 0, 0, 0].tolist() == [7, 3]
    assert sorted(asked[1:]) == [3, 7]


@pytest.mark.parametrize(
    "other, message",
    [
        (RGB.resize((6, 5)), r"folder:birds: '2.png' is 5x6 .*first image has 5x7.*--image_size"),
        (GRAY, r"folder:birds: '2.png' has 1 channels.*has 3.*--image_channels"),
    ],
)
def test_the_first_image_of_another_shape_is_named_with_both_and_the_remedy(other, message):
    many = examples_of([encoded(RGB), encoded(RGB), encoded(other), encoded(other)])
    with pytest.raises(config.ConfigError, match=message):
        many.inputs.read(np.arange(4))
    resized = examples_of([encoded(RGB), encoded(other)], image_size=(4,), image_channels=3)
    assert resized.inputs.read(np.arange(2)).shape == (2, 4, 4, 3)


def test_skipping_leaves_out_what_is_bad_or_unlike_most_and_says_so():
    files = [encoded(RGB.resize((2, 2))), encoded(RGB), b"", encoded(RGB), encoded(GRAY)]
    many = examples_of(files, on_bad_example="skip")
    assert many.inputs.shape == (2, 5, 7, 3)
    assert list(many.names) == ["1.png", "3.png"] and many.labels.tolist() == [1, 1]
    np.testing.assert_array_equal(many.inputs.read(np.arange(2)), [PIXELS, PIXELS])
    assert [line.split("'")[1] for line in many.skipped] == ["0.png", "2.png", "4.png"]
    assert many.inputs.digest() != examples_of([encoded(RGB)] * 2).inputs.digest()


def test_nothing_is_left_out_where_all_is_well():
    strict, lenient = (
        examples_of([encoded(RGB)] * 3, on_bad_example=choice) for choice in ("error", "skip")
    )
    assert not lenient.skipped and len(lenient) == 3
    assert strict.inputs.digest() == lenient.inputs.digest()


def test_no_image_at_all_is_an_error():
    with pytest.raises(config.ConfigError, match="folder:birds has no image"):
        examples_of([])
    with pytest.raises(config.ConfigError, match="none of 2 images.*'0.png' is empty"):
        examples_of([b"", b"x"], on_bad_example="skip")


def test_a_file_that_cannot_be_opened_is_named():
    def read_bytes(row):
        raise PermissionError(13, "Permission denied")

    with pytest.raises(config.ConfigError, match="^w: 'a.png' cannot be read: Permission denied"):
        images.examples_of(
            read_bytes, ["a.png"], np.zeros(1, np.int32), "s", AS_THEY_ARE, where="w"
        )
