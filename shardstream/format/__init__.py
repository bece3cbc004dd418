"""What the bytes on disk mean: pure functions on given bytes, no I/O.

A shard that is read passes through these files, in this order:

    forward_reader      read a stream by growing offsets; open compressed tars
    tar_reader, pax     512-byte headers and extended headers -> members with offsets
    tar_diagnostics     links and bytes after the end: what a pass over a tar leaves out
    names               member name <-> key and field
    samples             members of one key -> a sample
    columnar, columns   many samples at once with NumPy, kept as a column for each field
    image_formats, bit_depth   image formats that are opened; bits of the stored numbers

A shard that is written passes through ``names`` and ``tar_writer`` (members -> headers and padded bodies). Files beside
the shards: ``index`` (``NAME.tar.idx``), ``manifest`` (``index.json``), ``classes_json`` and ``dali_index``.
"""

from shardstream.format.tar_writer import encode_member, member_bytes

__all__ = ["encode_member", "member_bytes"]
