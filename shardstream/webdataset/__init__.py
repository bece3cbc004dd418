"""Read and write shards under webdataset's names: ``import shardstream.webdataset as wds``."""

from shardstream.webdataset import autodecode as autodecode
from shardstream.webdataset import cache as cache
from shardstream.webdataset import compat as compat
from shardstream.webdataset import extradatasets as extradatasets
from shardstream.webdataset import filters as filters
from shardstream.webdataset import handlers as handlers
from shardstream.webdataset import shardlists as shardlists
from shardstream.webdataset import tariterators as tariterators
from shardstream.webdataset import tenbin as tenbin
from shardstream.webdataset import utils as utils
from shardstream.webdataset import writer as writer
from shardstream.webdataset.autodecode import (
    Continue,
    Decoder,
    DecodingError,
    gzfilter,
    handle_extension,
    imagehandler,
    pytorch_weights_only,
    torch_audio,
    torch_loads,
    torch_video,
)
from shardstream.webdataset.cache import LRUCleanup, pipe_cleaner
from shardstream.webdataset.compat import FluidInterface, FluidWrapper, WebDataset, WebLoader
from shardstream.webdataset.extradatasets import MockDataset, with_epoch, with_length
from shardstream.webdataset.filters import (
    Cached,
    LMDBCached,
    associate,
    batched,
    decode,
    detshuffle,
    extract_keys,
    getfirst,
    info,
    map,
    map_dict,
    map_tuple,
    pipelinefilter,
    rename,
    rename_keys,
    rsample,
    select,
    shuffle,
    slice,
    to_tuple,
    transform_with,
    unbatched,
    xdecode,
)
from shardstream.webdataset.gopen import gopen, gopen_schemes
from shardstream.webdataset.handlers import (
    UnsafeError,
    ignore_and_continue,
    ignore_and_stop,
    reraise_exception,
    warn_and_continue,
    warn_and_stop,
)
from shardstream.webdataset.mix import RandomMix, RoundRobin
from shardstream.webdataset.pipeline import DataPipeline
from shardstream.webdataset.shardlists import (
    ResampledShards,
    SimpleShardList,
    non_empty,
    resampled,
    shardspec,
    single_node_only,
    split_by_node,
    split_by_worker,
)
from shardstream.webdataset.tariterators import tarfile_samples, tarfile_to_samples
from shardstream.webdataset.utils import PipelineStage, repeatedly
from shardstream.webdataset.writer import ShardWriter, TarWriter, numpy_dumps, torch_dumps

__all__ = [
    "Cached",
    "Continue",
    "DataPipeline",
    "Decoder",
    "DecodingError",
    "FluidInterface",
    "FluidWrapper",
    "LMDBCached",
    "LRUCleanup",
    "MockDataset",
    "PipelineStage",
    "RandomMix",
    "ResampledShards",
    "RoundRobin",
    "ShardWriter",
    "SimpleShardList",
    "TarWriter",
    "UnsafeError",
    "WebDataset",
    "WebLoader",
    "associate",
    "batched",
    "decode",
    "detshuffle",
    "extract_keys",
    "getfirst",
    "gopen",
    "gopen_schemes",
    "gzfilter",
    "handle_extension",
    "ignore_and_continue",
    "ignore_and_stop",
    "imagehandler",
    "info",
    "map",
    "map_dict",
    "map_tuple",
    "non_empty",
    "numpy_dumps",
    "pipe_cleaner",
    "pipelinefilter",
    "pytorch_weights_only",
    "rename",
    "rename_keys",
    "repeatedly",
    "reraise_exception",
    "resampled",
    "rsample",
    "select",
    "shardspec",
    "shuffle",
    "single_node_only",
    "slice",
    "split_by_node",
    "split_by_worker",
    "tarfile_samples",
    "tarfile_to_samples",
    "to_tuple",
    "torch_audio",
    "torch_dumps",
    "torch_loads",
    "torch_video",
    "transform_with",
    "unbatched",
    "warn_and_continue",
    "warn_and_stop",
    "with_epoch",
    "with_length",
    "xdecode",
]
