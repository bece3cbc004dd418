"""Field bytes <-> values, for sound. No file here imports torch.

optional            import the packages of extras, with one error that names the extra
audio               sound -> samples and rate
"""

from shardstream.codecs.audio import Audio, AudioDecoder, audio_decoders

__all__ = ["Audio", "AudioDecoder", "audio_decoders"]
