"""Pictures as bytes: what clients send is checked and decoded, what they get is encoded and carries its receipt.

Owns formats and their limits. A PNG carries text under `RECEIPT_KEY`; JPEG and WebP in EXIF's ImageDescription.
Knows nothing of requests. PIL is imported where it is used.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from typing import Any, Literal

from genserve.core.errors import InvalidRequest

OutputFormat = Literal["png", "jpeg", "webp"]

RECEIPT_KEY = "genserve"
MAX_PIXELS = 4096 * 4096  # of a picture that a client sends
DEFAULT_QUALITY = 95  # of JPEG and WebP

_FORMATS = ("PNG", "JPEG", "WEBP")
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,")
_EXIF_DESCRIPTION = 0x010E
_EXIF_MAX_BYTES = 60_000  # JPEG's limit is a segment of 64 KiB


def from_base64(text: str, field: str) -> Any:
    """The PIL image in base64 or a data URL, as `decode` gives it."""
    start = _DATA_URL.match(text, 0, 100)
    if start is None and text.startswith(("http:", "https:", "data:", "file:")):
        raise InvalidRequest(field, "must be base64 or a data URL of a picture: nothing is fetched")
    try:
        data = base64.b64decode(text[start.end() if start else 0 :], validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(field, "is not base64") from None
    return decode(data, field)


def decode(data: bytes, field: str) -> Any:
    """The PIL image (RGB, or RGBA where it has transparency) in a PNG, JPEG or WebP file, upright.

    `InvalidRequest` names `field`: other formats, animations, broken files, more than `MAX_PIXELS`.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not data:
        raise InvalidRequest(field, "is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise InvalidRequest(field, f"is {width}x{height}; at most {MAX_PIXELS} pixels are taken")
        if getattr(image, "n_frames", 1) > 1:
            raise InvalidRequest(field, "is an animation")
        image.load()
        upright = ImageOps.exif_transpose(image)
        return upright.convert("RGBA" if upright.has_transparency_data else "RGB")
    except InvalidRequest:
        raise
    except UnidentifiedImageError:
        raise InvalidRequest(field, "is no PNG, JPEG or WebP picture") from None
    except Image.DecompressionBombError:
        raise InvalidRequest(field, f"is too large; at most {MAX_PIXELS} pixels are taken") from None
    except Exception as error:  # decoders raise whatever broken bytes lead them to
        raise InvalidRequest(field, f"is a broken picture: {error}") from None


def opaque(image: Any) -> Any:
    """The same in RGB; what shines through is white."""
    from PIL import Image

    if image.mode != "RGBA":
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def mask_of(image: Any) -> Any:
    """A mask as models take it, in RGB: white is made anew, black is kept.

    Of a picture with transparency what is transparent is made anew (OpenAI's form); else it is such a mask already.
    """
    from PIL import ImageChops

    if image.mode == "RGBA":
        return ImageChops.invert(image.getchannel("A")).convert("RGB")
    return image.convert("L").convert("RGB")


def encode(picture: Any, form: OutputFormat, quality: int | None = None, receipt: str = "") -> bytes:
    """A PIL image as a file. `quality` (0 to 100) is of JPEG and WebP; `receipt` goes inside.

    A receipt too long for JPEG or WebP is left out.
    """
    from PIL import Image, PngImagePlugin

    out = io.BytesIO()
    if form == "png":
        info = PngImagePlugin.PngInfo()
        if receipt:
            info.add_itxt(RECEIPT_KEY, receipt)
        picture.save(out, "PNG", pnginfo=info)
        return out.getvalue()
    exif = Image.Exif()
    if 0 < len(receipt.encode()) <= _EXIF_MAX_BYTES:
        exif[_EXIF_DESCRIPTION] = f"{RECEIPT_KEY}:{receipt}"
    chosen = DEFAULT_QUALITY if quality is None else quality
    picture.convert("RGB").save(out, form.upper(), quality=chosen, exif=exif.tobytes())
    return out.getvalue()


def receipt_text(data: bytes) -> str | None:
    """The receipt that `encode` put into a file; None if there is none."""
    from PIL import Image

    image = Image.open(io.BytesIO(data), formats=_FORMATS)
    text = getattr(image, "text", {}).get(RECEIPT_KEY)
    if text is not None:
        return str(text)
    described = str(image.getexif().get(_EXIF_DESCRIPTION, ""))
    prefix = f"{RECEIPT_KEY}:"
    return described.removeprefix(prefix) if described.startswith(prefix) else None


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, form: OutputFormat) -> str:
    return f"data:image/{form};base64,{base64_of(data)}"
