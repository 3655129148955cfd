"""Private tests of LiveCodeBench: base64 of zlib of a pickle of a text. The pickle is read, never run.

To unpickle is to run the file's instructions, which may call anything. Here only those are understood that make one
text; any other instruction refuses the row.
"""

import base64
import binascii
import pickletools
import zlib

from ops.datasets.bad_rows import BadRow

UNPACKED_BYTES_MAX = 1 << 28
_TEXT = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_HARMLESS = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT"}
_REMEDY = "LiveCodeBench packs one text of JSON; leave the row out."


def unpack_tests(packed: str) -> str:
    """The text in `packed`. Raises `BadRow` for anything else than a text, or one beyond `UNPACKED_BYTES_MAX`."""
    try:
        compressed = base64.b64decode(packed, validate=True)
        unpacker = zlib.decompressobj()
        pickled = unpacker.decompress(compressed, UNPACKED_BYTES_MAX)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise BadRow(f"'private_test_cases' cannot be unpacked: {error}", _REMEDY) from None
    if unpacker.unconsumed_tail:
        raise BadRow(f"'private_test_cases' unpacks to more than {UNPACKED_BYTES_MAX:,} bytes", _REMEDY)
    if not unpacker.eof:
        raise BadRow("'private_test_cases' is cut short", _REMEDY)
    return _pickled_text(pickled)


def _pickled_text(pickled: bytes) -> str:
    texts: list[str] = []
    ended = False
    try:
        for instruction, value, _ in pickletools.genops(pickled):
            if instruction.name in _TEXT:
                texts.append(str(value))
            elif instruction.name == "STOP":
                ended = True
            elif instruction.name not in _HARMLESS:
                raise BadRow(
                    f"'private_test_cases' is a pickle that does more than hold a text ({instruction.name})", _REMEDY
                )
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise BadRow(f"'private_test_cases' is no pickle: {error}", _REMEDY) from None
    if not ended or len(texts) != 1:
        raise BadRow("'private_test_cases' is a pickle of something else than one text", _REMEDY)
    return texts[0]
