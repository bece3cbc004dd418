"""WebDataset's name of the module for its tensor format; the code is in ``codecs``."""

from shardstream.codecs import decode_buffer as decode_buffer
from shardstream.codecs import encode_buffer as encode_buffer
