"""Parse and write the bytes of shards, indexes and manifests; pure functions without I/O.

Reading a shard uses these files, in this order:

    forward_reader      read a stream by growing offsets; open compressed tars
    tar_reader, pax     512-byte headers and extended headers -> members with offsets
    tar_diagnostics     links and trailing bytes that a pass over a tar leaves out
    names               member name <-> key and field
    samples             members of one key -> a sample
    columnar, columns   many samples at once with NumPy, stored as one column per field
    image_formats, bit_depth   supported image formats; bit depth of the stored numbers

Writing a shard uses ``names`` and ``tar_writer`` (members -> headers and padded bodies). Files in the folder of
the shards: ``index`` (``NAME.tar.idx``), ``manifest`` (``index.json``), ``classes_json`` and ``dali_index``.
"""

from shardstream.format.tar_writer import encode_member, member_bytes

__all__ = ["encode_member", "member_bytes"]
