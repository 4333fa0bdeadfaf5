"""Data inside the page, from which its script makes the galleries."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from ssl_influence.data import rows
from ssl_influence.reporting import samples
from ssl_influence.reporting.weights_report import contents as contents_lib
from ssl_influence.reporting.weights_report.markup import Html, element

# Pictures in a sheet, columns x columns of them.
_COLUMNS = 16
# (at most so many pictures, the longest side of each in pixels)
_SIDES = ((1_000, 96), (4_000, 64), (None, 40))
# Bytes of all sheets beyond which they are not kept exactly.
_EXACT_BYTES = 8 * 2**20
_QUALITY = 90
_LETTERS = 400  # of a text
_NUMBERS = 12  # of a vector
_STEPS = 32  # of a weight's history

STRANGER = -2  # among labels


def mixed(ids: np.ndarray) -> np.ndarray:
    """Keys that order ids as if at random, uint32 of the same shape; the script has the same.

    Many weights lie on a bound. In the order of their ids, the first ones would all be of the first
    data of a pool that was joined of several. Multiplicative hashing: Knuth, volume 3, section 6.4.
    """
    return ids.astype(np.uint32) * np.uint32(0x9E3779B1)


def chosen(
    weight: np.ndarray, ties: np.ndarray, most: int, first: Sequence[int] = ()
) -> np.ndarray:
    """Whose input is shown, as places in ascending order of their weight, int64 [min(n, most)].

    Where that is not everybody's: a third each of the lowest and of the highest weights, then
    `first`, and the rest evenly from those between.

    Args:
      weight: [n].
      ties: by which equal weights are ordered, [n].
      most: how many.
      first: places.
    """
    order = np.lexsort((ties, weight))
    if len(order) <= most:
        return order
    end = most // 3
    shown = np.zeros(len(order), bool)
    shown[[*order[:end], *order[len(order) - end :]]] = True
    asked = [place for place in first if not shown[place]]
    shown[asked[: most - 2 * end]] = True
    rest = order[~shown[order]]
    spread = np.linspace(0, len(rest) - 1, most - np.count_nonzero(shown))
    shown[rest[spread.round().astype(np.int64)]] = True
    return order[shown[order]]


def array(values: np.ndarray, dtype: str) -> dict[str, str]:
    """An array for the script: {"type": of a typed array, "data": base64}, flattened."""
    kinds = {"<f4": "Float32", "<u4": "Uint32", "<i4": "Int32", "<u2": "Uint16"}
    data = np.ascontiguousarray(values, dtype=dtype).tobytes()
    return {"type": kinds[dtype], "data": base64.b64encode(data).decode("ascii")}


def history(by_step: Mapping[int, np.ndarray], places: np.ndarray) -> dict[str, Any]:
    """The weights of some examples over the steps, in 65,535 levels, example by example.

    Of many steps, evenly spaced ones, the first and the last among them.
    """
    steps = np.array(sorted(by_step))
    picked = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _STEPS)).round().astype(int))
    values = np.stack([by_step[step][places] for step in steps[picked].tolist()], axis=1)
    low, high = float(values.min()), float(values.max())
    levels = np.round((values - low) / ((high - low) or 1.0) * 65535)
    return {
        "steps": steps[picked].tolist(),
        "low": low,
        "high": high,
        "levels": array(levels, "<u2"),
    }


def pictures(images: rows.Rows, ids: np.ndarray) -> tuple[dict[str, Any], list[Html], str]:
    """Small pictures of images uint8 [n, H, W, C].

    Returns:
      How they are laid out; the sheets that hold them, each an element of its own that is decoded
      when it is needed; and what was done to them, for the page's text.
    """
    side = next(side for most, side in _SIDES if most is None or len(ids) <= most)
    height, width = images.shape[1:3]
    factor = min(1.0, side / max(height, width))
    size = max(1, round(width * factor)), max(1, round(height * factor))
    per_sheet = _COLUMNS**2
    sheets = []
    for start in range(0, len(ids), per_sheet):
        taken = rows.take(images, ids[start : start + per_sheet])
        sheets.append(_sheet(taken, size))
    encoded, kind = [_encoded(sheet, "PNG") for sheet in sheets], "png"
    if sum(map(len, encoded)) > _EXACT_BYTES:
        encoded = [_encoded(sheet, "JPEG", quality=_QUALITY, subsampling=0) for sheet in sheets]
        kind = "jpeg"
    notes = []
    if factor < 1:
        notes.append(f"reduced from {width} x {height} to {size[0]} x {size[1]} pixels")
    if kind == "jpeg":
        notes.append("slightly compressed (JPEG)")
    layout = {
        "width": size[0],
        "height": size[1],
        "columns": _COLUMNS,
        "perSheet": per_sheet,
        "type": f"image/{kind}",
    }
    elements = [
        element(
            "script", base64.b64encode(data).decode("ascii"), type="text/plain", id=f"sheet-{i}"
        )
        for i, data in enumerate(encoded)
    ]
    return layout, elements, " and ".join(notes)


def _sheet(images: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """A sheet of images uint8 [k, H, W, C], each of `size`, line by line."""
    mode = "L" if images.shape[-1] == 1 else "RGB"
    lines = -(-len(images) // _COLUMNS)
    sheet = Image.new(mode, (size[0] * _COLUMNS, size[1] * lines))
    for place, image in enumerate(images):
        picture = Image.fromarray(image[..., 0] if mode == "L" else image)
        if picture.size != size:
            picture = picture.resize(size, Image.Resampling.LANCZOS)
        sheet.paste(picture, (place % _COLUMNS * size[0], place // _COLUMNS * size[1]))
    return sheet


def _encoded(sheet: Image.Image, kind: str, **how: int) -> bytes:
    data = io.BytesIO()
    sheet.save(data, kind, **how)
    return data.getvalue()


def texts(pool: contents_lib.Pool, ids: np.ndarray) -> list[str]:
    """Texts, or the numbers of vectors, as cards show them; long ones without their middle."""
    taken = rows.take(pool.inputs, ids)
    if pool.kind == "text":
        return [samples.shortened(" ".join(given.split()), _LETTERS) for given in taken]
    return [_numbers(vector) for vector in taken]


def _numbers(vector: np.ndarray) -> str:
    shown = ", ".join(f"{number:.4g}" for number in vector[:_NUMBERS].tolist())
    return shown if len(vector) <= _NUMBERS else f"{shown}, … {len(vector)} numbers"


def script_data(values: Any) -> Html:
    """JSON that can stand inside a script element: no text in it can end that."""
    held = json.dumps(values, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        held = held.replace(sign, f"\\u{ord(sign):04x}")
    return Html(held)
