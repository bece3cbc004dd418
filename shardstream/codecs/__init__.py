"""Field bytes <-> values, for sound and video. No file here imports torch.

optional            import the packages of extras, with one error that names the extra
audio               sound -> samples and rate
video               videos that are decoded where they are used
video_readers       frames and sound of a video file, by torchcodec or PyAV
"""

from shardstream.codecs.audio import Audio, AudioDecoder, audio_decoders
from shardstream.codecs.video import VIDEO_EXTENSIONS, Video, VideoClip, VideoDecoder
from shardstream.codecs.video_readers import VideoMetadata

__all__ = [
    "VIDEO_EXTENSIONS",
    "Audio",
    "AudioDecoder",
    "Video",
    "VideoClip",
    "VideoDecoder",
    "VideoMetadata",
    "audio_decoders",
]
