"""Field bytes <-> values, by format. No file here imports torch."""

from shardstream.codecs.arrays import decode_npy, decode_npy_column, decode_npz, iter_npz
from shardstream.codecs.audio import Audio, AudioDecoder, audio_decoders, sound_peaks
from shardstream.codecs.images import IMAGE_NAMES, ImageDecoder
from shardstream.codecs.installed_decoders import installed_decoders
from shardstream.codecs.jpeg import decode_jpeg, has_only_pixels
from shardstream.codecs.optional import import_extra
from shardstream.codecs.plain_values import (
    decode_cbor,
    decode_csv,
    decode_gzip,
    decode_json,
    decode_jsonl,
    decode_msgpack,
    decode_tsv,
    encode_cbor,
    encode_msgpack,
    iter_tsv,
    parse_json,
)
from shardstream.codecs.properties import properties_of, read_property
from shardstream.codecs.raw_images import (
    BitDepth,
    LossyDecodeError,
    is_rendered,
    scale_to_8_bits,
    stored_depth,
)
from shardstream.codecs.tenbin import decode_buffer, encode_buffer
from shardstream.codecs.value_parts import length_of, part_of
from shardstream.codecs.video import VIDEO_EXTENSIONS, Video, VideoDecoder

__all__ = [
    "IMAGE_NAMES",
    "VIDEO_EXTENSIONS",
    "Audio",
    "AudioDecoder",
    "BitDepth",
    "ImageDecoder",
    "LossyDecodeError",
    "Video",
    "VideoDecoder",
    "audio_decoders",
    "decode_buffer",
    "decode_cbor",
    "decode_csv",
    "decode_gzip",
    "decode_jpeg",
    "decode_json",
    "decode_jsonl",
    "decode_msgpack",
    "decode_npy",
    "decode_npy_column",
    "decode_npz",
    "decode_tsv",
    "encode_buffer",
    "encode_cbor",
    "encode_msgpack",
    "has_only_pixels",
    "import_extra",
    "installed_decoders",
    "is_rendered",
    "iter_npz",
    "iter_tsv",
    "length_of",
    "parse_json",
    "part_of",
    "properties_of",
    "read_property",
    "scale_to_8_bits",
    "sound_peaks",
    "stored_depth",
]
