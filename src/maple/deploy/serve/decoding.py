"""Uploads to pixels, in the pool of decoding processes."""

from __future__ import annotations

import base64
import binascii

import numpy as np

from maple.data._decoder import Batch, Decoding
from maple.data._pool import DecoderKilled, DecoderPool
from maple.data.decode import Fit
from maple.deploy.serve.uploads import Upload, UploadError, UploadStatus
from maple.errors import MapleError
from maple.text import printable


class NoDecoder(MapleError):
    """No process was available to decode an upload; its images may be fine."""


class UploadDecoder:
    """Decode uploads to pixels (S, S, 3) uint8 in a pool of ``n`` processes, for as many threads.

    Dimensions are checked before a pixel is decoded; an image that takes longer than ``seconds`` is refused.
    """

    def __init__(self, size: int, fit: Fit, max_pixels: int, seconds: float, n: int) -> None:
        self._pool = DecoderPool(Decoding(size, fit, max_pixels, seconds), n)

    def __call__(self, upload: Upload) -> np.ndarray:
        try:
            data = upload.data if isinstance(upload.data, bytes) else _from_base64(upload.data)
        except UploadError as error:
            raise _refusal(upload, str(error)) from None
        batch = self._decode(data)
        for failure in batch.failures:
            raise _refusal(upload, failure.reason, 413 if failure.too_large else 422)
        return batch.pixels[0]

    def _decode(self, data: bytes) -> Batch:
        """Decode in one process; if it is killed from outside (out of memory), in another one."""
        try:
            return self._pool.decode([data], attempts=2)
        except DecoderKilled:
            raise NoDecoder("two decoding processes were killed, perhaps out of memory: try again later") from None
        except OSError as error:
            why = error.strerror or error
            raise NoDecoder(f"cannot start a decoding process ({why}): try again later") from None

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def _refusal(upload: Upload, reason: str, status: UploadStatus = 422) -> UploadError:
    return UploadError(status, f"cannot use '{printable(upload.name, 60)}': {printable(reason, 200)}")


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise UploadError(422, "its data are not base64: encode the bytes of the file, without line breaks") from None
