"""Is every whole page of a guest's files in a dump of its memory? In the machine of libvirt-suite.sh.

    dump.py DUMP INITRD NAME...

DUMP is an ELF core file, INITRD an uncompressed cpio archive (newc) that the guest has unpacked, NAME a file in it.
Exit code: 0 all pages are there, 1 some are not (their number is printed).
"""

import pathlib
import struct
import sys

PAGE = 4096


def memory(dump):
    """The pages of all PT_LOAD segments."""
    (headers,) = struct.unpack_from("<Q", dump, 32)
    size, count = struct.unpack_from("<HH", dump, 54)
    for header in range(headers, headers + size * count, size):
        kind, _, start, _, _, length = struct.unpack_from("<IIQQQQ", dump, header)
        if kind == 1:
            yield from (dump[at : at + PAGE] for at in range(start, start + length, PAGE))


def contents(archive, name):
    """The contents of a file: after its header of 110 bytes and its name, padded to 4 bytes."""
    name = name.encode() + b"\0"
    at = archive.index(name)
    while archive[at - 110 : at - 104] != b"070701":
        at = archive.index(name, at + 1)
    start = (at + len(name) + 3) & ~3
    return archive[start : start + int(archive[at - 56 : at - 48], 16)]


dump, initrd = (pathlib.Path(path).read_bytes() for path in sys.argv[1:3])
there = set(memory(dump))
for name in sys.argv[3:]:
    data = contents(initrd, name)
    pages = [data[at : at + PAGE] for at in range(0, len(data) - PAGE + 1, PAGE)]
    absent = sum(page not in there for page in pages)
    print(f"{name}: {absent} of {len(pages)} pages are not in the dump of {len(dump)} bytes")
    if absent or not pages:
        sys.exit(1)
