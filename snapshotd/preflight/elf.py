"""Which libraries an ELF file asks the dynamic linker for."""

from __future__ import annotations

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile


def needed_libraries(path: str) -> list[str]:
    """The names in DT_NEEDED; empty if the file is not ELF or not dynamically linked. Reads a few pages of the file."""
    with open(path, "rb") as file:
        try:
            for segment in ELFFile(file).iter_segments("PT_DYNAMIC"):
                if isinstance(segment, DynamicSegment):
                    return [str(tag.needed) for tag in segment.iter_tags("DT_NEEDED")]
        except (ELFError, UnicodeDecodeError):
            pass
    return []
