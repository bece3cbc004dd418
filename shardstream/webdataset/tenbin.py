"""WebDataset's name of the module for its tensor format; the code is in ``codecs``."""

from shardstream.codecs import decode_buffer, encode_buffer
