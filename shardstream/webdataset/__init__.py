"""Read and write shards under webdataset's names: ``import shardstream.webdataset as wds``."""

from shardstream import errors as _errors

try:
    from shardstream.webdataset import filters
except (ImportError, AttributeError) as error:  # it is missing, or lacks names of version 1.0
    raise _errors.OptionError(
        f"shardstream.webdataset runs the stages of webdataset 1.0 ({error}): {_errors.how_to_install('webdataset')}"
    ) from error

from webdataset.filters import (
    associate,
    batched,
    detshuffle,
    extract_keys,
    getfirst,
    info,
    pipelinefilter,
    rename_keys,
    rsample,
    select,
    shuffle,
    slice,
    transform_with,
    unbatched,
)

from shardstream.webdataset import (
    autodecode,
    cache,
    compat,
    extradatasets,
    handlers,
    shardlists,
    tariterators,
    tenbin,
    utils,
    writer,
)
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
    decode,
    map,
    map_dict,
    map_tuple,
    rename,
    to_tuple,
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
