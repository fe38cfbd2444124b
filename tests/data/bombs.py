"""Small files that mean a lot: images of as many pixels as are allowed, or of endless work; and what packs them."""

import io
import json
import resource
import struct
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from ddm_ray.config import DataConfig
from ddm_ray.data.images import MAX_PIXELS
from ddm_ray.data.prepare import decoder_process
from ddm_ray.data.prepare.decoding import read_decoded
from ddm_ray.data.sources import open_source
from ddm_ray.memory import taken_bytes
from tests.data.broken import GOOD, encoded, picture

SIDE = int(MAX_PIXELS**0.5)
TILE = 16
_PIECE = 2**20


def zeros(count: int) -> bytes:
    """A zlib stream of so many zeros, of which a MiB is compressed and repeated."""
    squeeze = zlib.compressobj(1)
    head = squeeze.compress(b"") + squeeze.flush(zlib.Z_FULL_FLUSH)
    piece = squeeze.compress(bytes(_PIECE)) + squeeze.flush(zlib.Z_FULL_FLUSH)
    end = squeeze.compress(bytes(count % _PIECE)) + squeeze.flush()
    return head + piece * (count // _PIECE) + end[:-4] + struct.pack(">HH", count % 65521, 1)


def png(colour: int, channels: int, *more: tuple[bytes, bytes], depth: int = 8) -> bytes:
    """A PNG of the largest size, of a colour type."""
    header = struct.pack(">IIBBBBB", SIDE, SIDE, depth, colour, 0, 0, 0)
    pixels = zeros(SIDE * (1 + -(-SIDE * channels * depth // 8)))
    chunks = ((b"IHDR", header), *more, (b"IDAT", pixels), (b"IEND", b""))
    sealed = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(sealed)


def tiff(channels: int, tile: int | None = None) -> bytes:
    """A TIFF of the largest size, deflated: a single strip, or tiles that are all the same one."""
    side = SIDE // tile * tile if tile else SIDE
    data = zeros((tile or side) ** 2 * channels)
    fields = {258: [8] * channels, 259: [8], 277: [channels], 262: [2 if channels > 1 else 1]}
    fields |= {338: [2]} if channels == 4 else {}
    parts = (side // tile) ** 2 if tile else 1
    names = (322, 323, 324, 325) if tile else (278, 273, 279)
    large = {256: [side], 257: [side], **{name: [tile or side] for name in names[:-2]}}
    large |= {names[-2]: [8] * parts, names[-1]: [len(data)] * parts}
    packed = {tag: (3, np.array(values, "<u2").tobytes(), len(values)) for tag, values in fields.items()}
    packed |= {tag: (4, np.array(values, "<u4").tobytes(), len(values)) for tag, values in large.items()}
    first = 8 + len(data) + 2 + 12 * len(packed) + 4
    outside, entries = b"", b""
    for tag, (kind, value, count) in sorted(packed.items()):
        if len(value) > 4:
            value, outside = struct.pack("<I", first + len(outside)), outside + value
        entries += struct.pack("<HHI", tag, kind, count) + value.ljust(4, b"\0")
    start = struct.pack("<I", 8 + len(data))
    return b"II*\0" + start + data + struct.pack("<H", len(packed)) + entries + bytes(4) + outside


def webp() -> bytes:
    """A WebP of the largest size: each channel's code has a single symbol, so that a pixel takes no bit."""
    bits = f"{SIDE - 1:014b}"[::-1] * 2 + "0" + "000" + "000" + "1000" * 3 + "101" + "1" * 8 + "1000"
    bits = bits.ljust(-(-len(bits) // 8) * 8, "0")
    body = b"\x2f" + bytes(int(bits[at : at + 8][::-1], 2) for at in range(0, len(bits), 8))
    body += bytes(len(body) % 2)
    chunk = b"VP8L" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def tiled_jpeg2000(tiles: int) -> bytes:
    """A JPEG 2000 of so many tiles along each side."""
    flat = Image.new("L", (TILE, TILE), 99)
    stream = bytearray(encoded(flat, "JPEG2000", no_jp2=True, num_resolutions=1))
    size, start = stream.index(b"\xff\x51") + 4, stream.index(b"\xff\x90")
    struct.pack_into(">IIIIII", stream, size + 2, TILE * tiles, TILE * tiles, 0, 0, TILE, TILE)
    part = stream[start : stream.rindex(b"\xff\xd9")]
    parts = b"".join(part[:4] + struct.pack(">H", tile) + part[6:] for tile in range(tiles**2))
    return bytes(stream[:start]) + parts + b"\xff\xd9"


def scans(count: int, side: int) -> bytes:
    """A progressive JPEG whose brightness is refined again and again, by as good as no data: runs of 16384 blocks."""
    stream = bytearray(encoded(Image.new("RGB", (64, 64), "red"), "JPEG", progressive=True))
    struct.pack_into(">HH", stream, stream.index(b"\xff\xc2") + 5, side, side)
    table = b"\xff\xc4\x00\x14\x10\x01" + bytes(15) + b"\xe0"
    scan = b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x10" + bytes((side // 8 + 1) ** 2 // 2**14 * 2 + 4)
    return bytes(stream[:-2]) + table + scan * count + b"\xff\xd9"


def comments() -> bytes:
    """A PPM in letters, of comments alone, which Pillow takes out one by one: half a minute of work."""
    return b"P3 9 9 255\n" + b"#\n" * 2**25


FEW: dict[str, Callable[[], bytes]] = {
    "palette.png": lambda: png(3, 1, (b"PLTE", bytes(3)), (b"tRNS", b"\0")),
    "alpha.png": lambda: png(6, 4),
    "strip.tif": lambda: tiff(3),
    "tiles.tif": lambda: tiff(3, TILE),
    "solid.webp": webp,
    "tiles.j2k": lambda: tiled_jpeg2000(255),
    "scans.jpg": lambda: scans(10_000, 4096),
}
"""Bombs by their names."""
MORE: dict[str, Callable[[], bytes]] = {
    "deep.png": lambda: png(6, 4, depth=16),
    "grey16.png": lambda: png(0, 1, depth=16),
    "alpha.tif": lambda: tiff(4),
    "fewer-scans.jpg": lambda: scans(20, SIDE),
    "comments.ppm": comments,
    "solid.avif": lambda: encoded(Image.new("RGB", (SIDE, SIDE)), "AVIF", speed=10),
    "solid.jp2": lambda: encoded(Image.new("RGB", (SIDE, SIDE)), "JPEG2000"),
    "frame.gif": lambda: encoded(Image.new("P", (SIDE, SIDE)), "GIF"),
}
"""Others, some of which take long to make."""

HOLES = str(6 * 2**40)
"""Size in bytes that sparse members claim."""
PAX: dict[str, dict[str, str]] = {
    "pax-0-0": {"GNU.sparse.size": HOLES, "GNU.sparse.numblocks": "1"},
    "pax-0-1": {"GNU.sparse.size": HOLES, "GNU.sparse.map": "0,0"},
    "pax-1-0": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": HOLES},
}


def good_images(count: int) -> list[bytes]:
    generator = np.random.default_rng(0)
    kinds = list(GOOD.values())
    return [kinds[index % len(kinds)](picture(generator)) for index in range(count)]


def add(tar: tarfile.TarFile, name: str, content: bytes, fields: dict[str, str] | None = None) -> None:
    """Add a member, with fields of pax."""
    member = tarfile.TarInfo(name)
    member.size, member.pax_headers = len(content), fields or {}
    tar.addfile(member, io.BytesIO(content))


def add_sparse(tar: tarfile.TarFile, name: str, chain: int) -> None:
    """Add a member of GNU's sparse type, whose map goes on in so many blocks."""
    member = tarfile.TarInfo(name)
    member.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    struct.pack_into(">12s12s", block, 386, b"%011o\0" % 0, b"%011o\0" % 0)
    block[482] = chain > 0
    block[483:495] = b"\x80" + int(HOLES).to_bytes(11)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    more = [bytes(504) + bytes([place < chain]) + bytes(7) for place in range(1, chain + 1)]
    write(tar, bytes(block) + b"".join(more))


def write(tar: tarfile.TarFile, blocks: bytes) -> None:
    """Write blocks as they are."""
    assert tar.fileobj
    tar.fileobj.write(blocks)
    tar.offset = tar.fileobj.tell()


def write_tar(path: Path, good: list[bytes], bombs: dict[str, bytes]) -> dict[str, str]:
    """Good images and bombs, of images and of tars, in turns; how the reason of each bomb's row begins."""
    reasons = {
        f"sparse-{kind}": "its png is a sparse file" for kind in ("gnu", "gnu-chain", "pax-0-0", "pax-0-1", "pax-1-0")
    }
    reasons |= dict.fromkeys(("pax-fields", "gnu-name"), "its name or header has more than 262144 bytes")
    reasons |= {"hole": "its png has 269484032 bytes, more than 268435456", "json": "its json has"}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for index, content in enumerate(good):
            add(tar, f"good-{index:04d}.png", content)
            add(tar, f"good-{index:04d}.cls", b"1")
            if index < len(bombs):
                name, bomb = list(bombs.items())[index]
                add(tar, f"bomb-{name}", bomb)
                add(tar, f"bomb-{name.partition('.')[0]}.cls", b"1")
            elif index == len(bombs):
                add_sparse(tar, "sparse-gnu.png", 0)
                add_sparse(tar, "sparse-gnu-chain.png", 2)
                for kind, fields in PAX.items():
                    add(tar, f"sparse-{kind}.png", b"1\n0\n0\n".ljust(512), fields)
                add(tar, "pax-fields.png", b"x" * 600, {"comment": "x" * 300_000})
                long = tarfile.TarInfo("gnu-name.png" + "x" * 300_000)
                write(tar, long.tobuf(tarfile.GNU_FORMAT))
            elif index == len(bombs) + 1:
                add(tar, "json.png", content)
                add(tar, "json.json", b"[" + b"[]," * 2_000_000 + b"0]")
                hole = tarfile.TarInfo("hole.png")
                hole.size = 257 * 2**20
                write(tar, hole.tobuf())
                tar.fileobj.seek(hole.size, 1)
                tar.offset = tar.fileobj.tell()
    return reasons


def write_parquet(path: Path, rows: int, image: bytes) -> None:
    """So many rows of the same image, padded to a MiB, which the file has once."""
    value = pa.array([image.ljust(_PIECE, b"\0")], pa.binary())
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), value)
    table = pa.table({"image": column, "label": np.ones(rows, np.int64)})
    pq.write_table(table, path, dictionary_pagesize_limit=2 * _PIECE, compression="none", store_schema=False)


def main(source: str, image_size: int) -> None:
    """Print why each row of a source can't be used, empty if it can, and what a task took for all of them."""
    config = DataConfig(num_classes=4, channels=3, image_size=image_size)
    opened, outcomes, chunk_rows = open_source(config, source), dict[str, str](), []

    def task() -> None:
        for unit in opened.list().units:
            for chunk in read_decoded(unit, (), opened, config):
                chunk_rows.append(len(chunk.rows.ids) + len(chunk.rows.rejected))
                outcomes.update(dict.fromkeys(chunk.rows.ids, ""))
                outcomes.update((row["id"], row["reason"]) for row in chunk.rows.rejected)

    task()
    while decoder_process._idle:
        decoder_process._idle.pop().close()  # a process counts once it has ended
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    # A process' number of its own begins with that of the one that started it.
    took = {"peak": taken_bytes("VmHWM"), "cpu": children.ru_utime + children.ru_stime}
    print(json.dumps({"outcomes": outcomes, "chunk_rows": chunk_rows, **took}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
