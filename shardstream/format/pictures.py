"""Which image files are opened: the formats that Pillow decodes by itself.

Pillow looks at the content, not at the name, and hands some formats to other programs: an EPS in a field ``jpg`` would start
Ghostscript.
"""

from __future__ import annotations

PILLOW_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "DIB", "PPM", "JPEG2000", "TGA")
"""Names as in ``PIL.Image.open(formats=)``, the frequent ones first."""
