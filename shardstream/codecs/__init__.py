"""Field bytes <-> values, for formats of other libraries. No file here imports torch.

optional            import the packages of extras, with one error that names the extra
audio               sound -> samples and rate
video               videos that are decoded where they are used
video_container     which container a file is, by its first bytes; cut files
video_readers       frames and sound of a video file, by torchcodec or PyAV
mp4_frames          times of the frames of a long MP4 file, without reading them
plain_values        MessagePack, CBOR, CSV; the depth of nested values
tenbin              arrays in WebDataset's tensor format
"""

from shardstream.codecs.audio import Audio, AudioDecoder, audio_decoders, sound_peaks
from shardstream.codecs.optional import import_extra
from shardstream.codecs.plain_values import (
    DEPTH_LIMIT,
    VALUES_LIMIT,
    check_depth,
    decode_cbor,
    decode_csv,
    decode_msgpack,
    decode_tsv,
    encode_cbor,
    encode_msgpack,
    iter_tsv,
)
from shardstream.codecs.tenbin import decode_buffer, encode_buffer
from shardstream.codecs.video import VIDEO_EXTENSIONS, Video, VideoDecoder

__all__ = [
    "DEPTH_LIMIT",
    "VALUES_LIMIT",
    "VIDEO_EXTENSIONS",
    "Audio",
    "AudioDecoder",
    "Video",
    "VideoDecoder",
    "audio_decoders",
    "check_depth",
    "decode_buffer",
    "decode_cbor",
    "decode_csv",
    "decode_msgpack",
    "decode_tsv",
    "encode_buffer",
    "encode_cbor",
    "encode_msgpack",
    "import_extra",
    "iter_tsv",
    "sound_peaks",
]
